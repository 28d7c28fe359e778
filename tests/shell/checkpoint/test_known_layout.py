"""With a layout that every rank computed by itself, a save writes and a load reads the same, and none is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.layouts import select_rows, tensor_shards, tree_columns
from shardtree.errors import CheckpointingException, IntegrityError
from shardtree.layouts import Mesh, PartitionSpec, TensorKind
from shardtree.storage import MemoryStorage
from shardtree.testing import GlobalState, check_roundtrip, global_states, rank_tree, state_layouts
from shardtree.world import World
from tests.core.trees.samples import assert_caught
from tests.options import load_keywords, save_keywords
from tests.shell.checkpoint.parts import ALL_FORMATS, saved_by

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

Layouts = Mapping[str, Any]


def told(state: GlobalState, layout: Layouts, order: int = 0) -> st.layouts.ShardColumns:
    """Return what all ranks hold, rows in any order."""
    ranks = next(iter(layout.values())).ranks
    columns = tree_columns([rank_tree(state, layout, rank) for rank in range(ranks)])
    return select_rows(columns, np.random.default_rng(order).permutation(len(columns)))


def files(folder: MemoryStorage) -> dict[str, bytes]:
    """Return the data files, without the name of the save."""
    return {name.split("/")[1]: folder.read(name) for name in folder.all_names() if "-of-" in name}


def check_same_files(save: Callable[..., Any], state: GlobalState, layout: Layouts) -> None:
    ranks = next(iter(layout.values())).ranks
    exchanged, known = MemoryStorage(), MemoryStorage()

    def save_both(world: World) -> None:
        tree = rank_tree(state, layout, world.rank)
        st.save(tree, exchanged, world=world)
        save(tree, known, world=world, layout=told(state, layout, world.rank))

    st.simulate(ranks, save_both)
    assert files(known) == files(exchanged)


@some.composite
def placed_states(draw: some.DrawFn) -> tuple[GlobalState, Layouts]:
    state = draw(global_states())
    layout = draw(state_layouts(state, draw(some.integers(1, 4))))
    pieces = [
        (key, piece.rank, piece.offset, piece.shape, piece.flat) for key, of in layout.items() for piece in of.pieces
    ]
    # Which of several equal boxes without elements a rank writes, and so their order, is left open.
    assume(len(set(pieces)) == len(pieces))
    return state, layout


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@given(placed_states())
def test_a_save_that_knows_the_layout_writes_the_same_files(placed: tuple[GlobalState, Layouts]) -> None:
    check_same_files(st.save, *placed)


def save_main_replicas(tree: Any, folder: Any, *, layout: Any, **options: Any) -> None:
    """The planted fault: a save that lets each main replica be written where it is."""
    st.save(tree, folder, validate_access_integrity=False, **save_keywords(**options))


@pytest.mark.slow
def test_the_law_of_files_catches_replicas_that_are_not_shared_out() -> None:
    assert_caught(lambda save, placed: check_same_files(save, *placed), save_main_replicas, placed_states())


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@given(some.data(), some.sampled_from(["never", "always"]), some.booleans())
def test_what_is_loaded_by_known_layouts_is_what_was_saved(data: Any, exchange: Any, checked: bool) -> None:
    state = data.draw(global_states())
    saved, loaded = (data.draw(state_layouts(state, data.draw(some.integers(1, 4)))) for _ in range(2))
    options = {"exchange": exchange, "validate_access_integrity": checked}
    save = partial(st.save, layout=told(state, saved), validate_access_integrity=checked)
    check_roundtrip(
        state, saved, loaded, save=save, load=partial(st.load, layout=told(state, loaded), **load_keywords(**options))
    )


MESH = Mesh(dp=2, tp=2)
SPECS = [PartitionSpec("tp"), PartitionSpec("dp", "tp"), PartitionSpec()]


def model(tensors: int) -> tuple[list[dict[str, Any]], st.layouts.ShardColumns]:
    """Return the trees of all ranks of a mesh, and their layout, for as many tensors."""
    state = {f"w{number}": torch.arange(24.0).view(4, 6) + number for number in range(tensors)}
    specs = {key: SPECS[number % len(SPECS)] for number, key in enumerate(state)}
    trees = [{"step": 3, **tree} for tree in st.shard(state, MESH, specs)]
    return trees, tree_columns(trees)


# What is refused


TREES, LAYOUT = model(3)
WITHOUT_ONE = select_rows(LAYOUT, np.flatnonzero((LAYOUT.rank != 2) | (LAYOUT.key != 1)))

REFUSED: dict[str, tuple[type[CheckpointingException], str, Callable[[int], Any]]] = {
    "a shard is missing": (CheckpointingException, r"'w1', (.|\n)* is in the tree alone", lambda rank: WITHOUT_ONE),
    "a shard too many": (CheckpointingException, r"'w3', (.|\n)* is in the layout alone", lambda rank: model(4)[1]),
    "another dtype": (
        CheckpointingException,
        r"'w0', \(4, 6\) float16(.|\n)* is in the layout alone",
        lambda rank: replace(LAYOUT, kinds=(TensorKind(torch.float16, (4, 6), 0), *LAYOUT.kinds[1:])),
    ),
    "another one on some rank": (
        IntegrityError,
        "layouts differ(.|\n)*ranks 0, 2, 3: layout(.|\n)*rank 1: layout",
        lambda rank: WITHOUT_ONE if rank == 1 else LAYOUT,
    ),
    "none on some rank": (IntegrityError, "layouts differ(.|\n)*rank 1: none", lambda r: None if r == 1 else LAYOUT),
    "no main replicas": (
        CheckpointingException,
        "is in the (tree|layout) alone",
        lambda rank: replace(LAYOUT, main=np.zeros(len(LAYOUT), dtype=np.bool_)),
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
@pytest.mark.parametrize("action", ["save", "load"])
def test_a_layout_that_is_not_the_ranks_is_refused_on_all(fault: str, action: str) -> None:
    kind, message, layout = REFUSED[fault]
    folder = saved_by(TREES) if action == "load" else MemoryStorage()
    act: Any = {"save": st.save, "load": st.load}[action]

    def refused(world: World) -> None:
        with pytest.raises(kind, match=message):
            act(TREES[world.rank], folder, world=world, layout=layout(world.rank))

    st.simulate(MESH.size, refused)
    assert st.is_checkpoint(folder) == (action == "load")


def test_a_key_that_a_layout_has_no_rows_of_is_not_in_it() -> None:
    folder, other = saved_by(TREES, layout=LAYOUT), MemoryStorage()
    (fewer, known), selected = model(2), select_rows(LAYOUT, np.flatnonzero(LAYOUT.key != LAYOUT.keys.index("w2")))

    def load(world: World) -> Any:
        own: dict[str, Any] = {"world": world, "layout": selected if world.rank else known}
        results = [
            st.load(fewer[world.rank], folder, strict="return_all", validate_access_integrity=checked, **own)
            for checked in (True, False)
        ]
        st.save(fewer[world.rank], other, **own)
        return [result[1:] for result in results]

    assert st.simulate(MESH.size, load) == [[({"w2"}, set())] * 2] * MESH.size


# Other paths


def test_what_is_left_out_converted_or_padded_is_told_where_layouts_are_known() -> None:
    folder = saved_by(TREES, layout=LAYOUT)
    more, layout = model(4)
    halved = [st.cast(tree, torch.float16) for tree in TREES]

    def load(world: World) -> tuple[Any, Any, Any]:
        own: dict[str, Any] = {"world": world, "options": st.LoadOptions(exchange="always")}
        lacking = st.load(more[world.rank], folder, strict="return_all", layout=layout, **own)
        converted = st.load(halved[world.rank], folder, cast=True, layout=tree_columns(halved), **own)
        shards = tensor_shards(TREES[world.rank])
        padded = {"step": 3} | {each.key: replace(each, allow_shape_mismatch=world.rank == 1) for each in shards}
        return lacking, converted, st.load(padded, folder, layout=LAYOUT, **own)

    for tree, ((loaded, missing, unexpected), converted, padded) in zip(
        TREES, st.simulate(MESH.size, load), strict=True
    ):
        assert (missing, unexpected) == (set(), {"w3"})
        for shard in tensor_shards(tree):
            assert torch.equal(loaded[shard.key], shard.data)
            assert torch.equal(converted[shard.key], shard.data.half())
            assert torch.equal(padded[shard.key], shard.data)


@pytest.mark.parametrize("backend", ALL_FORMATS, ids=str)
def test_asynchronous_saves_of_every_format_get_the_layout_too(backend: tuple[str, int]) -> None:
    trees = [{key: leaf for key, leaf in tree.items() if key != "step"} for tree in TREES]
    folder = MemoryStorage()

    def save(world: World) -> None:
        with st.AsyncCallsQueue() as queue:
            request = st.save(trees[world.rank], folder, backend, world=world, layout=LAYOUT, async_sharded_save=True)
            queue.schedule_async_request(request)

    st.simulate(MESH.size, save)
    assert torch.equal(st.load_plain_tensors(folder)["w1"], torch.arange(24.0).view(4, 6) + 1)
