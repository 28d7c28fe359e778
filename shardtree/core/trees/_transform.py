"""Loads through a transform, such as a trace: stored tensors are read, and the target's tensors are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...errors import MetadataError
from ..geometry import refuse


class Transform(Protocol):
    """A mapping from stored to requested tensors, such as a trace; `load`, `explain` and `redistribute` take one."""

    def stored_target(self, target: Any, /, *, cast: bool, plain: Sequence[str]) -> Any:
        """Return the target that a load must fill instead of the given one.

        Its leaves are factories, which request stored tensors and make the given target's tensors from them.

        Args:
            target: Tree of shards and plain tensors; a plain tensor is whole, and its path is its key.
            cast: Whether the target's dtypes may differ from those of the transform's results.
            plain: Patterns of keys whose values may be converted without their stored scales, as for `load`.

        Raises:
            TreeError: The target is not a tree, or is too deep.
        """


def target_through(target: Any, transform: Transform, *, cast: bool = False, plain: Sequence[str] = ()) -> Any:
    """Return the tree that a load must fill in place of the target, as a transform's `stored_target` makes it.

    Its leaves request stored tensors, and make the target's tensors from them.

    Args:
        target: Tree of shards and plain tensors.
        transform: A trace, or any other value with the method `Transform.stored_target`.
        cast: Whether the target's dtypes may differ from those of the transform's results.
        plain: Patterns of keys whose values may be converted without their stored scales, as for `load`.

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
