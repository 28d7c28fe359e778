"""Functions are equal if they were made alike: they run the same code with equal values around it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optree
import pytest
import torch

import shardtree as st
from shardtree import lenses
from shardtree.mapping import ShardedTensor, ShardedTensorFactory, same_value

Make = Callable[[Any], Any]


def reading(default: Any) -> Any:
    def function(key: str, *, value: Any = default) -> Any:
        return key, value

    return function


def counting(start: int) -> Any:
    """A function that captures itself."""

    def down(number: int = start) -> int:
        return number and down(number - 1)

    return down


@dataclass(frozen=True, eq=False)
class Scaled:
    factor: Any

    def __call__(self, tensor: Any) -> Any:
        return tensor * self.factor


@dataclass(frozen=True)
class Holder:
    value: Any

    def method(self) -> Any:
        return self.value


def held(value: Any) -> Any:
    return lambda: value


MADE: dict[str, Make] = {
    "a closure": held,
    "a default": reading,
    "one that captures itself": counting,
    "a partial call": lambda number: partial(operator.add, number),
    "a partial call by keyword": lambda number: partial(reading(0), value=number),
    "a method": lambda number: Holder(number).method,
    "an object that can be called": Scaled,
    "an array": lambda number: held(np.arange(number)),
    "runs along an axis": lambda number: held(lenses.grouped_runs(4 * number, 2, (number, number))),
    "functions in containers": lambda number: [(held(number), {"f": held(held(number))})],
}
LENSES: dict[str, Make] = {
    "gate_and_up": lambda number: lenses.gate_and_up(tensor_parallel=number),
    "attention_qkv": lambda number: lenses.attention_qkv(heads=4, head_size=number),
    "rotary_halves": lambda number: lenses.rotary_halves(head_size=2 * number),
    "padded_axis": lambda number: lenses.padded_axis(5, fill=number),
    "transposed": lambda number: lenses.transposed(0, number),
    "rearranged": lambda number: lenses.rearranged("(e f) h -> e h f", e=number),
    "stacked_layers": lambda number: lenses.stacked_layers("layers", number),
    "expert_keys": lambda number: lenses.expert_keys("experts", experts=number),
    "renamed": lambda number: lenses.renamed("w", f"w{number}"),
    "tied": lambda number: lenses.tied("w", f"w{number}"),
    "from_function": lambda number: lenses.from_function(lambda w: w.roll(number)),
    "by_pattern": lambda number: lenses.by_pattern({"**.w": lenses.padded_axis(number), "**": None}),
    "compose": lambda number: lenses.compose(lenses.transposed(), lenses.padded_axis(number)),
}


@pytest.mark.parametrize("make", [*MADE.values(), *LENSES.values()], ids=[*MADE, *LENSES])
def test_functions_made_alike_are_equal_and_others_are_not(make: Make) -> None:
    assert same_value(make(1), make(1))
    assert not same_value(make(1), make(2))


OTHERS = {
    "other code": (lambda a: a, lambda a: -a),
    "a closure and none": (held(len), len),
    "0.0 and -0.0": (held(0.0), held(-0.0)),
    "1 and True": (held(1), held(True)),
    "tensors of equal elements": (held(torch.ones(2)), held(torch.ones(2))),
    "patterns in another order": (held({"a": 1, "b": 2}), held({"b": 2, "a": 1})),
    "a shorter list": (held([1]), held([1, 2])),
    "arrays of other bits": (held(np.array([0.0])), held(np.array([-0.0]))),
    "arrays of objects": (held(np.array([[]], dtype=object)), held(np.array([[]], dtype=object))),
    "what can't be compared": (held({1: torch.ones(2)}), held({1: torch.ones(2)})),
    "functions of other modules": tuple(eval("lambda: name", {"name": number}) for number in (1, 2)),
}


@pytest.mark.parametrize("pair", OTHERS.values(), ids=list(OTHERS))
def test_other_functions_differ(pair: tuple[Any, Any]) -> None:
    assert not same_value(*pair)


def test_nan_and_variables_without_a_value_are_equal() -> None:
    def unset() -> Any:
        function = lambda: value  # noqa: E731
        if False:
            value = 1  # type: ignore[unreachable]
        return function

    assert same_value(unset(), unset())
    assert same_value(held(float("nan")), held(float("nan")))


# What follows for factories: as leaves, in trees of optree, and in differences.

SHARD = ShardedTensor.from_rank_offsets("layers.0.experts.w", torch.arange(24.0).view(4, 6))


def halves(count: int) -> ShardedTensorFactory:
    """A factory whose functions are its own, as users write them."""

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        parts = data.chunk(count)
        return [ShardedTensor.from_rank_offsets(key, part, (0, n, count)) for n, part in enumerate(parts)]

    return ShardedTensorFactory("w", SHARD.data, build, torch.cat)


FACTORIES: dict[str, Make] = {
    **{name: lambda number, make=make: lenses.as_factory(SHARD, make(number)) for name, make in LENSES.items()},
    "closures": halves,
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=list(FACTORIES))
def test_factories_of_two_calls_are_equal_leaves(make: Make) -> None:
    one, same, other = ({"f": make(number), "step": 3} for number in (1, 1, 2))
    assert one["f"] == same["f"]
    assert hash(one["f"]) == hash(same["f"])
    assert one["f"] != other["f"]
    copied = {**same, "f": replace(same["f"], data=SHARD.data.clone())}
    assert not st.diff(one, copied)
    assert st.diff(one, other).mismatch == (("f",),)
    assert st.diff(one, {**copied, "f": replace(same["f"], data=SHARD.data + 1)}).mismatch == (("f",),)


def test_trees_with_factories_of_two_calls_are_mapped_together() -> None:
    left, right, other = ({"f": lenses.as_factory(SHARD, lenses.padded_axis(rows))} for rows in (3, 3, 2))
    together = partial(optree.tree_map, torch.add, namespace="shardtree")
    assert torch.equal(together(left, right)["f"].data, 2 * SHARD.data)
    with pytest.raises(ValueError, match="Mismatch"):
        together(left, other)
