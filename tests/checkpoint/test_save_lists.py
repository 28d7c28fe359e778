"""Lists of shards may have other lengths on other ranks, and be empty on some."""

from __future__ import annotations

import enum

import pytest
import torch

import shardtree as st

WHOLE = torch.arange(16.0).reshape(4, 4)


def flat(world: st.World, bounds: list[int]) -> st.ShardedTensor:
    place = slice(*bounds[world.rank :][:2])
    data = WHOLE.flatten()[place]
    return st.ShardedTensor("w", data, WHOLE.dtype, (4, 4), (4, 4), (0, 0), None, flattened_range=place)


@pytest.mark.parametrize("bounds", [[0, 2, 16], [0, 16, 16], [0, 0, 16], [0, 7, 16]])
def test_flat_shards_that_are_narrowed_to_any_number_of_pieces(bounds: list[int]) -> None:
    storage = st.storage.MemoryStorage()

    def save(world: st.World) -> int:
        tree = st.narrow({"w": flat(world, bounds), "step": 3}, 1, 2, 2)
        st.save(tree, storage, world=world)
        return len(tree["w"])

    lengths = st.simulate(2, save)
    assert len(set(lengths)) == 2 or bounds == [0, 7, 16]
    assert torch.equal(st.load_plain_tensors(storage)["w"], WHOLE[:, 2:])
    assert st.load_common_state_dict(storage)["step"] == 3


def test_what_only_one_rank_has_is_a_difference_still() -> None:
    def save(world: st.World) -> None:
        st.save({"values": [1] if world.rank else []}, st.storage.MemoryStorage(), world=world)

    with pytest.raises(st.errors.IntegrityError, match=r"tree\['values'\]"):
        st.simulate(2, save)


def test_values_of_classes_that_nobody_else_can_import_are_compared() -> None:
    class Local(enum.Enum):
        ONE = 1
        TWO = 2

    def save(world: st.World) -> None:
        st.save({"mode": Local.ONE, "rank": world.rank}, st.storage.MemoryStorage(), world=world)

    with pytest.raises(st.errors.IntegrityError, match=r"tree\['rank'\]: rank 0 has 0, rank 1 has 1") as caught:
        st.simulate(2, save)
    assert "mode" not in str(caught.value)


def test_a_save_that_cannot_be_planned_leaves_nothing_behind() -> None:
    storage = st.storage.MemoryStorage()
    with pytest.raises(st.errors.UnsupportedValue) as caught:
        st.save([st.ShardedObject("fn", print, (1,), (0,))], storage)
    assert "tree is the data of ShardedObject 'fn/shard_0_1'" in caught.value.__notes__
    assert storage.names() == ()
