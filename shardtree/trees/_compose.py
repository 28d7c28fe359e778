"""Pipelines of tree functions: `compose` chains them, `bind` sets a function's options.

Functions take the tree first; only maps take their function first, as `jax.tree.map` does. So one `bind` serves them
all, users' own too, and no function needs a second signature for pipelines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import TreeError, error_text
from ._nodes import Tree

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")

_TREE_NAMES = ("tree", "pytree", "sharded_state_dict", "state_dict")
"""What parameters for a tree are called: here, in Megatron-Core, in JAX and optree."""


def compose(*functions: Callable[[Any], Any]) -> Callable[[Tree], Any]:
    """Return the function that calls all of these from left to right, each with the value of the one before.

    Examples:
        >>> compose(bind(sorted, reverse=True), tuple)([1, 3, 2])
        (3, 2, 1)
    """
    return lambda tree: reduce(lambda value, function: function(value), functions, tree)


def bind(
    function: Callable[Concatenate[Tree, _Options], _Result], *args: _Options.args, **options: _Options.kwargs
) -> Callable[[Tree], _Result]:
    """Return a function of a tree alone, from one that takes the tree first and then these arguments.

    Args:
        function: takes the tree first, under any name.
        args: its further positional arguments.
        options: its arguments by name.

    Raises:
        TreeError: a later parameter of the function is called `tree` (or `pytree`, `state_dict`,
            `sharded_state_dict`) and isn't among `options`, as in `map_shards(f, tree)` and `map_data(f, tree)`:
            the tree would be passed as f. `functools.partial` binds f.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> from shardtree.trees import cast, prefix
        >>> for_serving = compose(bind(prefix, "model."), bind(cast, torch.bfloat16))
        >>> for_serving({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))})["w"]
        ShardedTensor(key='model.w', data=<bfloat16 (1,) cpu>, dtype=torch.bfloat16, ...)
    """
    # Checked when it is bound: the call, perhaps much later in a pipeline, would pass the tree as the function.
    _refuse_tree_second(function, options)
    return lambda tree: function(tree, *args, **options)


def _refuse_tree_second(function: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        first, *later = inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature, or a function without parameters, whose call will fail anyway
        return
    # By parameters' names, which works for users' functions too.
    late = [name for name in later if name in _TREE_NAMES and name not in options]
    if first in _TREE_NAMES or not late:
        return
    name = getattr(function, "__name__", repr(function))
    what = f"bind: {name} takes {first!r} first, and the tree as {late[0]!r} after it"
    fix = f"Write `functools.partial({name}, {first})`, or a lambda that passes each in its place."
    raise TreeError(error_text(what, expected="a function that takes the tree first", fix=fix))
