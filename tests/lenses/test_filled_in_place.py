"""Which of our factories are filled in place by a donating load or move: none of the weight's memory is made anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardtree as st
from shardtree.errors import ShapeError
from shardtree.lenses import Lens, as_factory, attention_qkv, expert_keys, expert_stack, gate_and_up, unstacked_layers
from shardtree.storage import MemoryStorage

WEIGHT = torch.arange(2.0**17).view(512, 256)
QKV: Any = {"heads": 8, "head_size": 32, "query_groups": 4, "part": "w", "names": ("q", "k", "v")}  # 256 + 2 x 128 rows

LENSES: dict[str, tuple[Lens, str]] = {
    "gate and up": (gate_and_up(tensor_parallel=1, part="w", names=("gate", "up")), "load move"),
    "gate and up under one key": (gate_and_up(tensor_parallel=1), "load move"),
    "experts stacked": (expert_stack(experts=4), "load move"),
    "experts' keys": (expert_keys("w", experts=4), "load move"),
    "experts along another axis": (expert_keys("w", experts=4, axis=1), "move"),
    "layers unstacked": (unstacked_layers("w"), "load move"),
    "qkv concatenated": (attention_qkv(held="concatenated", **QKV), "load move"),
    "qkv interleaved": (attention_qkv(**QKV), ""),
    "qkv interleaved under one key": (attention_qkv(heads=8, head_size=32, query_groups=4), ""),
}
"""Each lens, and what fills the held tensor in place. Rows of interleaved groups are gathered, and a load reads parts
that aren't contiguous into memory of their own."""


def factory(lens: Lens, data: torch.Tensor) -> st.ShardedTensorFactory:
    return as_factory(st.ShardedTensor.from_rank_offsets("a.w.b", data), lens)


def made_by(do: Callable[[], Any]) -> tuple[Any, int]:
    """Return a function's value, and how many bytes of tensors torch made meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        found = do()
    return found, sum(max(0, event.self_cpu_memory_usage) for event in made.events())


def loads(lens: Lens, held: torch.Tensor) -> Callable[[], Any]:
    place = MemoryStorage()
    st.save({"w": factory(lens, WEIGHT)}, place)
    return lambda: st.load({"w": factory(lens, held)}, place, donate=True)["w"]


def moves(lens: Lens, held: torch.Tensor) -> Callable[[], Any]:
    source = {"w": factory(lens, WEIGHT)}
    return lambda: st.redistribute(source, {"w": factory(lens, held)}, donate=True)["w"].data


@pytest.mark.slow
@pytest.mark.parametrize("way", [loads, moves])
@pytest.mark.parametrize("name", LENSES)
def test_parts_that_are_views_are_filled_without_memory_for_the_weight(name: str, way: Any) -> None:
    lens, ways = LENSES[name]
    way(lens, torch.zeros_like(WEIGHT))()  # what is kept between loads is made by the first
    held = torch.zeros_like(WEIGHT)
    address = held.untyped_storage().data_ptr()
    found, made = made_by(way(lens, held))
    assert found is held and held.untyped_storage().data_ptr() == address
    assert torch.equal(held, WEIGHT)
    in_place = way.__name__.removesuffix("s") in ways
    assert (made < WEIGHT.nbytes // 8) == in_place, f"{made} bytes made for a weight of {WEIGHT.nbytes}"


TRACED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], torch.Tensor], bool]] = {
    "rows": (lambda given: torch.cat([given["a"], given["b"]]), True),
    "experts": (lambda given: torch.stack([given["b"], given["a"]]), True),
    "columns of what is stored": (lambda given: given["a"][:, 64:192], True),
    "columns of what is held": (lambda given: torch.cat([given["a"], given["b"]], 1), False),
    "rows and columns": (lambda given: torch.cat([given["a"], given["b"].T.reshape(256, 256)]), False),
    "rows twice": (lambda given: torch.cat([given["a"], given["a"]]), False),
    "rows that are negated": (lambda given: torch.cat([given["a"], -given["b"]]), False),
    "rows that are computed": (lambda given: given["a"] * given["b"], False),
}
"""What a loader makes of two stored tensors, and whether a load fills it in place."""


@pytest.mark.parametrize("way", ["load", "move"])
@pytest.mark.parametrize("name", TRACED)
def test_what_a_trace_only_moves_to_rows_is_filled_without_memory_for_it(name: str, way: str) -> None:
    make, in_place = TRACED[name]
    stored = dict(zip(("a", "b"), WEIGHT.chunk(2), strict=True))
    shards = {key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in stored.items()}
    engine, expected, place = st.trace(lambda given: {"w": make(given)}, stored), make(stored), MemoryStorage()
    st.save(shards, place)

    def fill(held: torch.Tensor) -> torch.Tensor:
        if way == "load":
            return st.load({"w": held}, place, transform=engine, donate=True)["w"]  # type: ignore[no-any-return]
        return st.redistribute(shards, {"w": held}, transform=engine, donate=True)["w"]  # type: ignore[no-any-return]

    fill(torch.zeros_like(expected))
    held = torch.zeros_like(expected)
    found, made = made_by(lambda: fill(held))
    assert found is held and torch.equal(held, expected)
    assert (made < expected.nbytes // 4) == in_place, f"{made} bytes made for a weight of {expected.nbytes}"


def test_one_memory_of_two_names_is_filled_once_through_a_trace_and_not_with_different_things() -> None:
    stored = dict(zip(("a", "b"), WEIGHT.chunk(2), strict=True))
    place, held = MemoryStorage(), torch.zeros_like(stored["a"])
    st.save({key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in stored.items()}, place)
    tied = {"embedding": held, "head": held}
    engine = st.trace(lambda given: {"embedding": given["a"], "head": given["a"]}, stored)
    loaded = st.load(tied, place, transform=engine, donate=True)
    assert loaded["embedding"] is held and loaded["head"] is held and torch.equal(held, stored["a"])
    other = st.trace(lambda given: {"embedding": given["a"], "head": given["b"]}, stored)
    with pytest.raises(ShapeError, match="donated tensors share memory"):
        st.load(tied, place, transform=other, donate=True)
