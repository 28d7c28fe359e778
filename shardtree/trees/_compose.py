"""Pipelines of tree functions: compose joins them, step binds a function's options.

Every function here takes the tree first. So one `step` serves them all, users' own too, and no function needs a second
name or a second signature for pipelines; a type checker sees the bound arguments with the function's own types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Concatenate, ParamSpec, TypeVar

from ._nodes import Tree

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")


def compose(*functions: Callable[[Any], Any]) -> Callable[[Tree], Any]:
    """Return the function that calls all of these from left to right, each with the value of the one before.

    Examples:
        >>> compose(step(sorted, reverse=True), tuple)([1, 3, 2])
        (3, 2, 1)
    """
    return lambda tree: reduce(lambda value, function: function(value), functions, tree)


def step(
    function: Callable[Concatenate[Tree, _Options], _Result], *args: _Options.args, **options: _Options.kwargs
) -> Callable[[Tree], _Result]:
    """Return a function of a tree alone, from one that takes the tree first and then these arguments.

    `map_shards(f, tree)`, `map_data` and `partition` take their function first: `functools.partial` binds it.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> from shardtree.trees import cast, prefix
        >>> for_serving = compose(step(prefix, "model."), step(cast, torch.bfloat16))
        >>> for_serving({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))})["w"]
        ShardedTensor(key='model.w', data=<bfloat16 (1,) cpu>, dtype=torch.bfloat16, ...)
    """
    return lambda tree: function(tree, *args, **options)
