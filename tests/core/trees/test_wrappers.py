"""Wrapper subclasses that torch can take apart are stored as their inner tensors; loaded, they are of their class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, UnsupportedValue
from shardtree.storage import MemoryStorage
from shardtree.trees import apply_factories, unwrap
from tests.laws.leaf_kinds import Wrapper


class Scaled(Wrapper):
    """A wrapper subclass that torch can take apart: values, and a number for all of them."""

    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner, made.scale = inner, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["inner", "scale"], "context"

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: str, shape: Any, strides: Any) -> Scaled:
        assert context == "context"
        return cls(parts["inner"], parts["scale"])


def scaled(start: int) -> Scaled:
    return Scaled(torch.arange(start, start + 6, dtype=torch.int8).reshape(2, 3), torch.tensor(start / 8))


def tree(tensor: torch.Tensor, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", tensor, (0, rank, ranks)), "step": 3}


def saved(ranks: int) -> MemoryStorage:
    folder = MemoryStorage()
    st.simulate(ranks, lambda world: st.save(tree(scaled(world.rank), world.rank, ranks), folder, world=world))
    return folder


def values(tensor: Any) -> tuple[type, Any, Any]:
    return type(tensor), tensor.inner.tolist(), tensor.scale.tolist()


def test_inner_tensors_have_keys_of_their_own() -> None:
    shards = apply_factories(unwrap(tree(scaled(0), 1, 2)))["w"]
    assert {name: (shard.key, shard.global_shape, shard.global_offset) for name, shard in shards.items()} == {
        "inner": ("w.inner", (2, 1, 2, 3), (1, 0, 0, 0)),
        "scale": ("w.scale", (2, 1), (1, 0)),
    }


@pytest.mark.parametrize("donate", [False, True])
def test_they_load_in_the_same_layout_by_the_targets_class(donate: bool) -> None:
    folder = saved(2)

    def load(world: st.World) -> None:
        target = scaled(50)
        loaded = st.load(tree(target, world.rank, 2), folder, donate=donate, world=world)
        assert values(loaded["w"]) == values(scaled(world.rank)) and loaded["step"] == 3
        assert (loaded["w"] is target) == donate
        assert donate or values(target) == values(scaled(50))

    st.simulate(2, load)


def test_another_layout_of_an_unknown_class_is_an_error_that_names_the_inner_tensor() -> None:
    folder = saved(2)
    whole = Scaled(torch.zeros(4, 3, dtype=torch.int8), torch.tensor(0.0))
    assert not st.explain(tree(whole), folder).ok
    with pytest.raises(CheckpointingException, match=r"w\.inner"):
        st.load(tree(whole), folder)


def test_a_wrapper_in_a_wrapper_is_taken_apart_too() -> None:
    nested, folder = Scaled(scaled(4), torch.tensor(2.0)), MemoryStorage()
    st.save(tree(nested), folder)
    assert sorted(st.open_checkpoint(folder)) == ["w.inner.inner", "w.inner.scale", "w.scale"]
    loaded = st.load(tree(Scaled(scaled(0), torch.tensor(0.0))), folder)["w"]
    assert values(loaded.inner) == values(scaled(4)) and loaded.scale == 2


@pytest.mark.parametrize("donate", [False, True])
def test_they_move_in_memory(donate: bool) -> None:
    own = scaled(50)
    moved = st.redistribute(tree(scaled(1)), tree(own), donate=donate)["w"]
    assert values(moved.data) == values(scaled(1)) and (moved.data is own) == donate
    [resharded] = st.reshard([tree(scaled(1))], [tree(scaled(50))])
    assert values(resharded["w"].data) == values(scaled(1))


def test_equal_inner_tensors_have_one_fingerprint() -> None:
    assert st.fingerprint(tree(scaled(1))) == st.fingerprint(tree(scaled(1))) != st.fingerprint(tree(scaled(2)))


def test_a_flat_range_is_refused() -> None:
    flat = Scaled(torch.arange(3), torch.tensor(1.0))
    shard = st.ShardedTensor.from_rank_offsets_flat("w", flat, (2, 3), flattened_range=slice(0, 3))
    with pytest.raises(UnsupportedValue, match="Scaled"):
        st.save({"w": shard}, MemoryStorage())


def test_a_lens_that_holds_one_cant_be_donated() -> None:
    whole = st.lenses.as_factory(st.ShardedTensor.from_rank_offsets("w", scaled(0)), st.lenses.transposed())
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(3, 2))}, folder)
    with pytest.raises(CheckpointingException, match=r"'w' is a wrapper subclass.*\n.*Scaled"):
        st.load({"w": whole}, folder, donate=True)
