"""StoredLayout: which file holds which part of a stored tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._deferred import notebook_html
from ..errors import plural
from ._columns import ShardColumns


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredLayout:
    """Which file holds which part of a stored tensor, as a checkpoint's index says.

    Attributes:
        columns: of one tensor, a row a chunk; `rank` is the number of the file.
        files: their names in the checkpoint.
    """

    columns: ShardColumns
    files: tuple[str, ...]

    def __repr__(self) -> str:
        pieces, tensors = plural(len(self.columns), "piece"), plural(len(self.columns.keys), "tensor")
        return f"StoredLayout({pieces} of {tensors} in {plural(np.unique(self.columns.rank).size, 'file')})"

    def _repr_html_(self) -> str:
        return notebook_html(self)
