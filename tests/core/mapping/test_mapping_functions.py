"""Functions are equal if they were made alike: they run the same code with equal values around it."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import optree
import pytest
import torch

import shardtree as st
from shardtree import lenses
from shardtree.core.mapping import same_value
from shardtree.mapping import ShardedTensor, ShardedTensorFactory

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


@dataclass(eq=False)
class Rotate(torch.nn.Module):
    """A module that permutes: two have the same fields and other permutations."""

    size: int

    def __post_init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(self.size))

    def forward(self, tensor: Any) -> Any:
        return tensor[self.order]


class Shifted(Scaled):
    def __init__(self, shift: Any) -> None:
        super().__init__(2)
        object.__setattr__(self, "shift", shift)


class Slotted(Scaled):
    __slots__ = ("shift",)

    def __init__(self, shift: Any) -> None:
        super().__init__(2)
        object.__setattr__(self, "shift", shift)


@dataclass
class Initialised:
    """One that can be called, with the equality that dataclasses have."""

    name: str
    factor: InitVar[Any]

    def __post_init__(self, factor: Any) -> None:
        self.scale = factor

    def __call__(self, tensor: Any) -> Any:
        return tensor * self.scale


@dataclass(eq=False)
class NotCompared:
    name: str
    factor: Any = field(compare=False)

    def method(self, tensor: Any) -> Any:
        return tensor * self.factor


class Numbers(list[int]):
    scale = 1


def scaled_numbers(scale: int) -> Numbers:
    numbers = Numbers([1, 2])
    numbers.scale = scale
    return numbers


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
    "an attribute that a subclass adds": Shifted,
    "an attribute that a subclass adds in a slot": Slotted,
    "an argument of __init__ that is no field": lambda number: Initialised("a", number),
    "a field that is not compared": lambda number: NotCompared("a", number).method,
    "a numpy scalar": lambda number: held(np.float32(number)),
    "an attribute of a list": lambda number: held(scaled_numbers(number)),
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
    "modules with other buffers": (Rotate(64).forward, Rotate(64).forward),
    "attributes that a subclass adds": (Shifted(1), Shifted(2)),
    "arguments of __init__ that are no fields": (Initialised("a", 1), Initialised("a", 2)),
    "fields that are not compared": (NotCompared("a", 1).method, NotCompared("a", 2).method),
    "numpy's 0.0 and -0.0": (held(np.float32(0.0)), held(np.float32(-0.0))),
    "dicts with other defaults": (held(defaultdict(int)), held(defaultdict(list))),
    "arrays of other bits": (held(np.array([0.0])), held(np.array([-0.0]))),
    "arrays of objects": (held(np.array([[]], dtype=object)), held(np.array([[]], dtype=object))),
    "what cannot be compared": (held({1: torch.ones(2)}), held({1: torch.ones(2)})),
    "functions of other modules": tuple(eval("lambda: name", {"name": number}) for number in (1, 2)),
}


@pytest.mark.parametrize("pair", OTHERS.values(), ids=list(OTHERS))
def test_other_functions_differ(pair: tuple[Any, Any]) -> None:
    assert not same_value(*pair)


@pytest.mark.parametrize("other", [0, 1])
def test_functions_captured_often_or_deeply_are_compared(other: int) -> None:
    often, deep = [], []
    for number in (0, other):
        shared = chain = held(number)
        for _ in range(64):  # 2**64 paths
            shared = held((shared, shared))
        for _ in range(3000):
            chain = held(chain)
        often.append(shared)
        deep.append(chain)
    assert same_value(*often) == same_value(*deep) == (other == 0)


def test_a_factory_of_one_module_is_equal_to_itself_alone() -> None:
    one, other = Rotate(64), Rotate(64)

    def factory(module: Rotate) -> ShardedTensorFactory:
        return ShardedTensorFactory("w", SHARD.data, module.forward, module.forward)

    assert factory(one) == factory(one)
    assert factory(one) != factory(other)
    assert st.diff({"m": one.forward}, {"m": other.forward}).mismatch == (("m",),)


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
