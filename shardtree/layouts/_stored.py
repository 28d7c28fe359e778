"""StoredLayout: which file holds which part of a stored tensor."""

from __future__ import annotations

from dataclasses import dataclass

from .._deferred import notebook_html
from ._columns import ShardColumns


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayout:
    """Which file holds which part of a stored tensor, as a checkpoint's index says.

    Attributes:
        columns: of one tensor, a row a chunk; `rank` is the number of the file.
        files: their names in the checkpoint.
    """

    columns: ShardColumns
    files: tuple[str, ...]

    def _repr_html_(self) -> str:
        return notebook_html(self)
