"""Misfits: why something that a target asks for can't be loaded, as data whose text errors and explanations share."""

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
    """Something that is requested and not stored.

    Attributes:
        key: the tensor's, or the object's unique key.
        near: a stored key that looks like it, None if there is none.
        is_object: whether it is a sharded object.
        path: where the common state has a plain tensor that is meant, as text; None if it has none.
        refusal: reason why it can't be read, if it is stored all the same.
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
        """That it isn't stored, or can't be read, and what may be meant."""
        if self.path is not None:
            return f"not stored as shards: it is a plain tensor of the common state at {self.path}"
        if self.refusal is not None:
            return f"can't be read: {self.refusal}"
        return "not stored" + (f" (did you mean {self.near!r}?)" if self.near else "")

    @property
    def fix(self) -> str:
        """Advice on asking for what is stored."""
        if self.path is not None:
            return "Leave plain tensors of the common state out of the target: `load` returns them where they are."
        if self.is_object:
            return "Ask for objects in the grid that was saved, or leave them out."
        if wants_names(self):
            return (
                "States stand under numbers there: pass LoadOptions(parameter_names=[...]), in the optimizer's order."
            )
        return "Leave out what isn't stored, or pass a strict mode that does, as 'log_unexpected'."

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

    where: ClassVar[str] = ""

    key: str
    stored: TensorKind
    asked: TensorKind
    cast: bool = False

    __str__ = offence_text

    @property
    def what(self) -> str:
        """Both kinds."""
        return f"checkpoint has {self.stored}, target asks for {self.asked}"

    @property
    def fix(self) -> str:
        """Advice on loading another shape or dtype."""
        return "\n  ".join(filter(None, (self._shape_fix, self._dtype_fix)))

    @property
    def _shape_fix(self) -> str:
        if len(self.stored.global_shape) != len(self.asked.global_shape):
            return "Load with as many axes as are stored, and reshape what is loaded."
        same = self.stored.global_shape == self.asked.global_shape
        return "" if same else "Set allow_shape_mismatch on the shard of a padded tensor."

    @property
    def _dtype_fix(self) -> str:
        if not convertible(self.stored.dtype, self.asked.dtype):
            return "Load in the stored dtype."
        same = self.cast or self.stored.dtype == self.asked.dtype
        return "" if same else "Pass cast=True to convert the stored dtype."


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

    __str__ = offence_text

    @property
    def where(self) -> str:
        """The shard's offset."""
        return f"at {self.offset}"

    @property
    def what(self) -> str:
        """The share that is stored."""
        more = f": {self.why}" if self.why else ""
        return f"{self.stored} of {self.wanted} elements are stored{more}"

    @property
    def fix(self) -> str:
        """Advice on what can be loaded."""
        if self.why:
            return "Load only what is there."
        return "The checkpoint was saved without all ranks; load only what is there."


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tensor that is stored in a way that can't be read here, and why."""

    where: ClassVar[str] = ""
    fix: ClassVar[str] = ""

    key: str
    why: str

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The reason."""
        return self.why


Misfit = Unexpected | Mismatch | Gap | Refusal | ScaledValues | ShapeChange
"""Why something that a target asks for can't be loaded; its text is one line."""

_STATE = re.compile(r"(optimizer\.state\.[^.]+)\.(.*)", re.DOTALL)


def by_number(key: str, names: Collection[str]) -> str | None:
    """Return the stored state of an optimizer's first parameter, where states stand under numbers instead of names.

    Examples:
        >>> by_number("optimizer.state.exp_avg.w", ["optimizer.state.exp_avg.0"])
        'optimizer.state.exp_avg.0'
    """
    match = _STATE.fullmatch(key)
    first = None if match is None or match[2].isdigit() else f"{match[1]}.0"
    return first if first in names else None


def wants_names(problem: Unexpected) -> bool:
    """Return whether an optimizer's state is asked for by its parameter's name, and stored under a number.

    Examples:
        >>> wants_names(Unexpected("optimizer.state.exp_avg.w", "optimizer.state.exp_avg.0"))
        True
    """
    return problem.near is not None and by_number(problem.key, {problem.near}) is not None


@dataclass(frozen=True, slots=True)
class PrefixDifference:
    """Several keys that aren't stored, and of which each is stored with, or without, one prefix.

    Attributes:
        keys: what is requested.
        near: what each is stored as, in the same order.
        too_much: the prefix that is requested and not stored; else empty.
        lacking: the prefix that is stored and not requested; else empty.
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
        """The first key."""
        return self.keys[0]

    @property
    def what(self) -> str:
        """The prefix that is too much, or missing."""
        how = f"without their prefix {self.too_much!r}" if self.too_much else f"with {self.lacking!r} before them"
        return f"stored {how}"

    @property
    def fix(self) -> str:
        """Advice on renaming them all."""
        if self.too_much:
            return f"Take {self.too_much!r} off: st.rename(tree, lambda key: key.removeprefix({self.too_much!r}))."
        return f"Put {self.lacking!r} before them: st.prefix(tree, {self.lacking!r})."


def prefix_difference(problems: Sequence[Unexpected]) -> PrefixDifference | None:
    """Return the one prefix by which all keys differ from those that are stored; None if there is none.

    Args:
        problems: what `find_unexpected` found.

    Examples:
        >>> print(prefix_difference([Unexpected("module.b", "b"), Unexpected("module.w", "w")]))
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


def with_prefixes(problems: Sequence[Misfit]) -> list[Misfit | PrefixDifference]:
    """Return problems with one in place of all keys that differ from stored ones by one prefix.

    Examples:
        >>> print(*with_prefixes([Unexpected("b", "model.b"), Unexpected("w", "model.w")]))
        2 keys are stored with 'model.' before them: 'b' as 'model.b', and so on
    """
    prefix = prefix_difference([one for one in problems if isinstance(one, Unexpected)])
    if prefix is None:
        return list(problems)
    return [prefix, *(one for one in problems if not isinstance(one, Unexpected))]
