"""Misfits: records of reasons why a target can't be loaded. Errors and explanations print them alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...errors import plural
from ..layouts import ShapeChange, TensorKind
from ..offences import offence_text
from ._convert import convertible
from ._without_scales import ScaledValues


@dataclass(frozen=True, slots=True)
class Unexpected:
    """A requested tensor or object that isn't stored.

    Attributes:
        key: Key of the tensor, or unique key of the object.
        near: Most similar stored key; None if no stored key is similar.
        is_object: Whether the request is a sharded object.
        path: Path, as text, of a stored plain tensor that the request probably means; None if there is none.
        refusal: Reason why the tensor can't be read although it is stored; None if it isn't stored.
    """

    where: ClassVar[str] = ""

    key: str
    near: str | None = None
    is_object: bool = False
    path: str | None = None
    refusal: str | None = None

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The problem, with the most similar stored key as a suggestion."""
        if self.path is not None:
            return f"not stored as shards: it is a plain tensor of the common state at {self.path}"
        if self.refusal is not None:
            return f"cannot be read: {self.refusal}"
        return "not stored" + (f" (did you mean {self.near!r}?)" if self.near else "")

    @property
    def fix(self) -> str:
        """Advice on a request that fits the checkpoint."""
        if self.path is not None:
            return "Leave plain tensors of the common state out of the target: `load` returns them where they are."
        if self.is_object:
            return "Request objects in the saved global shape, or leave them out of the target."
        if wants_names(self):
            return "The states are stored by number: pass LoadOptions(parameter_names=[...]), in the optimizer's order."
        return "Take keys that are not stored out of the target, or pass a lenient strict= such as 'log_unexpected'."

    @property
    def text(self) -> str:
        """The requested key, with the most similar stored key as a suggestion."""
        if self.path is not None:
            return f"{self.key!r} is a plain tensor of the common state at {self.path}"
        if self.refusal is not None:
            return f"{self.key!r}: {self.refusal}"
        return f"{self.key!r}" + (f" (did you mean {self.near!r}?)" if self.near else "")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor whose stored global shape or dtype differs from the requested one.

    Attributes:
        key: Key of the tensor.
        stored: Stored dtype and global shape.
        asked: Requested dtype and global shape.
        cast: True if the load has ``cast=True``; then `fix` doesn't suggest it.
    """

    where: ClassVar[str] = ""

    key: str
    stored: TensorKind
    asked: TensorKind
    cast: bool = False

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The stored and the requested dtype and global shape, as text."""
        return f"checkpoint has {self.stored}, target asks for {self.asked}"

    @property
    def fix(self) -> str:
        """Advice about loading with another shape or dtype."""
        return "\n  ".join(filter(None, (self._shape_fix, self._dtype_fix)))

    @property
    def _shape_fix(self) -> str:
        if len(self.stored.global_shape) != len(self.asked.global_shape):
            return "Load with as many axes as are stored, and reshape the loaded tensor."
        same = self.stored.global_shape == self.asked.global_shape
        return "" if same else "If the tensor is padded, set allow_shape_mismatch on its shard."

    @property
    def _dtype_fix(self) -> str:
        if not convertible(self.stored.dtype, self.asked.dtype):
            return "Load in the stored dtype."
        same = self.cast or self.stored.dtype == self.asked.dtype
        return "" if same else "Pass cast=True to convert the stored dtype."


@dataclass(frozen=True, slots=True)
class Gap:
    """A shard that is stored only in part.

    Attributes:
        key: Key of the tensor.
        offset: Offset of the shard in the tensor.
        stored: Number of the shard's elements that are stored.
        wanted: Number of the shard's elements that the load needs.
        why: Reason for the missing values, if the format knows it; else empty.
    """

    key: str
    offset: tuple[int, ...]
    stored: int
    wanted: int
    why: str = ""

    __str__ = offence_text

    @property
    def where(self) -> str:
        """The shard's offset, as text."""
        return f"at {self.offset}"

    @property
    def what(self) -> str:
        """The number of stored elements, and the reason for the missing ones if it is known."""
        more = f": {self.why}" if self.why else ""
        return f"{self.stored} of {self.wanted} elements are stored{more}"

    @property
    def fix(self) -> str:
        """Advice to load only elements that are stored."""
        if self.why:
            return "Load only stored elements."
        return "Load only stored elements: the checkpoint was saved without all ranks."


@dataclass(frozen=True, slots=True)
class Refusal:
    """A stored tensor that can't be read.

    Attributes:
        key: Key of the tensor.
        why: Reason why it can't be read.
    """

    where: ClassVar[str] = ""
    fix: ClassVar[str] = ""

    key: str
    why: str

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The reason why the tensor can't be read."""
        return self.why


Misfit = Unexpected | Mismatch | Gap | Refusal | ScaledValues | ShapeChange
"""A reason why a part of a target can't be loaded; its text is one line."""

_STATE = re.compile(r"(optimizer\.state\.[^.]+)\.(.*)", re.DOTALL)


def by_number(key: str, names: Collection[str]) -> str | None:
    """Return the stored key of parameter 0's optimizer state, as an example of keys that end with parameter numbers.

    Args:
        key: Requested key of an optimizer state, which ends with the name of a parameter.
        names: Stored keys.

    Returns:
        The stored key; None if `key` isn't such a key, or the states aren't stored under parameter numbers.

    Examples:
        >>> by_number("optimizer.state.exp_avg.w", ["optimizer.state.exp_avg.0"])
        'optimizer.state.exp_avg.0'
    """
    match = _STATE.fullmatch(key)
    first = None if match is None or match[2].isdigit() else f"{match[1]}.0"
    return first if first in names else None


def wants_names(problem: Unexpected) -> bool:
    """Return whether a problem is an optimizer state that is requested by parameter name, but stored by number.

    Examples:
        >>> wants_names(Unexpected("optimizer.state.exp_avg.w", "optimizer.state.exp_avg.0"))
        True
    """
    return problem.near is not None and by_number(problem.key, {problem.near}) is not None


@dataclass(frozen=True, slots=True)
class PrefixDifference:
    """Several requested keys that differ from stored keys by the same additional or missing prefix.

    Attributes:
        keys: Requested keys.
        near: Stored keys that correspond to the requested keys, in the same order.
        too_much: Prefix that only the requested keys have; empty if `lacking` isn't.
        lacking: Prefix that only the stored keys have; empty if `too_much` isn't.
    """

    where: ClassVar[str] = ""

    keys: tuple[str, ...]
    near: tuple[str, ...]
    too_much: str
    lacking: str

    def __str__(self) -> str:
        return f"{plural(len(self.keys), 'key')} are {self.what}: {self.key!r} as {self.near[0]!r}, and so on"

    @property
    def key(self) -> str:
        """The first requested key."""
        return self.keys[0]

    @property
    def what(self) -> str:
        """The difference between the requested and the stored keys, as text."""
        how = f"without their prefix {self.too_much!r}" if self.too_much else f"with {self.lacking!r} before them"
        return f"stored {how}"

    @property
    def fix(self) -> str:
        """Advice about renaming all keys at once."""
        if self.too_much:
            return f"Remove {self.too_much!r}: st.rename(tree, lambda key: key.removeprefix({self.too_much!r}))."
        return f"Add {self.lacking!r}: st.prefix(tree, {self.lacking!r})."


def prefix_difference(problems: Sequence[Unexpected]) -> PrefixDifference | None:
    """Return one `PrefixDifference` if all keys differ from stored keys by the same prefix; else None.

    Args:
        problems: Result of `find_unexpected`.

    Examples:
        >>> print(prefix_difference([Unexpected("module.b", "b"), Unexpected("module.w", "w")]))
        2 keys are stored without their prefix 'module.': 'module.b' as 'b', and so on
    """
    pairs = [(problem.key, problem.near) for problem in problems if problem.near is not None and problem.path is None]
    if len(pairs) < 2 or len(pairs) < len(problems):
        return None
    keys, near = zip(*pairs, strict=True)
    first, name = pairs[0]
    too_much = first.removesuffix(name) if first.endswith(name) else ""
    lacking = name.removesuffix(first) if name.endswith(first) else ""
    if not (too_much or lacking) or any(lacking + key != too_much + name for key, name in pairs):
        return None
    return PrefixDifference(keys, near, too_much, lacking)


def with_prefixes(problems: Sequence[Misfit]) -> list[Misfit | PrefixDifference]:
    """Return problems, with absent keys combined into one `PrefixDifference` if possible.

    It is possible if all of them differ from stored keys by the same prefix.

    Examples:
        >>> print(*with_prefixes([Unexpected("b", "model.b"), Unexpected("w", "model.w")]))
        2 keys are stored with 'model.' before them: 'b' as 'model.b', and so on
    """
    prefix = prefix_difference([problem for problem in problems if isinstance(problem, Unexpected)])
    if prefix is None:
        return list(problems)
    return [prefix, *(problem for problem in problems if not isinstance(problem, Unexpected))]
