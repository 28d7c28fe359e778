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


def test_values_of_classes_that_nobody_else_can_import_are_compared() -> None:
    class Local(enum.Enum):
        ONE = 1
        TWO = 2

    def save(world: st.World) -> None:
        st.save({"mode": Local.ONE, "rank": world.rank}, st.storage.MemoryStorage(), world=world)

    with pytest.raises(st.errors.IntegrityError, match=r"tree\['rank'\]: rank 0 has 0, rank 1 has 1") as caught:
        st.simulate(2, save)
    assert "mode" not in str(caught.value)
