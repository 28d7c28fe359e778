"""Strings in the headers of safetensors files, which the common state has under ``__metadata__``.

Programs store values in them that users of the tensors need, such as the scale of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import TreePath
from ...kit import HOLE, leaves_with_paths

TEXTS = "__metadata__"
"""Key of the strings, in a file's header and in the common state."""

# This string names the framework that wrote a file. The tensors don't need it, but transformers requires torch's.
_FRAMEWORK, _TORCH = "format", "pt"


def joined_texts(texts: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str | dict[str, str]]:
    """Return the header strings of all files of a model by name, except for the string under "format".

    That string names the framework. Where files have different strings under a name, the value is a dict of strings by
    file.

    Args:
        texts: Name and header strings of each file.

    Examples:
        >>> joined_texts([("a", {"format": "pt", "alpha": "16"}), ("b", {"format": "pt"})])
        {'alpha': '16'}
        >>> joined_texts([("a", {"hash": "1"}), ("b", {"hash": "2"})])
        {'hash': {'a': '1', 'b': '2'}}
    """
    by_name: dict[str, dict[str, str]] = {}
    for file, strings in texts:
        for name, text in strings.items():
            by_name.setdefault(name, {})[file] = text
    by_name.pop(_FRAMEWORK, None)
    return {
        name: next(iter(values)) if len(values := {*by_file.values()}) == 1 else by_file
        for name, by_file in by_name.items()
    }


def header_texts(common: Any) -> dict[str, str]:
    """Return the strings for each file's header: those of a common state, and "format": "pt" unless it has a "format".

    Args:
        common: Common state, with a `HOLE` in place of each shard; or None.

    Examples:
        >>> header_texts({"__metadata__": {"alpha": "16"}, "step": 7})
        {'format': 'pt', 'alpha': '16'}
    """
    texts = common.get(TEXTS) if isinstance(common, dict) else None
    strings = {name: text for name, text in texts.items() if _is_text(name, text)} if isinstance(texts, dict) else {}
    # The library writes them in any order; sorting makes equal saves equal files.
    return {_FRAMEWORK: strings.pop(_FRAMEWORK, _TORCH), **dict(sorted(strings.items()))}


def paths_without_room(common: Any) -> list[TreePath]:
    """Return the paths of a common state's values that headers cannot hold: all but strings under ``__metadata__``.

    Examples:
        >>> paths_without_room({"__metadata__": {"alpha": "16", "rank": 8}, "step": 7})
        [('__metadata__', 'rank'), ('step',)]
    """
    pairs = [(path, leaf) for path, leaf in leaves_with_paths(common) if leaf is not HOLE]
    texts = common.get(TEXTS) if isinstance(common, dict) else None
    is_dict = isinstance(texts, dict)
    return [path for path, leaf in pairs if not (is_dict and _has_room(path, leaf))]


def without_framework(common: Any) -> Any:
    """Return a common state without the header string named "format", which a load does not return either.

    Examples:
        >>> without_framework({"__metadata__": {"format": "pt", "alpha": "16"}})
        {'__metadata__': {'alpha': '16'}}
    """
    texts = common.get(TEXTS) if isinstance(common, dict) else None
    if not isinstance(texts, dict) or _FRAMEWORK not in texts:
        return common
    return {**common, TEXTS: {name: text for name, text in texts.items() if name != _FRAMEWORK}}


def _has_room(path: TreePath, leaf: Any) -> bool:
    return len(path) == 2 and path[0] == TEXTS and _is_text(path[1], leaf)


def _is_text(name: Any, text: Any) -> bool:
    return type(name) is str and type(text) is str
