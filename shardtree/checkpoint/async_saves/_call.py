"""Saves on their way: what was scheduled, and isn't committed yet."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ...strategies import AsyncRequest


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One scheduled save.

    Attributes:
        index: which one of its queue's, from 0.
        request: what is saved.
        written: what this rank has written, once it has.
    """

    index: int
    request: AsyncRequest[Any]
    written: Future[Any]

    def __str__(self) -> str:
        folder = self.request.folder
        return f"async save {self.index}" + (f" to {folder.where()!r}" if folder is not None else "")


class Calls(deque[Call]):
    """A queue's saves on their way, in order.

    Attributes:
        is_committing: whether the first one is being committed: its finalizers may schedule others meanwhile, no more.
    """

    is_committing = False
