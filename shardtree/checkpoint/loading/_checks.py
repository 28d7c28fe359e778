"""What a load of one rank's target checks before it reads: `load` and `explain` run the same checks.

None is collective. Each either gives what the next one needs, or raises what `load` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from ...errors import render_path
from ...mapping import LocalNonpersistentObject
from ...plans import Unexpected, find_unexpected
from ...trees import HOLE, join, left_out, told_of_depth
from ...world import step
from ._fit import CommonOf, in_common_state
from ._strict import StrictHandling, raises_keys, refuse_keys, refuse_left_out
from ._taken_apart import Target, is_sharded, without_unexpected

T = TypeVar("T")


class Run(Protocol):
    """How a check is run: a load raises what it raises; an explanation notes that, and goes on with something else."""

    def __call__(self, check: Callable[[], T], otherwise: T) -> T: ...


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """How the keys of a rank's target compare with those that are stored, as far as a mode wants to know.

    Attributes:
        mode: what is done about keys that don't match.
        missing: stored, and asked for by no rank.
        unexpected: asked for by this rank, and not stored.
        stored: returns all that are stored.
    """

    mode: StrictHandling
    missing: set[str]
    unexpected: set[str]
    stored: Callable[[], set[str]]


def check_rank(
    run: Run, tree: Any, target: Target, keys: Keys, fit: Callable[[Target], T], common_of: CommonOf, otherwise: T
) -> tuple[Target, T, Any, tuple[str, ...]]:
    """Return what a load of one rank's target comes to before it makes memory, once its checks are run.

    Args:
        run: runs each check.
        tree: the rank's target.
        target: the same, taken apart.
        keys: how its keys compare with those that are stored.
        fit: checks that tensors and objects are stored as they are asked for.
        common_of: returns the stored common tree for a target's namedtuple classes.
        otherwise: what counts as the outcome of `fit` where it fails.

    Returns:
        The target without what isn't stored, what `fit` returned, the stored common tree, and the paths of what the
        join leaves out of that.
    """
    run(lambda: step("load: strict", partial(_refuse, keys, target, common_of)), None)
    kept = run(lambda: step("load: leave out", partial(without_unexpected, target, tree, keys.unexpected)), target)
    fitted = run(lambda: step("load: check the target", partial(fit, kept)), otherwise)
    nothing: tuple[Any, tuple[str, ...]] = (HOLE, ())
    common, left = run(lambda: step("load: common state", partial(_common, common_of, kept, keys.mode)), nothing)
    return kept, fitted, common, left


def _refuse(keys: Keys, target: Target, common_of: CommonOf) -> None:
    if raises_keys(keys.mode):
        refuse_keys(keys.missing, named_unexpected(keys, target, common_of))


def named_unexpected(keys: Keys, target: Target, common_of: CommonOf) -> tuple[Unexpected, ...]:
    """Return the keys of a target that a mode finds unexpected, with what may be meant by them."""
    absent = find_unexpected(target.keys, keys.stored()) if keys.unexpected else ()
    return in_common_state(absent, target, common_of)


def _common(common_of: CommonOf, target: Target, mode: StrictHandling) -> tuple[Any, tuple[str, ...]]:
    """Return the stored common tree, once it is known that the target fits it, and what is left out of it."""
    common = common_of(target.types)
    return common, check_join(common, target, mode)


def check_join(common: Any, target: Target, mode: StrictHandling) -> tuple[str, ...]:
    """Return the paths of what a load leaves out of the stored common tree: before a tensor is read.

    Raises:
        TreeError: the target doesn't fit it.
        KeyMismatch: something is left out, and the mode raises for all that isn't loaded.
    """
    found = joined(common, target, [leaf if _is_filled(leaf) else HOLE for leaf in target.leaves])
    paths = tuple(map(render_path, left_out(common, found)))
    refuse_left_out(mode, paths)
    return paths


def _is_filled(leaf: Any) -> bool:
    return is_sharded(leaf) or isinstance(leaf, LocalNonpersistentObject)


def joined(common: Any, target: Target, loaded: Sequence[Any]) -> Any:
    """Return the stored common tree joined by what was loaded for each leaf of a target.

    Raises:
        TreeError: they don't fit.
    """
    tree = target.rebuild(loaded)
    with told_of_depth("load"):
        return join(common, tree)
