"""Lenses by patterns of keys, as those who choose among several are given them."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import MetadataError
from ...geometry import refuse
from ._lens import Lens, check_function


def checked_lenses(doing: str, lenses: Mapping[str, Lens | None]) -> dict[str, Lens | None]:
    """Return a mapping of its own from patterns to lenses, None where a tensor stays as it is.

    Raises:
        MetadataError: it isn't one.

    Examples:
        >>> checked_lenses("lenses_by_pattern", {"**.v_proj.**": None})
        {'**.v_proj.**': None}
    """
    if not isinstance(lenses, Mapping) or not all(isinstance(pattern, str) for pattern in lenses):
        fix = "Pass a lens for each pattern of keys."
        refuse(doing, "lenses", type(lenses).__name__, "patterns and lenses", fix, error=MetadataError)
    for pattern, lens in lenses.items():
        if lens is not None:
            check_function(doing, f"lenses[{pattern!r}]", lens)
    return dict(lenses)
