"""Differences of two trees: entries that only one of them has, and values with different bits."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import starmap
from math import prod
from typing import Any, Literal, TypeAlias, overload

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ...errors import MetadataError, TreePath
from ..deferred import leaf
from ..geometry import refuse
from ..lazy import as_integers, flat_bytes
from ..mapping import LocalNonpersistentObject, ShardedBase, has_elements, same_value
from ._at_paths import deepest
from ._join import Record, stored_entries
from ._nodes import Tree, refusing_depth, same_kind

_Finding: TypeAlias = tuple[Literal["left", "right", "both"], TreePath, tuple[Tree, Tree]]
"""The side that has the entry, its path, and the nodes of both trees there if both have one."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The paths at which two trees differ; true if there are any.

    Attributes:
        only_left: Paths that only the left tree has.
        only_right: Paths that only the right tree has.
        mismatch: Paths with different values in both trees, or containers of different kinds.
    """

    only_left: tuple[TreePath, ...] = ()
    only_right: tuple[TreePath, ...] = ()
    mismatch: tuple[TreePath, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.only_left or self.only_right or self.mismatch)


@dataclass(frozen=True, slots=True)
class WorstElement:
    """The element that exceeds its tolerance most in a pair of compared tensors.

    Attributes:
        path: Path of the tensors in their trees, or of the shards that hold them.
        index: Index of the element.
        left: Value in the left tree, as a Python number, which may be complex.
        right: Value in the right tree.
        error: Absolute difference of the two values.
        allowed: Tolerance of the element, ``atol + rtol * abs(right)``.
        count: Number of elements of the pair that exceed their tolerance.
    """

    path: TreePath
    index: tuple[int, ...]
    left: Any
    right: Any
    error: float
    allowed: float
    count: int

    @property
    def excess(self) -> float:
        """The error as a multiple of the tolerance; infinite if the tolerance is 0 or the error isn't finite."""
        return self.error / self.allowed if self.allowed and self.error < float("inf") else float("inf")


@dataclass(frozen=True, slots=True)
class NumericDifference(Difference):
    """The paths at which two trees differ by more than tolerances.

    Attributes:
        errors: Worst element of each leaf in `mismatch` that could be compared numerically, largest excess first.
    """

    errors: tuple[WorstElement, ...] = ()


@overload
def diff(x1: Tree, x2: Tree, prefix: TreePath = ()) -> Difference: ...
@overload
def diff(
    x1: Tree, x2: Tree, prefix: TreePath = (), *, rtol: float | None = None, atol: float | None = None
) -> NumericDifference: ...
@refusing_depth
def diff(
    x1: Tree, x2: Tree, prefix: TreePath = (), *, rtol: float | None = None, atol: float | None = None
) -> Difference:
    """Return the paths at which two trees differ, by default bit for bit.

    Values are equal if their types and bits are, tensors and arrays also by shape: NaN equals the same NaN, 0.0 isn't
    -0.0. Devices aren't compared. Shards are equal if their metadata and data are. Functions are equal if they run the
    same code with equal captured values, as in two factories of one lens. The class and order of dicts don't matter; a
    tuple may equal a namedtuple, but not a list. Records of one type are compared field by field.

    With tolerances, elements of floating-point and complex tensors, arrays and numbers of one dtype and shape are equal
    if they are at most ``atol + rtol * abs(right)`` apart, and any NaN equals any other NaN. The result is then a
    `NumericDifference`, which has the largest errors and their indices. Its `mismatch` begins with pairs that can't be
    compared numerically, such as different shapes; the other leaves follow, the worst first.

    Args:
        x1: The left tree.
        x2: The right tree.
        prefix: Path of both trees in a larger one; each path of the result begins with it.
        rtol: Tolerance relative to the right tree's elements. None counts as 0 if `atol` is given.
        atol: Absolute tolerance. None counts as 0 if `rtol` is given; if both are None, bits are compared.

    Raises:
        MetadataError: A tolerance isn't a number, or is negative or NaN.

    Examples:
        >>> diff({"a": 1, "b": [2, 3]}, {"b": [2, 4], "c": 5})
        Difference(only_left=(('a',),), only_right=(('c',),), mismatch=(('b', 1),))
        >>> bool(diff(float("nan"), float("nan")))
        False
        >>> left, right = {"w": torch.tensor([1.0, 2.0]), "b": 0.1}, {"w": torch.tensor([1.0, 2.5]), "b": 0.1001}
        >>> diff(left, right, rtol=1e-2).errors
        (WorstElement(path=('w',), index=(1,), left=2.0, right=2.5, error=0.5, allowed=0.025, count=1),)

    References:
        numpy.testing.assert_allclose; chex.assert_trees_all_close.
    """
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
        if tolerance is not None and not (is_number and tolerance >= 0):
            fix = "Pass a number of 0 or more, or None to compare bits."
            refuse("diff", name, repr(tolerance)[:100], "a number that is not negative", fix, error=MetadataError)
    findings = [*_findings(x1, x2, tuple(prefix))]
    sides = {side: tuple(path for where, path, _ in findings if where == side) for side in ("left", "right", "both")}
    if rtol is None and atol is None:
        return Difference(sides["left"], sides["right"], sides["both"])
    both = [(path, *nodes) for side, path, nodes in findings if side == "both"]
    mismatch, errors = leaf("beyond_tolerances")(both, rtol or 0, atol or 0, _same_value)
    return NumericDifference(sides["left"], sides["right"], mismatch, errors)


def _findings(left: Tree, right: Tree, path: TreePath) -> Iterator[_Finding]:
    mine, theirs = stored_entries(left), stored_entries(right)
    if mine is None or theirs is None:
        if not _same_value(left, right):
            yield "both", path, (left, right)
    elif (
        not same_kind(left, right)
        or isinstance(left, tuple) != isinstance(right, tuple)
        or (isinstance(left, Record) and left.type_name != right.type_name)
    ):
        yield "both", path, (left, right)
    else:
        for entry, child in mine.items():
            if entry in theirs:
                yield from _findings(child, theirs[entry], (*path, entry))
            else:
                yield "left", (*path, entry), (child, None)
        yield from (("right", (*path, entry), (None, child)) for entry, child in theirs.items() if entry not in mine)


def _same_value(left: Any, right: Any) -> bool:
    """Return whether two leaves are equal bit for bit."""
    # A tree and its edited copy share most leaves.
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _same_tensor(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        return _same_array(left, right)
    if isinstance(left, (float, complex)):
        return _float_bits(left) == _float_bits(right)
    if isinstance(left, ShardedBase):
        return _same_shard(left, right)
    if isinstance(left, LocalNonpersistentObject):
        return not diff(left.obj, right.obj)
    return same_value(left, right)


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if is_lazy(left) or is_lazy(right):  # uninitialised parameters have neither a shape nor bits
        return is_lazy(left) and is_lazy(right) and left.dtype == right.dtype
    if left.is_nested or right.is_nested:
        parts = zip(left.unbind(), right.unbind(), strict=False) if left.is_nested and right.is_nested else ()
        return left.is_nested == right.is_nested and left.size(0) == right.size(0) and all(starmap(_same_tensor, parts))
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    # Meta tensors have no bits to compare.
    if not has_elements(left) or not has_elements(right):
        return not has_elements(left) and not has_elements(right)
    if left.layout != torch.strided:
        return _same_tensor(left.to_dense(), right.to_dense())
    # Compared as bytes: for `torch.equal` NaN differs from itself, and 0.0 equals -0.0.
    return torch.equal(left, right) if left.is_quantized else torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return flat_bytes(as_integers(tensor).cpu())


def _same_array(left: Any, right: Any) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.hasobject:
        return not diff(left.tolist(), right.tolist())
    return bool(left.tobytes() == right.tobytes())


def _float_bits(value: complex) -> bytes:
    return struct.pack("dd", value.real, value.imag)


def _same_shard(left: ShardedBase, right: ShardedBase) -> bool:
    names = [field.name for field in fields(left) if field.name != "data"]  # type: ignore[arg-type]
    # `!=` comes first: it is several times as fast, and only functions need `same_value`.
    unequal = [name for name in names if getattr(left, name) != getattr(right, name)]
    same = all(same_value(getattr(left, name), getattr(right, name)) for name in unequal)
    return same and not diff(left.data, right.data)


_LONGEST = 60


_FEW = 4


_NUMBERS = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
}


def value_at(tree: Any, path: TreePath) -> str:
    """Return a short text for a tree's value at a path, for messages; 'nothing' if it has none.

    Examples:
        >>> value_at({"lr": 0.1}, ("lr",)), value_at({"lr": 0.1}, ("step",))
        ('0.1', 'nothing')
    """
    value, depth = deepest(tree, path)
    if depth < len(path):
        return "nothing"
    text = _value_text(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _value_text(value: Any) -> str:
    """Return a value as text: scalars and small tensors in full, other tensors by shape and dtype, the rest by type."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (torch.Tensor, np.ndarray)) and not (isinstance(value, torch.Tensor) and is_lazy(value)):
        text = f"{type(value).__name__} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        plain = value.dtype in _NUMBERS or getattr(value.dtype, "kind", "") in tuple("biufc")
        return f"{text} {value.tolist()}" if plain and prod(value.shape) <= _FEW else text
    return type(value).__name__
