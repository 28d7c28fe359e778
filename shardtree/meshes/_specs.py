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
    """One cut of a tensor's axis along one axis of a mesh, applied to what the cuts before it left.

    Attributes:
        axis: the mesh's axis.
        split_factor: how many blocks are cut, a piece of each for every rank; more than one interleaves the ranks.

    Raises:
        MetadataError: the axis isn't a name, or the factor no integer of at least 1.

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
"""How one axis of a tensor is cut: along one axis of the mesh, along several as if they were one (the first outermost),
by splits one after the other, or not at all."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class PartitionSpec:
    """How a tensor is cut: for each of its axes the axes of a mesh, as in JAX; it is replicated along the others.

    Args:
        entries: for each axis of the tensor a mesh axis, a tuple of them, an `AxisSplit`, a tuple of those, or None.
            Axes beyond the last entry aren't cut. An axis that isn't a multiple of its number of parts is cut as
            `torch.chunk` does: into equal pieces, but the last ones, which are shorter or have nothing.
        at: ranks that hold the tensor at all, by their index along axes of the mesh, as in ``at={"pp": 1}`` for the
            layers of a pipeline's second stage.

    Raises:
        MetadataError: an entry is none of these, `at` isn't a mapping from names to integers, or a mesh axis occurs
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
            what, fix = f"{self!r}: a mesh axis occurs twice", "Cut along each axis of the mesh once."
            raise MetadataError(error_text(what, offenders=twice, fix=fix))

    def __repr__(self) -> str:
        parts = [*map(repr, self.entries), *([f"at={dict(self.at)}"] if self.at else [])]
        return f"PartitionSpec({', '.join(parts)})"

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the tensor is cut along, in the order in which they occur."""
        return tuple(split.axis for entry in self.entries for split in splits(entry))


P = PartitionSpec
"""The short name, as in JAX."""


def splits(entry: SpecEntry) -> Iterator[AxisSplit]:
    """Yield the mesh axes of an entry as splits; those of a tuple of names count as one axis together.

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
        expected = "a mesh axis, a tuple of them, a tuple of AxisSplit, or None"
        raise MetadataError(error_text("PartitionSpec: not an entry", found=repr(entry)[:200], expected=expected))
    return entry[0] if len(entry) == 1 and kinds == {str} else entry or None


def _at(at: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(at, Mapping) or not all(isinstance(axis, str) for axis in at):
        found, expected = repr(at)[:200], "indices by the mesh's axes"
        refuse("PartitionSpec", "at", found, expected, "Pass at={'pp': 1}, say.", error=MetadataError)
    # Sorted, so that equal specs compare equal, in whatever order `at` was written.
    return tuple((axis, integer("PartitionSpec", f"at[{axis!r}]", index)) for axis, index in sorted(at.items()))


def check_spec(key: str, kind: TensorKind, mesh: Mesh, spec: PartitionSpec) -> None:
    """Raise unless a spec fits a tensor and a mesh.

    Args:
        key: the tensor's.
        kind: what it is; without prepended axes.
        mesh: the ranks.
        spec: how it is to be cut.

    Raises:
        MetadataError: the spec has more entries than the tensor has axes, or names what the mesh hasn't; or the tensor
            has prepended axes.

    Examples:
        >>> import torch
        >>> check_spec("w", TensorKind(torch.float32, (4, 6), 0), Mesh(tp=2), PartitionSpec(None, "tp"))
    """
    if not isinstance(kind, TensorKind):
        fix = "Pass TensorKind(dtype, global_shape, 0)."
        refuse(repr(key), "its kind", type(kind).__name__, "a TensorKind", fix, error=MetadataError)
    if kind.prepend_axis_num:
        fix = "Describe the whole tensor, with all its axes."
        raise MetadataError(error_text(f"{key!r}: a spec for a tensor with prepended axes", found=kind, fix=fix))
    check_fits(repr(key), kind.global_shape, mesh, spec)


def check_fits(subject: str, global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> None:
    """Raise MetadataError unless a spec fits a shape and a mesh, and is one.

    Examples:
        >>> check_fits("'w'", (4, 6), Mesh(tp=2), PartitionSpec(None, "tp"))
    """
    check_mesh(mesh)
    checked_spec(subject, spec)
    if len(spec.entries) > len(global_shape):
        expected, fix = f"at most {len(global_shape)} entries", "Give one for each axis of the tensor."
        what = f"{subject} of shape {global_shape}: its spec is too long"
        raise MetadataError(error_text(what, found=spec, expected=expected, fix=fix))
    unknown = [repr(axis) for axis in (*spec.axes, *dict(spec.at)) if axis not in mesh.shape]
    unknown += [f"{axis}={index}" for axis, index in spec.at if not 0 <= index < mesh.shape.get(axis, index + 1)]
    if unknown:
        what, fix = f"{subject}: {spec} names what {mesh} hasn't", "Use the mesh's own axes."
        raise MetadataError(error_text(what, offenders=unknown, fix=fix))


def checked_spec(subject: str, spec: Any) -> PartitionSpec:
    """Return a spec; what isn't one raises MetadataError."""
    if not isinstance(spec, PartitionSpec):
        found, fix = type(spec).__name__, "Pass PartitionSpec() for a tensor that isn't cut."
        raise MetadataError(error_text(f"{subject}: not a spec", found=found, expected="a PartitionSpec", fix=fix))
    return spec


# Specs for all tensors of a tree: one, a tree of them, patterns of keys, or a function.

SpecFunction: TypeAlias = Callable[[str, Any], PartitionSpec]
"""From a tensor's key and its leaf to how it is cut."""

Specs: TypeAlias = Any
"""A PartitionSpec for all tensors, a tree of them, or a function. In a tree each spec holds for all tensors at its
place and below, as in JAX; plain values need none. Its containers may be of other classes, with the same entries: a
dict of fields for a registered class or a named tuple, say."""


_NEAR: Final = 0.75  # difflib's measure: `uup` is 0.8 from `up`, `gate` 0.75 from `agte`, `head` 0.44 from `embed`


@dataclass(frozen=True, slots=True, eq=False)
class PatternSpecs:
    """Specs by patterns of keys; a `SpecFunction`. `specs_by_pattern` makes it.

    Attributes:
        rows: the patterns, as texts and as functions of keys, and their specs; the first that fits a key counts.
        default: the spec of keys that no pattern fits; None where they are an error.
        allow_unused: whether patterns may fit no key.

    Examples:
        >>> specs_by_pattern({"**.bias": PartitionSpec("tp")})("layers.3.up.bias", None)
        PartitionSpec('tp')
    """

    rows: tuple[tuple[str, Callable[[str], bool], PartitionSpec], ...]
    default: PartitionSpec | None
    allow_unused: bool

    def __call__(self, key: str, leaf: Any) -> PartitionSpec:
        """Return a tensor's spec; KeyMismatch where no pattern fits its key, and there is no default."""
        row = self.first(key)
        spec = self.default if row is None else row[2]
        if spec is None:
            fix = "Add a pattern for it, or pass default=PartitionSpec() for tensors that aren't cut."
            patterns = ", ".join(repr(pattern) for pattern, _, _ in self.rows)
            what = f"specs_by_pattern: no pattern matches {key!r}"
            raise KeyMismatch(error_text(what, found=patterns[:1000] or "no patterns", fix=fix))
        return spec

    def first(self, key: str) -> tuple[str, Callable[[str], bool], PartitionSpec] | None:
        """Return the row of the first pattern that fits a key, None if none does."""
        return next((row for row in self.rows if row[1](key)), None)


def specs_by_pattern(
    patterns: Mapping[str, PartitionSpec],
    default: PartitionSpec | None = None,
    *,
    unused: Literal["raise", "allow"] = "raise",
) -> SpecFunction:
    """Return the function that gives a tensor the spec of the first pattern that fits its key.

    Args:
        patterns: keys, in which ``*`` matches one part between dots and ``**`` any number of them.
        default: for keys that no pattern matches; without, they are an error.
        unused: what becomes of a pattern that is no key's first one, most likely a typing error. `shard` and others
            that see the whole tree raise; `from_local` sees one rank's tensors, and raises only where the pattern
            nearly fits a key that got the default. "allow" is for specs that models share.

    Returns:
        ``(key, leaf) -> PartitionSpec``, which raises KeyMismatch for a key that no pattern matches.

    Raises:
        TreeError: a pattern isn't a text, or is empty.
        MetadataError: a pattern's value, or the default, isn't a PartitionSpec; or `patterns` isn't a dict, or `unused`
            neither of the two.

    Examples:
        >>> specs = specs_by_pattern({"layers.*.up.weight": PartitionSpec("tp")}, default=PartitionSpec())
        >>> specs("layers.3.up.weight", None), specs("norm.weight", None)
        (PartitionSpec('tp'), PartitionSpec())
    """
    if not isinstance(patterns, Mapping):
        found, fix = type(patterns).__name__, "Say which keys a spec is for: {'**.weight': PartitionSpec('tp')}."
        raise MetadataError(error_text("specs_by_pattern: not a dict of specs", found=found, fix=fix))
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
    """Raise where a pattern was most likely meant for a tensor that has another spec now.

    Args:
        doing: for the message.
        specs: of any form; only those of `specs_by_pattern` are looked at.
        keys: of the tree's tensors.
        whole: whether these are all tensors that there are, or those of one rank.

    Raises:
        KeyMismatch: a pattern is the first one of no key, if these are all; else, one nearly fits a key that got the
            default.

    Examples:
        >>> specs = specs_by_pattern({"embed.weight": PartitionSpec("tp")}, default=PartitionSpec())
        >>> check_patterns("from_local", specs, ["layers.0.weight"], whole=False)
    """
    if not isinstance(specs, PatternSpecs) or specs.allow_unused:
        return
    first = {key: row and row[0] for key in keys for row in [specs.first(key)]}
    unused = [pattern for pattern, _, _ in specs.rows if pattern not in first.values()]
    # One key of those that differ in numbers alone, which layers have.
    rest = {re.sub(r"\d+", "0", key): key for key, pattern in first.items() if pattern is None}.values()
    near = {pattern: next((key for key in rest if _nearly_fits(pattern, key)), "") for pattern in unused}
    wrong = [f"{pattern!r}" + f", nearly {key!r}" * bool(key) for pattern, key in near.items() if whole or key]
    if wrong:
        fix = (
            "Correct it, put it before those that fit its keys too, or pass unused='allow' for specs shared by models."
        )
        raise KeyMismatch(error_text(f"{doing}: patterns of specs that fit no tensor", offenders=wrong, fix=fix))


def _nearly_fits(pattern: str, key: str) -> bool:
    """Return whether a key would fit a pattern if one part of the pattern were spelled a little differently."""
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
