"""verify: every flipped bit is found and named, and an undamaged checkpoint has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as some

import shardtree as st
from shardtree.storage import BLOCK_BYTES
from tests.strategies.folders import folder_of


def saved() -> dict[str, bytes]:
    def save(world: st.World) -> None:
        tree = {
            "w": st.ShardedTensor.from_rank_offsets("w", torch.arange(100_000) + world.rank, (0, world.rank, 2)),
            "o": st.ShardedObject("o", {"rank": world.rank}, (2,), (world.rank,)),
            "step": 3,
        }
        st.save(tree, folder, world=world)

    folder = st.storage.MemoryStorage()
    st.simulate(2, save)
    (save_id,) = (name for name in folder.names() if name != "metadata.json")
    names = ["metadata.json", *(f"{save_id}/{name}" for name in folder.names(save_id))]
    return {name: folder.read(name) for name in names}


FILES = saved()


def folder_with(changed: dict[str, bytes]) -> st.storage.MemoryStorage:
    return folder_of(FILES | changed)


def flipped(name: str, bit: int) -> dict[str, bytes]:
    data = bytearray(FILES[name])
    data[bit // 8] ^= 1 << bit % 8
    return {name: bytes(data)}


def finds(verify: Callable[[st.storage.MemoryStorage], tuple[st.strategies.Damage, ...]], name: str, bit: int) -> bool:
    """Whether the one damaged place is named: its file, and for a data file the block that the bit is in."""
    found = verify(folder_with(flipped(name, bit)))
    return len(found) == 1 and found[0].file == name and (not found[0].end or covers(found[0], bit // 8))


def covers(damage: st.strategies.Damage, byte: int) -> bool:
    return damage.begin <= byte < damage.end and damage.end - damage.begin <= BLOCK_BYTES


def test_an_undamaged_checkpoint_has_no_damage() -> None:
    seen: list[int] = []
    assert st.verify(folder_with({}), options=st.LoadOptions(progress=seen.append)) == ()
    assert sum(seen) == sum(map(len, FILES.values()))


@pytest.mark.parametrize("name", FILES, ids=lambda name: name.rpartition("/")[2])
def test_every_flipped_bit_is_found_in_its_place(name: str) -> None:
    @given(some.integers(0, 8 * len(FILES[name]) - 1))
    @example(0)
    @example(8 * len(FILES[name]) - 1)
    def law(bit: int) -> None:
        assert finds(st.verify, name, bit)

    law()


def test_the_law_of_flipped_bits_catches_a_check_of_lengths_alone() -> None:
    name = next(name for name in FILES if "-of-" in name)
    assert not finds(lambda folder: (), name, 8 * 5000)


def test_the_keys_that_have_bytes_in_a_damaged_block_are_named() -> None:
    name = next(name for name in FILES if "00001-of" in name)
    last = 8 * len(FILES[name]) - 1
    (first_block,) = st.verify(folder_with(flipped(name, 8 * 5000)))
    (last_block,) = st.verify(folder_with(flipped(name, last)))
    assert first_block.keys == ("w",)
    assert last_block.keys == ("w", "o/shard_1_2")


def test_all_damage_is_listed_at_once() -> None:
    changed = {k: v for name in FILES if "index" not in name and "/" in name for k, v in flipped(name, 99).items()}
    assert len(st.verify(folder_with(changed))) == len(changed) == 3
