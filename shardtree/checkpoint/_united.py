"""Where a common state is the union of ranks' dicts, as metadata.json says it in the formats of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CorruptCheckpoint, error_text
from ..trees import United

_FIELD = "united"
_MOST = 10_000  # entries, so that metadata.json stays small; beyond, a load returns the whole union


def united_field(united: United) -> dict[str, Any]:
    """Return the field of metadata.json; nothing where no dict was united, or entries can't be said in JSON.

    Examples:
        >>> united_field({("optim", "lr"): {"type"}}), united_field({("optim",): {(1, 2)}}), united_field({})
        ({'united': [[['optim', 'lr'], ['type']]]}, {}, {})
    """
    listed = [[list(path), sorted(shared, key=str)] for path, shared in united.items()]
    is_sound = all(_are_entries(entries) for pair in listed for entries in pair)
    few = sum(len(path) + len(shared) for path, shared in listed) <= _MOST
    return {_FIELD: listed} if listed and is_sound and few else {}


def united_of(fields: Mapping[str, Any]) -> United:
    """Return of which dicts of a checkpoint's common state ranks had keys of their own, as far as it says so.

    Raises:
        CorruptCheckpoint: the field isn't one that a save writes.

    Examples:
        >>> united_of({"united": [[["optim", "lr"], ["type"]]]})
        {('optim', 'lr'): frozenset({'type'})}
    """
    listed = fields.get(_FIELD, [])
    if not isinstance(listed, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_are_entries, pair)) for pair in listed
    ):
        raise CorruptCheckpoint(error_text(f"open: {_FIELD!r} in metadata.json is not sound", found=repr(listed)[:200]))
    return {tuple(path): frozenset(shared) for path, shared in listed}


def _are_entries(entries: Any) -> bool:
    return isinstance(entries, list) and all(type(entry) in (str, int) for entry in entries)
