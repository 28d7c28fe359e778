"""The shards in one format and the common state in another: what a pair takes comes back, and a flipped bit is seen.

Pairs are of all formats that the table can save, and of one that a user adds: tensors alone, as Hugging Face's, whose
objects go to the format of the common state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CorruptCheckpoint, KeyMismatch, StrategyError, UnsupportedValue
from shardtree.shell.table import METADATA_FILE, decode_metadata, encode_metadata
from shardtree.storage import MemoryStorage
from shardtree.strategies import (
    StoredItem,
    StrategyAction,
    default_strategies,
    item_buffers,
    rank_file,
    rank_files,
    rows_of_saves,
    save_with_index,
    write_file,
)
from shardtree.testing import check_strategy
from shardtree.testing.conformance import _layout_cases, _promises
from tests.faults.sampling import EXHAUSTIVE, SEED, sample
from tests.inspection.test_verify_flips import Case, check_flip, verified
from tests.shell.checkpoint.parts import files as walk
from tests.shell.table.folders import Files, flipped, folder_of

Format = tuple[str, int]
Pair = tuple[Format, Format]

HUGGING_FACE, NATIVE, ADDED = ("huggingface", 1), ("safetensors", 1), ("models", 4)
TABLE = default_strategies | {
    (action, *ADDED): function
    for (action, *name), function in default_strategies.items()
    if tuple(name) == HUGGING_FACE
}


def savers(action: StrategyAction) -> list[Format]:
    return [(name, version) for each, name, version in default_strategies if each is action]


PAIRS: list[Pair] = list(product([*savers(StrategyAction.SAVE_SHARDED), ADDED], savers(StrategyAction.SAVE_COMMON)))
ALONE = {
    "w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2)),
    "o": st.ShardedObject("o", {"seed": 1}, (1,), (0,)),
    "step": 3,
}
BESIDE: Pair = (HUGGING_FACE, NATIVE)
"""Objects in another format than the shards."""


def tree_of(rank: int, *, objects: bool, values: bool) -> dict[str, Any]:
    part = torch.arange(6.0).view(1, 6) + rank
    shards = {"w": st.ShardedTensor.from_rank_offsets("w", part, (0, rank, 2))}
    own = {"o": st.ShardedObject("o", {"seed": [rank] * 9}, (2,), (rank,))} if objects else {}
    return shards | own | ({"step": 3} if values else {})


@cache
def saved(pair: Pair, *, objects: bool = True, values: bool = True) -> Files | None:
    """Return the files of a save by two ranks; None where the pair refuses the tree, and leaves no checkpoint."""
    folder = MemoryStorage()
    try:
        st.simulate(2, lambda world: save(folder, pair, world=world, objects=objects, values=values))
    except (UnsupportedValue, StrategyError):
        assert not st.is_checkpoint(folder, strategies=TABLE)
        return None
    return {name: bytes(folder.read(name)) for name in walk(folder)}


def save(folder: MemoryStorage, pair: Pair, *, world: Any, objects: bool = True, values: bool = True) -> None:
    tree = tree_of(world.rank, objects=objects, values=values)
    st.save(tree, folder, *pair, world=world, strategies=TABLE, options=st.SaveOptions(durable=False))


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_what_a_pair_takes_comes_back_and_is_sound(pair: Pair) -> None:
    for objects, values in product((True, False), repeat=2):
        files = saved(pair, objects=objects, values=values)
        if files is None:
            continue
        whole = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 6))}
        cells = [st.ShardedObject("o", None, (2,), (cell,)) for cell in range(2)] if objects else []
        folder = folder_of(files)
        loaded = st.load({**whole, "o": cells}, folder, strategies=TABLE)
        assert loaded["w"].tolist() == [[*range(6)], [*range(1, 7)]]
        assert loaded["o"] == [{"seed": [rank] * 9} for rank in range(2)][: len(cells)]
        assert loaded.get("step") == (3 if values else None)
        assert [*st.open_checkpoint(folder, strategies=TABLE)] == sorted(
            ["w", *(cell.unique_key for cell in cells)], key=lambda key: key != "w"
        )
        assert verified(files, strategies=TABLE)[0] == ()


@pytest.mark.slow
def test_each_format_of_shards_takes_values_in_ours_and_in_its_own() -> None:
    """So that the laws here don't hold by refusing everything."""
    taken = {pair for pair in PAIRS if saved(pair, objects=False) is not None}
    assert taken >= {(sharded, NATIVE) for sharded, _ in PAIRS}
    assert {pair for pair in PAIRS if saved(pair) is not None} >= {(sharded, NATIVE) for sharded, _ in PAIRS}
    assert len(taken) > 20


def case_of(pair: Pair, **what: bool) -> Case | None:
    files = saved(pair, **what)
    return None if files is None else Case(files, verified(files, strategies=TABLE)[1].unchecked)


def flips_are_seen(pair: Pair, count: int, **options: Any) -> None:
    """Raise unless some flipped bits of each file are found, or known to be unchecked."""
    random = Random(f"{SEED} {pair}")
    for objects in (True, False):
        if (one := case_of(pair, objects=objects)) is None:
            continue
        for name, data in sorted(one.files.items()):
            for byte in random.sample(range(len(data)), min(count, len(data))):
                check_flip(one, name, 8 * byte + random.randrange(8), **({"strategies": TABLE} | options))


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_flipped_bit_is_seen_in_whatever_format_it_lies(pair: Pair) -> None:
    flips_are_seen(pair, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_so_is_one_in_any_byte(pair: Pair) -> None:
    flips_are_seen(pair, 10**9)


def test_the_law_of_pairs_catches_a_format_that_leaves_its_objects_to_the_shards() -> None:
    row = (StrategyAction.VERIFY, *NATIVE)

    def only_common(checkpoint: Any) -> Any:
        fields = checkpoint.fields | {"sharded_backend": "huggingface"}
        return default_strategies[row](replace(checkpoint, fields=fields))

    with pytest.raises(AssertionError, match=r"of-00002|index-0"):
        flips_are_seen(BESIDE, 3, strategies=TABLE | {row: only_common})


@pytest.mark.parametrize("pair", [BESIDE, (ADDED, NATIVE)], ids=str)
def test_damaged_objects_beside_tensors_are_named(pair: Pair) -> None:
    files = saved(pair)
    assert files is not None
    (name,) = [name for name in files if name.startswith("save-") and name.endswith("00001-of-00002.safetensors")]
    broken = flipped(files, name, 8 * len(files[name]) - 9)
    (damage,), _ = verified(broken, strategies=TABLE)
    assert (damage.file, damage.keys) == (name, ("o/shard_1_2",))
    cells = [st.ShardedObject("o", None, (2,), (cell,)) for cell in range(2)]
    with pytest.raises(CorruptCheckpoint):
        st.load({"o": cells}, folder_of(broken), strategies=TABLE)


@pytest.mark.parametrize("common", ["torch", "torch_dist", "dcp", "zarr"])
def test_objects_that_no_load_could_read_are_refused(common: str) -> None:
    with pytest.raises(
        UnsupportedValue, match=rf"'huggingface' stores only tensors, and backend '{common}' cannot store"
    ) as error:
        st.save(ALONE, MemoryStorage(), "huggingface", common)
    assert "'o/shard_0_1'" in str(error.value) and "common_strategy=('safetensors', 1)" in str(error.value)


def test_objects_that_were_not_saved_are_not_stored() -> None:
    files = saved((HUGGING_FACE, ("torch", 1)), objects=False)
    assert files is not None
    with pytest.raises(KeyMismatch, match="'o/shard_0_1': not stored"):
        st.load({"o": st.ShardedObject("o", None, (1,), (0,))}, folder_of(files))


def test_a_common_state_beside_other_shards_is_no_model() -> None:
    with pytest.raises(StrategyError, match="the common state is to be saved as 'huggingface'"):
        st.save({"w": ALONE["w"]}, MemoryStorage(), "safetensors", "huggingface")


def test_the_index_of_a_model_beside_metadata_is_compared_with_its_files() -> None:
    files = saved(BESIDE)
    assert files is not None
    name = "model.safetensors.index.json"
    changed = files | {name: files[name].replace(b'"w"', b'"v"')}
    ((damage,), _) = verified(changed)
    assert damage.file == name


def save_in_one_file(pending: Any, shards: Any) -> Any:
    def write() -> Any:
        buffers = [b"".join(item_buffers(pending, shard)) for shard in shards]
        begins = accumulate((len(each) for each in buffers), initial=0)
        rows = zip(shards, begins, buffers, strict=False)
        stored = [StoredItem(shard, begin, len(each)) for shard, begin, each in rows]
        return rank_files(pending, [(write_file(pending, rank_file(pending, "rows"), buffers), stored)])

    return save_with_index(pending, write)


def test_two_formats_with_the_same_fields_are_refused_at_the_commit() -> None:
    rows = {row: each for row, each in rows_of_saves("rows", 1).items() if row[0] is not StrategyAction.LOAD_OBJECTS}
    table = default_strategies | rows | {(StrategyAction.SAVE_SHARDED, "rows", 1): save_in_one_file}
    folder = MemoryStorage()
    with pytest.raises(StrategyError, match=r"different values for fields of metadata\.json\n  'index'"):
        st.save(ALONE, folder, ("rows", 1), NATIVE, strategies=table)
    assert not st.is_checkpoint(folder)


# metadata.json: its hash may be misnamed by a flipped bit.

FIELDS = {
    "sharded_backend": "dcp",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@given(some.integers(0, 5), some.integers(0, 7), some.dictionaries(some.text(max_size=6), some.integers(), max_size=3))
def test_a_flipped_bit_in_the_name_of_the_hash_is_seen(byte: int, bit: int, others: dict[str, int]) -> None:
    data = bytearray(encode_metadata(FIELDS | {f"x {name}": value for name, value in others.items()}))
    data[data.index(b'"digest"') + 1 + byte] ^= 1 << bit
    with pytest.raises(CorruptCheckpoint):
        decode_metadata(bytes(data), METADATA_FILE)


def test_a_field_with_nearly_the_name_of_the_hash_is_another_programs() -> None:
    text = '{"common_backend":"torch","digesT":"0123456789abcdef","sharded_backend":"torch_dist"}'
    assert decode_metadata(text.encode(), METADATA_FILE)["digesT"] == "0123456789abcdef"


# All promises of a format beside another one.

WITH_OPTIONS = ("common values keep their places", "a checkpoint is replaced as a whole, and only when asked")
"""Promises that need options which a writer isn't given."""
PROMISES = [
    promise.name for promise in (*_promises.PROMISES, *_layout_cases.RANDOM) if promise.name not in WITH_OPTIONS
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=() if pair in sample(PAIRS[1:], 2) else EXHAUSTIVE) for pair in PAIRS], ids=str
)
def test_a_pair_keeps_the_promises_of_the_shards_format(pair: Pair) -> None:
    if saved(pair, objects=False, values=False) is None:
        return

    def write(trees: Any, place: Any) -> None:
        options = st.SaveOptions(durable=False)
        st.simulate(
            len(trees),
            lambda world: st.save(trees[world.rank], place, *pair, world=world, strategies=TABLE, options=options),
        )

    report = check_strategy(*pair[0], strategies=TABLE, save=write, examples=1, only=PROMISES)
    assert {"verify sees flipped bits, or says that it cannot", "metadata says what was saved"} <= {*report.kept}
