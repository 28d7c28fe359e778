"""What errors say, to the letter: calls that fail, beside a file of what each of them says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardtree.errors import CheckpointingException


def said(call: Callable[[], Any]) -> str:
    """Return the kind and the text of the error that a call raises, and its notes, each once."""
    with pytest.raises(CheckpointingException) as caught:
        call()
    notes = dict.fromkeys(getattr(caught.value, "__notes__", []))
    return "\n".join([f"{type(caught.value).__name__}: {caught.value}", *notes])


def read_messages(file: Path) -> dict[str, str]:
    """Return the texts of a file by their names, which stand above them behind a ``#``."""
    parts = (part.partition("\n") for part in file.read_text().removeprefix("# ").split("\n\n# "))
    return {name: text.strip() for name, _, text in parts}
