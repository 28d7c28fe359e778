"""A converted checkpoint is the source, put through the transform: all of it, bit for bit, cut as was asked."""

from __future__ import annotations

import enum
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree import SaveOptions
from shardtree.conversion import ConversionReport, convert
from shardtree.errors import (
    IntegrityError,
    KeyMismatch,
)
from shardtree.inspection._comparison import compare
from shardtree.shell.table.index import read_index
from shardtree.storage import MemoryStorage
from shardtree.strategies import default_strategies
from shardtree.testing import first_difference, global_states, rank_tree, state_layouts
from shardtree.transforms import split_tensor, stack_layers
from tests.options import convert_keywords
from tests.shell.checkpoint.parts import files, saved
from tests.shell.checkpoint.parts import whole as tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

native = "safetensors"


W = torch.arange(48.0).reshape(8, 6)
TREE = {
    "model": {
        "w": tensor("w", W),
        "b": tensor("b", torch.arange(6).bfloat16()),
        "scalar": tensor("scalar", torch.ones(())),
    },
    "rng": [st.ShardedObject("rng", {"seed": n, "state": torch.arange(n)}, (2,), (n,)) for n in range(2)],
    "args": Namespace(lr=0.1),
    "steps": [1, tensor("hidden", torch.zeros(0, 3)), 2],
}


def converted(source: Any, **options: Any) -> tuple[MemoryStorage, ConversionReport]:
    folder = MemoryStorage()
    return folder, convert(source, folder, **convert_keywords(**{"backend": native, **options}))


def chunks(folder: MemoryStorage) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return the offset and shape of each stored chunk, by key."""
    index = read_index(st.open_checkpoint(folder).checkpoint)
    keys = list(st.load_tensors_metadata(folder))
    found: dict[str, list[Any]] = {key: [] for key in keys}
    for number, offset, shape in zip(index.chunk_key, index.chunk_offset, index.chunk_shape, strict=True):
        axes = int(index.key_axes[number])
        width = len(offset)
        found[keys[number]].append((offset[width - axes :].tolist(), shape[width - axes :].tolist()))
    return found


@pytest.mark.slow
@given(some.data())
def test_a_conversion_changes_nothing(data: some.DataObject) -> None:
    state = data.draw(global_states())
    layout, source = data.draw(state_layouts(state, 2)), MemoryStorage()
    st.simulate(2, lambda world: st.save(rank_tree(state, layout, world.rank), source, world=world))
    most = data.draw(some.sampled_from([1 << 8, 1 << 20]))
    folder, report = converted(source, max_bytes_in_flight=most)
    assert not compare(source, folder)
    assert report.nbytes == report.verified_nbytes == sum(whole.nbytes for whole in state.tensors.values())
    assert (report.tensors, report.unused, report.left_out, report.resumed) == (len(state.tensors), (), (), 0)
    assert not [name for name in files(folder) if "convert" in name]


def layers(count: int) -> list[st.ShardedTensor]:
    return [tensor(f"h.{n}.qkv", torch.arange(24.0).reshape(8, 3) + n) for n in range(count)]


def halves(shard: Any) -> st.ShardedTensorFactory:
    return st.ShardedTensorFactory(shard.key, shard.data, split_in_two, lambda parts: torch.cat(list(parts)))


def split_in_two(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    return [tensor(key, part, (0, number, 2)) for number, part in enumerate(data.chunk(2))]


def rebuilt(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with each tensor taken apart by a factory, and merged again by it."""
    factories = st.map_shards(lambda leaf: halves(leaf) if isinstance(leaf, st.ShardedTensor) else leaf, tree)
    parts = st.map_shards(lambda leaf: getattr(leaf, "data", leaf), st.apply_factories(factories))
    merged = st.apply_factory_merges(parts, factories)
    return {key: replace(tree[key], data=merged[key]) for key in tree}


QKV = torch.stack([shard.data for shard in layers(3)])

TRANSFORMS: dict[str, tuple[Callable[[Any], Any], dict[str, torch.Tensor]]] = {
    "apply_factories": (lambda tree: st.apply_factories(st.map_shards(halves, tree)), {"h.0.qkv": QKV[0]}),
    "factories left to the save": (lambda tree: [halves(leaf) for leaf in tree.values()], {"h.0.qkv": QKV[0]}),
    "apply_factory_merges": (rebuilt, {"h.2.qkv": QKV[2]}),
    "a pipeline": (
        st.compose(
            st.bind(stack_layers, "h"),
            st.bind(st.cast, torch.bfloat16),
            st.bind(split_tensor, "h.qkv", ["q", "k", "v", "w"], axis=1),
        ),
        {"k": QKV[:, 2:4].bfloat16()},
    ),
    "elements computed": (
        lambda tree: st.map_shards(lambda leaf: replace(leaf, data=leaf.data.read() * 2), tree),
        {"h.2.qkv": QKV[2] * 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("most", [40, 1 << 20])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_tree_functions_compose_on_lazy_data(name: str, most: int) -> None:
    transform, expected = TRANSFORMS[name]
    source = saved(layers(3))

    folder, report = converted(source, transform=transform, max_bytes_in_flight=most)
    found = st.load_plain_tensors(folder)
    for key, whole in expected.items():
        assert first_difference(found[key], whole) is None
    assert report.verified_nbytes == report.nbytes == sum(whole.nbytes for whole in found.values())


def test_objects_are_passed_on_renamed_or_made_anew() -> None:
    def transform(tree: dict[str, Any]) -> dict[str, Any]:
        assert all(not isinstance(leaf.data, dict) for leaf in tree.values())
        new = st.ShardedObject("version", {"format": 2}, (1,), (0,))
        return {**st.rename(tree, {"rng": "rng_state"}), "version": new}

    folder, report = converted(saved(TREE), transform=transform, leave_out=["scalar"])
    opened = st.open_checkpoint(folder)
    assert opened["rng_state/shard_1_2"].data["state"].tolist() == [0]
    assert opened["version/shard_0_1"].data == {"format": 2}
    assert (report.objects, report.left_out) == (3, ("scalar",))


def test_the_common_state_is_changed_or_left_out() -> None:
    source = saved(TREE)
    folder, _ = converted(source, transform_common=lambda common: {**common, "args": Namespace(lr=0.2)})
    assert st.load_common_state_dict(folder)["args"] == Namespace(lr=0.2)
    folder, report = converted(source, leave_out=["common"])
    assert st.load_common_state_dict(folder) == {} and report.left_out == ("common",)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("types", [(), (Colour,)])
def test_records_are_passed_on(types: tuple[type, ...]) -> None:
    source = saved([st.ShardedObject("colour", Colour.RED, (1,), (0,)), {"colours": [Colour.RED], "a": torch.ones(2)}])
    folder, _ = converted(source, types=types)
    assert st.open_checkpoint(folder, options=st.LoadOptions(types=(Colour,)))["colour/shard_0_1"].data is Colour.RED
    assert st.load_common_state_dict(folder, options=st.LoadOptions(types=(Colour,)))[1]["colours"] == [Colour.RED]


LAYOUTS: dict[str, tuple[Any, list[tuple[list[int], list[int]]]]] = {
    "rows": ({"w": (4, 1)}, [([row, 0], [2, 6]) for row in (0, 2, 4, 6)]),
    "a grid": (lambda shard: (2, 2) if shard.key == "w" else None, [([r, c], [4, 3]) for r in (0, 4) for c in (0, 3)]),
    "uneven": ({"w*": (9, 9)}, [([row, column], [1, 1]) for row in range(8) for column in range(6)]),
    "thirds": ({"w": [3, 1], "b": [1]}, [([0, 0], [3, 6]), ([3, 0], [3, 6]), ([6, 0], [2, 6])]),
    "open": (None, [([0, 0], [8, 6])]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_destination_is_cut_as_was_asked(name: str) -> None:
    layout, expected = LAYOUTS[name]
    source = saved(TREE)
    folder, _ = converted(source, layout=layout)
    assert chunks(folder)["w"] == expected
    assert not compare(source, folder)


def test_large_tensors_are_cut_and_small_ones_share_a_batch() -> None:
    source = saved(
        [tensor("big", torch.arange(1000.0).reshape(10, 100)), *(tensor(f"s{n}", torch.ones(10)) for n in range(9))]
    )
    folder, report = converted(source, max_bytes_in_flight=1000)
    assert [shape for _, shape in chunks(folder)["big"]] == [[2, 100]] * 5
    assert report.batches == 6 and max(folder.length(name) for name in files(folder) if "-of-" in name) < 2000


def test_progress_counts_what_is_written_and_compared() -> None:
    told: list[int] = []
    _, report = converted(saved([tensor("w", W)]), progress=told.append)
    assert sum(told) == report.nbytes * 2 + 128  # the file's header


def test_what_is_narrowed_away_is_reported() -> None:
    def transform(tree: dict[str, Any]) -> list[Any]:
        w, b = tree["w"].data, tree["b"].data
        return [tensor("top", w[:3]), tensor("left", w[:, :2]), tensor("again", w[:3]), tensor("even", b[::2])]

    _, report = converted(saved(TREE), transform=transform, leave_out=["scalar", "rng", "common"])
    assert dict(report.unused) == {"w": 48 - 18 - 10, "b": 3}


# Tensors of a common state that is left out.

BUFFERS = {
    "w": tensor("model.w", W),
    "model": {"norm": {"seen": torch.tensor(7), "mean": torch.arange(3.0).bfloat16()}},
    "seeds": [torch.ones(2, 3).T, 3],
    "none": torch.zeros(0, 2),
    "step": 5,
}
WRITTEN = {
    "model.norm.seen": torch.tensor(7),
    "model.norm.mean": torch.arange(3.0).bfloat16(),
    "seeds.0": torch.ones(3, 2),
    "none": torch.zeros(0, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["huggingface", native, "torch_dist", "zarr"])
def test_tensors_of_a_common_state_that_is_left_out_are_written(backend: str) -> None:
    folder, report = converted(saved(BUFFERS), backend=backend, leave_out=["common"], max_bytes_in_flight=8)
    found = st.load_plain_tensors(folder)
    expected = {**WRITTEN, "model.w": W}
    assert found.keys() == expected.keys()
    assert all(first_difference(found[key], each) is None for key, each in expected.items())
    assert st.load_common_state_dict(folder) == {} and report.left_out == ("common",)
    assert report.tensors == 5 and report.verified_nbytes == report.nbytes


def test_tensors_of_a_common_state_that_is_left_out_reach_the_output_or_are_named() -> None:
    source = saved(BUFFERS)
    keep = lambda tree: {"model.w": tree["model.w"]}  # noqa: E731
    with pytest.raises(KeyMismatch, match=r"lacks keys of the source(.|\n)*'model\.norm\.mean'") as caught:
        converted(source, transform=keep, leave_out=["common"])
    assert "'seeds.0'" in str(caught.value)
    for choice in ({"leave_out": ["common", "model.norm.*", "seeds.*"]}, {"leave_out": ["common"], "prune": True}):
        _, report = converted(source, transform=keep, **choice)
        assert report.left_out == ("model.norm.mean", "model.norm.seen", "seeds.0", "common")
    half = st.bind(st.cast, torch.float16)
    folder, _ = converted(source, transform=half, leave_out=["common"])
    assert st.load_plain_tensors(folder)["seeds.0"].dtype == torch.float16


class Stats(NamedTuple):
    mean: torch.Tensor
    batches: int


def test_tensors_of_a_common_state_without_a_key_of_their_own_are_named() -> None:
    source = saved(
        {
            "a": tensor("b.c", W),
            "b": {"c": torch.ones(1), "set": {torch.ones(1)}},
            "d": {"e": torch.ones(1)},
            "d.e": torch.ones(2),
            "stats": Stats(torch.ones(1), 2),
        }
    )
    folder, report = converted(source, leave_out=["common"])
    assert st.load_plain_tensors(folder).keys() == {"b.c", "d.e"}
    named = ["common['b']['c']", "common['b']['set']", "common['d.e']", "common['stats']"]
    assert report.left_out == ("common", *named)


SPECIAL = {"sparse": torch.eye(3).to_sparse(), "sparse rows": torch.ones(2, 3).to_sparse(1)}


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_tensor_that_is_not_its_elements_is_named(kind: str) -> None:
    tree = {"w": tensor("w", W), "c": {"buffer": SPECIAL[kind], "seen": torch.ones(2)}}
    source = saved(tree, options=SaveOptions(allow_pickle=True), sharded_strategy="dcp")
    for left_out in (["common"], ["common", "c.seen"]):
        folder, report = converted(source, leave_out=left_out, allow_pickle=True, backend="huggingface")
        assert report.left_out[-2:] == ("common", "common['c']['buffer']")
        assert st.load_plain_tensors(folder).keys() == {"w", "c.seen"} - {*left_out}


def test_a_common_state_that_is_pickled_may_be_left_out_unread() -> None:
    source = saved({"w": tensor("w", W), "fn": Path.joinpath}, options=SaveOptions(allow_pickle=True))
    folder, report = converted(source, leave_out=["common"])
    assert report.left_out == ("common",) and [*st.load_plain_tensors(folder)] == ["w"]


def test_what_is_pruned_is_listed_as_left_out() -> None:
    folder, report = converted(saved(TREE), transform=lambda tree: {"w": tree["w"]}, leave_out=["b"], prune=True)
    assert list(st.load_tensors_metadata(folder)) == ["w"]
    assert report.left_out[0] == "b" and "scalar" in report.left_out


def test_a_name_of_another_checkpoint_accounts_for_nothing() -> None:
    other = st.open_checkpoint(saved([tensor("w", W)]))
    with pytest.raises(KeyMismatch, match="lacks keys of the source\n  'w'"):
        converted(saved([tensor("w", W)]), transform=lambda tree: {"w": other["w"]})


def test_the_folders_that_are_made_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, synced, fsync = saved(TREE), set[str](), os.fsync

    def told(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", told)
    convert(source, tmp_path / "new" / "folder", backend=(native, 1))
    assert {str(tmp_path.resolve()), str(tmp_path.resolve() / "new")} <= synced


def test_a_source_that_is_damaged_is_noticed() -> None:
    source = saved([tensor("w", torch.zeros(100_000))])
    name = next(name for name in files(source) if "-of-" in name)
    data = bytearray(source.read(name))
    data[200_000] ^= 1
    source.write(name, [memoryview(data)], durable=False)
    with pytest.raises(st.errors.CorruptCheckpoint):
        converted(source)


def zeroed(leaf: st.ShardedTensor) -> torch.Tensor:
    return torch.zeros(leaf.local_shape, dtype=leaf.dtype)


def altered(leaf: st.ShardedTensor) -> torch.Tensor:
    """Return what is read, and fingerprinted, and then another value."""
    return leaf.data.read().fill_(7)  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", [zeroed, altered])
def test_the_check_catches_a_tensor_that_was_not_kept(fault: Callable[[st.ShardedTensor], torch.Tensor]) -> None:
    row = (st.StrategyAction.SAVE_SHARDED, native, 1)

    def wrong(pending: st.strategies.PendingSave, shards: Any) -> Any:
        return default_strategies[row](
            pending, [replace(leaf, data=fault(leaf)) if leaf.key == "w" else leaf for leaf in shards]
        )

    with pytest.raises(IntegrityError, match="'w': 47 of 48 elements differ"):
        converted(saved(TREE), strategies={**default_strategies, row: wrong})


def noting_reads(note: Callable[[Any, Any], object]) -> st.strategies.Strategies:
    """Return a table by which loads tell of which checkpoint which shards are read."""
    row = (st.StrategyAction.LOAD_SHARDED, native, 1)

    def noted(checkpoint: st.strategies.Checkpoint, shards: Any) -> Any:
        note(checkpoint, shards)
        return default_strategies[row](checkpoint, shards)

    return {**default_strategies, row: noted}


@pytest.mark.parametrize("backend", [native, "torch_dist", "zarr", "huggingface"])
def test_the_source_is_read_once(backend: str) -> None:
    source = saved([tensor("w", torch.arange(3_000_000.0).reshape(3, 1_000_000)), tensor("v", torch.ones(5))])
    elements: list[int] = []

    def note(checkpoint: st.strategies.Checkpoint, shards: Any) -> None:
        elements.extend(leaf.data.numel() for leaf in shards if checkpoint.storage is source)

    _, report = converted(source, strategies=noting_reads(note), backend=backend, leave_out=["common"])
    assert sum(elements) == 3_000_005
    assert report.fingerprints == st.fingerprint(source)


def test_small_tensors_are_read_many_at_a_time() -> None:
    calls: list[int] = []
    tree = [tensor(f"w{number}", torch.full((3, 2), number)) for number in range(200)]
    transform = st.compose(st.bind(st.prefix, "x."), lambda tree: st.map_shards(lambda leaf: leaf, tree))
    strategies = noting_reads(lambda _, shards: calls.append(len(shards)))
    folder, _ = converted(saved(tree), strategies=strategies, transform=transform)
    assert calls == [200, 200]  # to write, and to check what was written
    assert st.load_plain_tensors(folder)["x.w7"].tolist() == [[7, 7]] * 3
