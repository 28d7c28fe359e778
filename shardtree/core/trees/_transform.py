"""Targets of transforms, such as a trace: the stored tensors that a load must read to make a target's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...errors import MetadataError
from ..geometry import refuse


class Transform(Protocol):
    """A mapping from stored to requested tensors, such as a trace; `load`, `explain` and `redistribute` take one."""

    def stored_target(self, target: Any, /, *, cast: bool, plain: Sequence[str]) -> Any:
        """Return the target to load instead: a tree of stored tensors, whose factories make the given target's tensors.

        Args:
            target: Tree of shards and plain tensors; a plain tensor is whole, and its path is its key.
            cast: Whether the target's dtypes may differ from those that the transform makes.
            plain: Patterns of keys of values that need no scales.

        Raises:
            TreeError: The target isn't a tree, or is too deep.
        """


def target_through(target: Any, transform: Transform, *, cast: bool = False, plain: Sequence[str] = ()) -> Any:
    """Return the target of the stored tensors from which a transform makes the given target.

    Args:
        target: Tree of shards and plain tensors.
        transform: A trace, or any value with its method `stored_target`.
        cast: Whether the target's dtypes may differ from those that the transform makes.
        plain: Patterns of keys of values that need no scales.

    Raises:
        MetadataError: The transform has no such method.

    Examples:
        >>> class Renamed:
        ...     def stored_target(self, target, *, cast, plain):
        ...         return {f"old_{name}": value for name, value in target.items()}
        >>> target_through({"w": 1}, Renamed())
        {'old_w': 1}
    """
    stored_target = getattr(transform, "stored_target", None)
    if not callable(stored_target) or isinstance(transform, type):
        fix = "Pass the result of shardtree.trace."
        refuse("transform", "trace", type(transform).__name__, "a Trace", fix, error=MetadataError)
    return stored_target(target, cast=cast, plain=plain)
