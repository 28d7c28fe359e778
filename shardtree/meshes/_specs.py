"""PartitionSpec: the mesh axes that cut each axis of a tensor; and specs for all tensors of a tree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeAlias

from ..core.geometry import integer, refuse
from ..core.layouts import TensorKind
from ..core.trees import key_matcher, match_key, stars
from ..errors import KeyMismatch, MetadataError, error_text
from ._mesh import Mesh, check_mesh

# The spec of one tensor.


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """One cut of a tensor's axis along a mesh axis, within the parts that earlier cuts left.

    Attributes:
        axis: Name of the mesh axis.
        split_factor: Number of equal blocks into which the tensor's axis is first cut. Each block is then cut into one
            piece per rank, so that every rank has a piece of each block.

    Raises:
        MetadataError: The axis isn't a name, or the factor isn't an integer of at least 1.

    Examples:
        >>> PartitionSpec((AxisSplit("dp", split_factor=2), AxisSplit("tp")))  # as FSDP2 over TP cuts rows
        PartitionSpec((AxisSplit(axis='dp', split_factor=2), AxisSplit(axis='tp', split_factor=1)))

    References:
        torch.distributed.tensor's Shard and _StridedShard, torch 2.13.
    """

    axis: str
    split_factor: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):
            fix = "Name an axis of the mesh."
            refuse("AxisSplit", "axis", type(self.axis).__name__, "a name", fix, error=MetadataError)
        if integer("AxisSplit", "split_factor", self.split_factor) < 1:
            fix = "Leave it out for one block."
            refuse("AxisSplit", "split_factor", self.split_factor, "at least 1", fix, error=MetadataError)


SpecEntry: TypeAlias = str | tuple[str, ...] | tuple[AxisSplit, ...] | None
"""Spec of one axis of a tensor: a mesh axis; several mesh axes that count as one, the first outermost; several splits,
applied one after the other; or None for an axis that isn't cut."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class PartitionSpec:
    """The mesh axes along which each axis of a tensor is cut, as in JAX; along other mesh axes it is replicated.

    Args:
        entries: Entry of each axis of the tensor: a mesh axis, a tuple of mesh axes, an `AxisSplit`, a tuple of splits,
            or None. Axes beyond the last entry aren't cut. An axis that isn't a multiple of its number of parts is cut
            as by `torch.chunk`: the last parts are shorter or empty.
        at: Mesh coordinates of the ranks that hold the tensor; other ranks have no part of it. ``at={"pp": 1}`` is for
            the layers of a pipeline's second stage, for example.

    Raises:
        MetadataError: An entry has another type, `at` isn't a mapping from names to integers, or a mesh axis occurs
            twice.

    Examples:
        >>> PartitionSpec("tp", None), PartitionSpec(("dp", "tp")), PartitionSpec(at={"pp": 0})
        (PartitionSpec('tp', None), PartitionSpec(('dp', 'tp')), PartitionSpec(at={'pp': 0}))

    References:
        jax.sharding.PartitionSpec.
    """

    entries: tuple[SpecEntry, ...]
    at: tuple[tuple[str, int], ...]

    def __init__(self, *entries: SpecEntry | AxisSplit, at: Mapping[str, int] | None = None) -> None:
        object.__setattr__(self, "entries", tuple(map(_entry, entries)))
        object.__setattr__(self, "at", _at({} if at is None else at))
        counts = Counter([*(split.axis for entry in self.entries for split in splits(entry)), *dict(self.at)])
        twice = [repr(axis) for axis, count in counts.items() if count > 1]
        if twice:
            heading, fix = f"{self!r}: a mesh axis occurs twice", "Use each axis of the mesh at most once."
            raise MetadataError(error_text(heading, offenders=twice, fix=fix))

    def __repr__(self) -> str:
        parts = [*map(repr, self.entries), *([f"at={dict(self.at)}"] if self.at else [])]
        return f"PartitionSpec({', '.join(parts)})"

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes along which the tensor is cut, in the order of the entries."""
        return tuple(split.axis for entry in self.entries for split in splits(entry))


P = PartitionSpec
"""Short name of PartitionSpec, as in JAX."""


def splits(entry: SpecEntry) -> Iterator[AxisSplit]:
    """Yield the mesh axes of an entry as splits, one for each axis name or `AxisSplit`.

    If the entry is a tuple of names, don't apply the splits one after the other: as in JAX, the tensor's axis is cut
    once, into as many parts as the named axes have ranks together.

    Examples:
        >>> list(splits("tp"))
        [AxisSplit(axis='tp', split_factor=1)]
    """
    for axis in (entry,) if isinstance(entry, str) else entry or ():
        yield AxisSplit(axis) if isinstance(axis, str) else axis


def _entry(entry: Any) -> SpecEntry:
    """Return an entry normalised: a name for a tuple of one name, None for an empty tuple."""
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, AxisSplit):
        entry = (entry,)
    kinds = {type(item) for item in entry} if isinstance(entry, tuple) else {type(entry)}
    if not isinstance(entry, tuple) or (kinds - {str} and kinds - {AxisSplit}):
        expected = "the name of a mesh axis, a tuple of names, a tuple of AxisSplit, or None"
        raise MetadataError(error_text("PartitionSpec: unusable entry", found=repr(entry)[:200], expected=expected))
    return entry[0] if len(entry) == 1 and kinds == {str} else entry or None


def _at(at: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(at, Mapping) or not all(isinstance(axis, str) for axis in at):
        found, expected = repr(at)[:200], "a dict from mesh axes to indices"
        refuse("PartitionSpec", "at", found, expected, "Pass a dict such as at={'pp': 1}.", error=MetadataError)
    # Sorted, so that equal specs compare equal, in whatever order `at` was written.
    return tuple((axis, integer("PartitionSpec", f"at[{axis!r}]", index)) for axis, index in sorted(at.items()))


def check_spec(key: str, kind: TensorKind, mesh: Mesh, spec: PartitionSpec) -> None:
    """Raise unless a spec fits a tensor and a mesh.

    Args:
        key: Key of the tensor.
        kind: Dtype and shape of the tensor, without prepended axes.
        mesh: Mesh of the ranks.
        spec: Spec of the tensor.

    Raises:
        MetadataError: The spec has more entries than the tensor has axes, or names an axis that the mesh lacks, or an
            index outside a mesh axis; or the tensor has prepended axes.

    Examples:
        >>> import torch
        >>> check_spec("w", TensorKind(torch.float32, (4, 6), 0), Mesh(tp=2), PartitionSpec(None, "tp"))
    """
    if not isinstance(kind, TensorKind):
        fix = "Pass TensorKind(dtype, global_shape, 0)."
        refuse(repr(key), "kind", type(kind).__name__, "a TensorKind", fix, error=MetadataError)
    if kind.prepend_axis_num:
        fix = "Pass the TensorKind of the whole tensor, with prepend_axis_num=0."
        raise MetadataError(error_text(f"{key!r}: a spec cannot describe prepended axes", found=kind, fix=fix))
    check_fits(repr(key), kind.global_shape, mesh, spec)


def check_fits(subject: str, global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> None:
    """Raise MetadataError unless a value is a spec that fits a shape and a mesh.

    Examples:
        >>> check_fits("'w'", (4, 6), Mesh(tp=2), PartitionSpec(None, "tp"))
    """
    check_mesh(mesh)
    checked_spec(subject, spec)
    if len(spec.entries) > len(global_shape):
        expected, fix = f"at most {len(global_shape)} entries", "Give at most one entry for each axis of the tensor."
        heading = f"{subject} of shape {global_shape}: its spec is too long"
        raise MetadataError(error_text(heading, found=spec, expected=expected, fix=fix))
    unknown = [repr(axis) for axis in (*spec.axes, *dict(spec.at)) if axis not in mesh.shape]
    unknown += [f"{axis}={index}" for axis, index in spec.at if not 0 <= index < mesh.shape.get(axis, index + 1)]
    if unknown:
        heading = f"{subject}: {spec} has axes or indices that {mesh} does not have"
        fix = "Use axes of the mesh; an index in at= must be at least 0 and less than the size of its axis."
        raise MetadataError(error_text(heading, offenders=unknown, fix=fix))


def checked_spec(subject: str, spec: Any) -> PartitionSpec:
    """Return a spec, or raise MetadataError if the value isn't one."""
    if not isinstance(spec, PartitionSpec):
        found, fix = type(spec).__name__, "Pass PartitionSpec() for a tensor that is not cut."
        raise MetadataError(
            error_text(f"{subject}: the value is not a spec", found=found, expected="a PartitionSpec", fix=fix)
        )
    return spec


# Specs for all tensors of a tree: one, a tree of them, patterns of keys, or a function.

SpecFunction: TypeAlias = Callable[[str, Any], PartitionSpec]
"""Function from a tensor's key and leaf to its spec."""

Specs: TypeAlias = Any
"""A PartitionSpec for all tensors, a tree of specs, or a `SpecFunction`. In a tree, each spec holds for all tensors at
its path and below, as in JAX; plain values need no spec. A container of specs may have another class than the tree's,
if its entries are the same: for example, a dict of fields for a registered class or a named tuple."""


_NEAR: Final = 0.75  # difflib's measure: `uup` is 0.8 from `up`, `gate` 0.75 from `agte`, `head` 0.44 from `embed`


@dataclass(frozen=True, slots=True, eq=False)
class PatternSpecs:
    """A `SpecFunction` that chooses a tensor's spec by patterns of keys; the result of `specs_by_pattern`.

    Attributes:
        rows: (pattern, predicate of the keys that it matches, spec) for each pattern; the first match counts.
        default: Spec of keys that no pattern matches; None makes them an error.
        allow_unused: Whether patterns may match no key.

    Examples:
        >>> specs_by_pattern({"**.bias": PartitionSpec("tp")})("layers.3.up.bias", None)
        PartitionSpec('tp')
    """

    rows: tuple[tuple[str, Callable[[str], bool], PartitionSpec], ...]
    default: PartitionSpec | None
    allow_unused: bool

    def __call__(self, key: str, leaf: Any) -> PartitionSpec:
        """Return the spec of a tensor; raise KeyMismatch if no pattern matches its key and there is no default."""
        row = self.first(key)
        spec = self.default if row is None else row[2]
        if spec is None:
            fix = "Add a pattern for it, or pass default=PartitionSpec() for tensors that are not cut."
            patterns = ", ".join(repr(pattern) for pattern, _, _ in self.rows)
            heading = f"specs_by_pattern: no pattern matches {key!r}"
            raise KeyMismatch(error_text(heading, found=patterns[:1000] or "no patterns", fix=fix))
        return spec

    def first(self, key: str) -> tuple[str, Callable[[str], bool], PartitionSpec] | None:
        """Return the first of `rows` whose pattern matches a key, or None."""
        return next((row for row in self.rows if row[1](key)), None)


def specs_by_pattern(
    patterns: Mapping[str, PartitionSpec],
    default: PartitionSpec | None = None,
    *,
    unused: Literal["raise", "allow"] = "raise",
) -> SpecFunction:
    """Return the function that chooses a tensor's spec by the first pattern that matches its key.

    Args:
        patterns: Spec of each pattern of keys, in which ``*`` matches one part between dots and ``**`` any number.
        default: Spec of keys that no pattern matches; without it, they are an error.
        unused: Treatment of a pattern that is no key's first match, most likely a typing error. With "raise", functions
            that see the whole tree raise, such as `shard`; `from_local`, which sees one rank's tensors, raises only if
            the pattern nearly matches a key that got the default. "allow" is for specs that several models share.

    Returns:
        Function ``(key, leaf) -> PartitionSpec``, which raises KeyMismatch for a key that no pattern matches.

    Raises:
        TreeError: A pattern isn't a text, or is empty.
        MetadataError: A value of `patterns` or the default isn't a PartitionSpec, `patterns` isn't a dict, or `unused`
            is neither "raise" nor "allow".

    Examples:
        >>> specs = specs_by_pattern({"layers.*.up.weight": PartitionSpec("tp")}, default=PartitionSpec())
        >>> specs("layers.3.up.weight", None), specs("norm.weight", None)
        (PartitionSpec('tp'), PartitionSpec())
    """
    if not isinstance(patterns, Mapping):
        found, fix = type(patterns).__name__, "Pass a dict such as {'**.weight': PartitionSpec('tp')}."
        raise MetadataError(error_text("specs_by_pattern: patterns is not a dict of specs", found=found, fix=fix))
    if unused not in ("raise", "allow"):
        fix = "Pass 'allow' for specs shared by models."
        refuse("specs_by_pattern", "unused", repr(unused)[:200], "'raise' or 'allow'", fix, error=MetadataError)
    if default is not None:
        checked_spec("default", default)
    # Compiled once: the function is called for each tensor of a tree.
    rows = (
        (pattern, key_matcher([pattern]), checked_spec(f"pattern {pattern!r}", spec))
        for pattern, spec in patterns.items()
    )
    return PatternSpecs(tuple(rows), default, unused == "allow")


def check_patterns(doing: str, specs: Specs, keys: Iterable[str], *, whole: bool) -> None:
    """Raise if a pattern was most likely meant for a tensor that got another spec.

    Args:
        doing: Name of the caller in errors.
        specs: Specs in any form that `shard` takes; only those of `specs_by_pattern` are checked.
        keys: Keys of the tree's tensors.
        whole: Whether `keys` are those of all ranks, not of a single rank.

    Raises:
        KeyMismatch: A pattern is unused: it matches no key, or only keys that an earlier pattern matches. With a single
            rank's keys, this is an error only if the pattern nearly matches a key that got the default.

    Examples:
        >>> specs = specs_by_pattern({"embed.weight": PartitionSpec("tp")}, default=PartitionSpec())
        >>> check_patterns("from_local", specs, ["layers.0.weight"], whole=False)
    """
    if not isinstance(specs, PatternSpecs) or specs.allow_unused:
        return
    first = {key: row and row[0] for key in keys for row in [specs.first(key)]}
    unused = [pattern for pattern, _, _ in specs.rows if pattern not in first.values()]
    # Keys that differ in numbers alone, as those of layers do, count once.
    unmatched_keys = {re.sub(r"\d+", "0", key): key for key, pattern in first.items() if pattern is None}.values()
    near = {pattern: next((key for key in unmatched_keys if _nearly_fits(pattern, key)), "") for pattern in unused}
    wrong = [f"{pattern!r}" + f", nearly {key!r}" * bool(key) for pattern, key in near.items() if whole or key]
    if wrong:
        fix = "Correct misspelled patterns, and put the others before patterns that match the same keys."
        fix += "\n  If other models use these specs too, pass unused='allow' to `specs_by_pattern`."
        raise KeyMismatch(error_text(f"{doing}: patterns of specs match no tensor", offenders=wrong, fix=fix))


def _nearly_fits(pattern: str, key: str) -> bool:
    """Return whether a key would match a pattern if one part of the pattern were spelled a little differently."""
    parts = pattern.split(".")
    for at, part in enumerate(parts):
        match = None if "*" in part else match_key(".".join([*parts[:at], "*", *parts[at + 1 :]]), key)
        if match is None:
            continue
        own = match[stars(".".join(parts[:at]))]
        # Numbers are told apart on purpose: `layers.0` isn't meant for `layers.1`.
        if _letters(own) != _letters(part) and get_close_matches(part, [own], cutoff=_NEAR):
            return True
    return False


def _letters(part: str) -> str:
    return "".join(filter(str.isalpha, part))
