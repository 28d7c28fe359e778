"""The hole: what stands in a tree where a leaf was taken out. Never None, which is a value."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Hole(Enum):
    """The type of `HOLE`; an Enum, so that copies and pickles are the same object and type checkers know ``is HOLE``.

    Examples:
        >>> import copy, pickle
        >>> copy.deepcopy(HOLE) is HOLE and pickle.loads(pickle.dumps(HOLE)) is HOLE
        True
    """

    HOLE = "HOLE"

    def __repr__(self) -> str:
        return "HOLE"


HOLE: Final = Hole.HOLE
