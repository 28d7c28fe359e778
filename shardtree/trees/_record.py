"""Records: what stands in a stored tree for an instance of a class that isn't imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_SIMPLE = (str, int, bool, float, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """An enum member, dataclass or named tuple, as a file holds it.

    Two records are equal if their types and fields are; tensors and arrays in them are equal if they are the same
    object.

    Attributes:
        type_name: module and qualified name of its class.
        fields: name -> value; of an enum member its `name` and `value`.

    Examples:
        >>> Record("train.Config", {"lr": 0.1}) == Record("train.Config", {"lr": 0.1})
        True
    """

    type_name: str
    fields: Mapping[str, Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return self.type_name == other.type_name and _equal(dict(self.fields), dict(other.fields))

    def __hash__(self) -> int:
        simple = tuple((name, value) for name, value in self.fields.items() if type(value) in _SIMPLE)
        return hash((self.type_name, frozenset(simple)))


def _equal(one: Any, other: Any) -> bool:
    if one is other or isinstance(one, torch.Tensor | np.ndarray) or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
