"""Whether a target fits what is stored. What doesn't is data, whose text errors and explanations share."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np
import torch

from ...errors import plural
from ..geometry import Column, intersect, slices
from ..layouts import ShapeChange, TensorKind, shard_boxes, shard_columns
from ..mapping import ShardedTensor
from ..trees import differing_prefix, near_names, torch_converts
from ._without_scales import ScaledValues

# Dtypes that a load or a reshard converts, when it is asked to.

_SCALES = {torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else set()  # torch 2.6 hasn't
"""They hold powers of two only: a sign would be lost, and zero can't be represented."""


def convertible(before: torch.dtype, after: torch.dtype) -> bool:
    """Return whether values of one dtype may be converted to another: at most rounded, never with parts left out.

    Between floating-point dtypes, and between complex ones, as `torch.Tensor.to` does, which rounds, and makes
    infinities of what is too large. From bools to integers to floating-point to complex dtypes, not the other way:
    a fraction or an imaginary part would be lost silently. Between integers, where each value fits.

    Examples:
        >>> convertible(torch.float32, torch.bfloat16), convertible(torch.int64, torch.int32)
        (True, True)
        >>> convertible(torch.float32, torch.int64), convertible(torch.complex64, torch.float32)
        (False, False)
    """
    # Ranks of kinds order what can hold what: a conversion upwards keeps every value up to rounding.
    return before == after or (_rank(before) <= _rank(after) and after not in _SCALES and torch_converts(before, after))


def _rank(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    return 1 if is_integer(dtype) else 3 if dtype.is_complex else 2


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether a dtype holds integers; bools are none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


# The overlap of a shard with a tensor that is stored with another global shape.


@dataclass(frozen=True, slots=True)
class Overlap:
    """A box of a shard's elements.

    Attributes:
        start: where the enclosing box begins in the shard's flattened data, in elements.
        shape: of the enclosing box.
        part: slices of the enclosing box.
    """

    start: int
    shape: tuple[int, ...]
    part: tuple[slice, ...]

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return these elements of a shard's contiguous data, as a view."""
        return data.reshape(-1)[self.start : self.start + prod(self.shape)].view(self.shape)[self.part]


def overlaps(shard: ShardedTensor, global_shape: tuple[int, ...]) -> tuple[Overlap, ...]:
    """Return the boxes of a shard's elements that lie in a tensor of that global shape; none where it has no elements.

    Args:
        shard: one box, or a flat range, which consists of a few.
        global_shape: with as many axes as the shard's.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.arange(6).view(3, 2))
        >>> [overlap.of(shard.data).tolist() for overlap in overlaps(shard, (2, 9))]
        [[[0, 1], [2, 3]]]
    """
    columns = shard_columns([shard])
    # Columns describe a scalar as one axis of one index, so the whole tensor must be described in the same way.
    whole = np.array(global_shape or (1,), dtype=np.int64)[None]
    boxes = shard_boxes(columns.offset, columns.shape, columns.start, columns.stop)
    offset, shape = intersect(boxes.offset, boxes.shape, np.zeros_like(whole), whole)
    parts = []
    for row in np.flatnonzero((shape > 0).all(axis=1)).tolist():
        begin = (offset[row] - boxes.offset[row]).tolist()
        part = slices(begin, shape[row].tolist())
        parts.append(Overlap(int(boxes.position[row]), tuple(boxes.shape[row].tolist()), part))
    return tuple(parts)


def stored_elements(shard: ShardedTensor, global_shape: tuple[int, ...]) -> int:
    """Return how many of a shard's elements lie in a tensor of that global shape.

    Examples:
        >>> stored_elements(ShardedTensor.from_rank_offsets("w", torch.zeros(3, 2)), (2, 9))
        4
    """
    return sum(prod(one.stop - one.start for one in overlap.part) for overlap in overlaps(shard, global_shape))


@dataclass(frozen=True, slots=True)
class Unexpected:
    """Something that is requested and not stored.

    Attributes:
        key: the tensor's, or the object's unique key.
        near: a stored key that looks like it, None if there is none.
        is_object: whether it is a sharded object.
        path: where the common state has a plain tensor that is meant, as text; None if it has none.
        refusal: reason why it can't be read, if it is stored all the same.
    """

    key: str
    near: str | None = None
    is_object: bool = False
    path: str | None = None
    refusal: str | None = None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"can't be read: {self.text}"
        if self.path is not None:
            return f"not stored as shards: {self.text}"
        return f"not stored: {self.text}"

    @property
    def text(self) -> str:
        """The key, and what may be meant by it."""
        if self.path is not None:
            return f"{self.key!r} is a plain tensor of the common state at {self.path}"
        if self.refusal is not None:
            return f"{self.key!r}: {self.refusal}"
        return f"{self.key!r}" + (f" (did you mean {self.near!r}?)" if self.near else "")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that is stored with another global shape or dtype than requested.

    Attributes:
        key: the tensor.
        stored: what it is.
        asked: what it should be.
        cast: whether its dtype is converted already, where it can be.
    """

    key: str
    stored: TensorKind
    asked: TensorKind
    cast: bool = False

    def __str__(self) -> str:
        return f"{self.key!r}: checkpoint has {self.stored}, target asks for {self.asked}"


@dataclass(frozen=True, slots=True)
class Gap:
    """A shard of which not all elements are stored.

    Attributes:
        key: the tensor.
        offset: of the shard in it.
        stored: how many of its elements are.
        wanted: how many should be.
        why: Reason that the rest has no values, where the format knows it; else empty.
    """

    key: str
    offset: tuple[int, ...]
    stored: int
    wanted: int
    why: str = ""

    def __str__(self) -> str:
        more = f": {self.why}" if self.why else ""
        return f"{self.key!r} at {self.offset}: {self.stored} of {self.wanted} elements are stored{more}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tensor that is stored in a way that can't be read here, and why."""

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key!r}: {self.why}"


Misfit = Unexpected | Mismatch | Gap | Refusal | ScaledValues | ShapeChange
"""Why something that a target asks for can't be loaded; its text is one line."""


def find_unexpected(keys: Iterable[str], names: Collection[str], *, is_object: bool = False) -> tuple[Unexpected, ...]:
    """Return the keys that aren't stored, sorted, each with a stored key that looks like it and isn't requested itself.

    Args:
        keys: what is requested.
        names: what is stored.
        is_object: whether these are unique keys of objects.

    Examples:
        >>> print(*find_unexpected(["decoder.bais"], ["decoder.bias"]))
        not stored: 'decoder.bais' (did you mean 'decoder.bias'?)
    """
    requests = set(keys)
    absent = sorted(requests.difference(names))
    if not absent:
        return ()
    others = {name for name in names if name not in requests}
    # One prefix for all keys is tried first: a wrapped model is the usual cause, and closest matches, found
    # key by key, would point to different places.
    prefix = differing_prefix(absent, others)
    if prefix is not None:
        too_much, lacking = prefix
        return tuple(Unexpected(key, lacking + key[len(too_much) :], is_object) for key in absent)
    near = near_names(absent, others)
    return tuple(Unexpected(key, _by_number(key, others) or near.get(key), is_object) for key in absent)


_STATE = re.compile(r"(optimizer\.state\.[^.]+)\.(.*)", re.DOTALL)


def _by_number(key: str, names: Collection[str]) -> str | None:
    """Return the stored state of an optimizer's first parameter, where states stand under numbers instead of names."""
    match = _STATE.fullmatch(key)
    first = None if match is None or match[2].isdigit() else f"{match[1]}.0"
    return first if first in names else None


def wants_names(problem: Unexpected) -> bool:
    """Return whether an optimizer's state is asked for by its parameter's name, and stored under a number.

    Examples:
        >>> wants_names(*find_unexpected(["optimizer.state.exp_avg.w"], ["optimizer.state.exp_avg.0"]))
        True
    """
    return problem.near is not None and _by_number(problem.key, {problem.near}) is not None


@dataclass(frozen=True, slots=True)
class PrefixDifference:
    """Several keys that aren't stored, and of which each is stored with, or without, one prefix.

    Attributes:
        keys: what is requested.
        near: what each is stored as, in the same order.
        too_much: the prefix that is requested and not stored; else empty.
        lacking: the prefix that is stored and not requested; else empty.
    """

    keys: tuple[str, ...]
    near: tuple[str, ...]
    too_much: str
    lacking: str

    def __str__(self) -> str:
        how = f"without their prefix {self.too_much!r}" if self.too_much else f"with {self.lacking!r} before them"
        return f"{plural(len(self.keys), 'key')} are stored {how}: {self.keys[0]!r} as {self.near[0]!r}, and so on"

    @property
    def fix(self) -> str:
        """How to rename them all."""
        if self.too_much:
            return f"Take {self.too_much!r} off: st.rename(tree, lambda key: key.removeprefix({self.too_much!r}))."
        return f"Put {self.lacking!r} before them: st.prefix(tree, {self.lacking!r})."


def prefix_difference(problems: Sequence[Unexpected]) -> PrefixDifference | None:
    """Return the one prefix by which all keys differ from those that are stored; None if there is none.

    Args:
        problems: what `find_unexpected` found.

    Examples:
        >>> print(prefix_difference(find_unexpected(["module.w", "module.b"], ["w", "b"])))
        2 keys are stored without their prefix 'module.': 'module.b' as 'b', and so on
    """
    pairs = [(one.key, one.near) for one in problems if one.near is not None and one.path is None]
    if len(pairs) < 2 or len(pairs) < len(problems):
        return None
    keys, near = zip(*pairs, strict=True)
    first, name = pairs[0]
    too_much = first.removesuffix(name) if first.endswith(name) else ""
    lacking = name.removesuffix(first) if name.endswith(first) else ""
    if not (too_much or lacking) or any(lacking + key != too_much + name for key, name in pairs):
        return None
    return PrefixDifference(keys, near, too_much, lacking)


def misfit_lines(problems: Sequence[Misfit]) -> list[str]:
    """Return problems as lines, with one for all keys that differ from stored ones by one prefix.

    Examples:
        >>> misfit_lines(find_unexpected(["w", "b"], ["model.w", "model.b"]))
        ["2 keys are stored with 'model.' before them: 'b' as 'model.b', and so on"]
    """
    prefix = prefix_difference([one for one in problems if isinstance(one, Unexpected)])
    if prefix is None:
        return list(map(str, problems))
    return [str(prefix), *(str(one) for one in problems if not isinstance(one, Unexpected))]


def find_mismatches(
    shards: Iterable[ShardedTensor], kinds: Mapping[str, TensorKind], *, cast: bool = False
) -> tuple[Mismatch, ...]:
    """Return, of each tensor of which a shard doesn't fit what is stored, how it differs.

    Another global shape fits where the shard has `allow_shape_mismatch` and as many axes; another dtype where it is to
    be converted and can be.

    Args:
        shards: what is requested.
        kinds: for each of their keys, what is stored.
        cast: whether dtypes are converted.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> print(*find_mismatches([shard], {"w": TensorKind(torch.float32, (3,), 0)}))
        'w': checkpoint has (3,) float32, target asks for (2,) float32
    """
    mismatches: dict[str, Mismatch] = {}
    for shard in shards:
        kind = kinds[shard.key]
        same_dtype = shard.dtype == kind.dtype or (cast and convertible(kind.dtype, shard.dtype))
        may_differ = shard.allow_shape_mismatch and len(shard.global_shape) == len(kind.global_shape)
        if not (same_dtype and (shard.global_shape == kind.global_shape or may_differ)):
            # Without prepended axes: which axes a shard's data lacks makes no difference to what is stored.
            request = TensorKind(shard.dtype, shard.global_shape, 0)
            mismatches.setdefault(
                shard.key, Mismatch(shard.key, TensorKind(kind.dtype, kind.global_shape, 0), request, cast)
            )
    return tuple(mismatches.values())


def find_gaps(
    shards: Sequence[ShardedTensor],
    counts: Column,
    kinds: Mapping[str, TensorKind],
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Gap, ...]:
    """Return the shards of which not all elements are stored; those beyond the stored global shape don't count.

    Args:
        shards: what is requested; they fit what is stored.
        counts: how many elements of each are stored, int64 (shards,).
        kinds: for each of their keys, what is stored.
        reasons: Reasons for gaps, by key, where they are known.

    Examples:
        >>> import numpy as np, torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4))
        >>> print(*find_gaps([shard], np.array([3]), {"w": TensorKind(torch.float32, (4,), 0)}))
        'w' at (0,): 3 of 4 elements are stored
    """
    gaps = []
    for shard, count in zip(shards, counts.tolist(), strict=True):
        need = prod(shard.data_shape)
        if count != need and shard.allow_shape_mismatch:
            need = stored_elements(shard, kinds[shard.key].global_shape)
        if count != need:
            gaps.append(Gap(shard.key, shard.global_offset, count, need, reasons.get(shard.key, "")))
    return tuple(gaps)
