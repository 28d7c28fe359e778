"""A value of the common state in a few words, and as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..codec import dtype_name
from ..errors import plural
from ..mapping import LocalNonpersistentObject
from ..trees import HOLE, Record

_LONGEST = 60  # characters of a value
_NAMES = 6  # of a mapping's entries


def entries_of(common: Any) -> dict[str, Any]:
    """Return the top-level entries of a common state, by name; those of a list by position.

    Examples:
        >>> entries_of({"step": 7}), entries_of([True])
        ({'step': 7}, {'0': True})
    """
    if isinstance(common, Mapping):
        return {_name(name): value for name, value in common.items()}
    if isinstance(common, list | tuple):
        return {str(place): value for place, value in enumerate(common) if value is not HOLE}
    return {} if common is HOLE else {"": common}


def _name(key: object) -> str:
    try:
        return str(key)
    except ValueError:  # an integer of more digits than Python writes
        return f"({kind_of(key)} of very many digits)"


def kind_of(value: Any) -> str:
    """Return the name of a value's type; of a record that of the class that it was.

    Examples:
        >>> kind_of(7), kind_of(Record("train.Config", {}))
        ('int', 'train.Config')
    """
    return value.type_name if isinstance(value, Record) else type(value).__name__


def brief(value: Any) -> str:
    """Return a value in a few words, without looking far into it.

    Examples:
        >>> brief(7), brief({"lr": 0.1, "eps": 1e-8}), brief(torch.zeros(2, 3))
        ('7', '2 entries: lr, eps', 'float32 (2, 3)')
    """
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    names = _names(value)
    if names is not None:
        shown = ", ".join(names[:_NAMES]) + (", ..." if len(names) > _NAMES else "")
        return _short(f"{plural(len(names), 'entry').replace('entrys', 'entries')}{': ' * bool(names)}{shown}")
    if isinstance(value, str | bytes | bytearray):
        return _short(repr(value[:_LONGEST]))
    if isinstance(value, bool | int | float | complex | None | np.generic | torch.dtype | torch.device):
        return _short(_number(value))
    if isinstance(value, list | tuple | set | frozenset):
        return plural(len(value), "item")
    return ""


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; what JSON doesn't know becomes a few words.

    Examples:
        >>> plain({"a": (1, None), 2: float("inf")})
        {'a': [1, None], '2': 'inf'}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if isinstance(value, Mapping):
        return {_name(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return brief(value) or kind_of(value)


def _names(value: Any) -> list[str] | None:
    if isinstance(value, LocalNonpersistentObject):
        return None
    if isinstance(value, Record):
        return list(value.fields)
    if isinstance(value, argparse.Namespace):
        return list(vars(value))
    return [_name(name) for name in value] if isinstance(value, Mapping) else None


def _number(value: Any) -> str:
    # An int of more than 4300 digits has no decimal text in Python.
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return str(value) if isinstance(value, np.generic) else repr(value)


def _short(words: str) -> str:
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."
