"""Resharding plans: what they say and print, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree import Mesh, PartitionSpec
from shardtree.core.layouts import select_rows
from shardtree.layouts import ShardColumns
from shardtree.testing import check_reshard_plan, global_states, rank_tree, state_layouts, target_tree
from tests.core.trees.samples import assert_caught
from tests.live.reshard_layouts import mesh_layout

ROWS, COLUMNS = PartitionSpec("tp"), PartitionSpec(None, "tp")
COLUMNS_OF_ALL = {"w": COLUMNS, "b": ROWS}


def shard(key: str, data: torch.Tensor, *offsets: tuple[int, int, int], replica: int = 0) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica)


def test_many_ranks_print_as_a_few_lines() -> None:
    plan = st.plan_reshard(mesh_layout(Mesh(tp=48), ROWS), mesh_layout(Mesh(tp=48), COLUMNS))
    assert len(str(plan).splitlines()) == 37 and "and 16 more" in str(plan)
    assert len(str(plan.explain("w")).splitlines()) == 43


def engine(rank: int) -> dict[str, Any]:
    """Return an engine's tree: a fused tensor that is stored as two, and one under a name of its own."""
    gate_up = st.lenses.as_factory(
        shard("mlp.gate_up", torch.zeros(8, 2)),
        st.lenses.gate_and_up(tensor_parallel=1, part="gate_up", names=("gate", "up")),
    )
    return {"model": {"fused": gate_up, "norm.0": [shard("layers.0.norm", torch.zeros(3), replica=rank)]}}


TRAINER = {name: shard(name, torch.zeros(4, 2)) for name in ("mlp.gate", "mlp.up")} | {
    "norm": shard("layers.0.norm", torch.zeros(3))
}


def test_a_tensor_is_explained_by_the_name_under_which_the_target_holds_it() -> None:
    plan = st.plan_reshard({0: TRAINER}, {0: {}, 1: engine(0)})
    assert (
        str(plan.explain("model.norm.0.0"))
        .splitlines()[0]
        .startswith("'model.norm.0.0', which is 'layers.0.norm' (3,)")
    )
    assert plan.explain("model.norm.0.0").origins == plan.explain("layers.0.norm").origins
    assert str(plan.explain("model.fused")).splitlines() == [
        "'model.fused', which is 'mlp.gate' (4, 2) float32, 'mlp.up' (4, 2) float32: 64 B move, 0 B stay",
        "rank        gets  bytes    from        of",
        "   1  [0:4, 0:2]   32 B  rank 0  mlp.gate",
        "   1  [0:4, 0:2]   32 B  rank 0    mlp.up",
    ]
    assert plan.explain("mlp.gate_up").origins == plan.explain("model.fused").origins
    assert st.plans.with_relays(plan).explain("model.fused").bytes_moved == 64


def test_a_tensor_s_own_key_comes_before_another_s_place() -> None:
    plan = st.plan_reshard([TRAINER], [{"mlp.up": TRAINER["mlp.gate"], "up": TRAINER["mlp.up"]}])
    assert list(plan.explain("mlp.up").kinds) == ["mlp.up"] and list(plan.explain("up").kinds) == ["mlp.up"]


Drawn = Callable[[], tuple[list[Any], list[Any]]]
Explain = Callable[[st.ReshardPlan, str], Any]


def finds_each_place(explain: Explain, drawn: Drawn) -> None:
    trees, targets = drawn()
    plan = st.plan_reshard(trees, targets)
    for rank, tree in enumerate(targets):
        for path, leaf in st.trees.leaves_with_paths(tree):
            for _, built in st.trees.leaves_with_paths(st.apply_factories([leaf])):
                if isinstance(built, st.ShardedTensor):
                    found = explain(plan, ".".join(map(str, path)))
                    wanted = [one for one in plan.explain(built.key).origins if one.rank == rank]
                    assert {*map(repr, wanted)} <= {*map(repr, found.origins)}


@some.composite
def resharded(draw: some.DrawFn) -> Drawn:
    """Return trees in two layouts, the second of them of factories here and there."""
    state = draw(global_states())
    ranks = draw(some.integers(1, 3))
    one, other = (draw(state_layouts(state, ranks)) for _ in range(2))
    factory = partial(st.lenses.as_factory, lens=st.lenses.compose())
    turns = draw(some.booleans())
    targets = [
        st.map_shards(lambda leaf: factory(leaf) if turns and isinstance(leaf, st.ShardedTensor) else leaf, tree)
        for tree in (target_tree(state, other, rank) for rank in range(ranks))
    ]
    trees = [rank_tree(state, one, rank) for rank in range(ranks)]
    return lambda: (trees, targets)  # torch can't print some dtypes, as Hypothesis would


@pytest.mark.slow
@given(resharded())
def test_each_place_of_the_target_is_explained(drawn: Drawn) -> None:
    finds_each_place(lambda plan, name: plan.explain(name), drawn)


@pytest.mark.slow
def test_the_law_of_places_catches_names_of_one_rank_alone() -> None:
    def of_rank_zero(plan: st.ReshardPlan, name: str) -> Any:
        found = plan.explain(name)
        return replace(found, origins=tuple(one for one in found.origins if one.rank == 0))

    assert_caught(finds_each_place, of_rank_zero, resharded())


def moves(plan: st.ReshardPlan) -> list[list[object]]:
    """Return all of a plan but the rows of the source, which columns may have in another order than trees."""
    names = [field.name for field in fields(plan.transfers) if field.name != "source"]
    return [getattr(plan.transfers, name).tolist() for name in names]


def test_metadata_is_planned_as_trees_are() -> None:
    whole = {"w": torch.zeros(8, 6), "b": torch.zeros(6)}
    specs = {"w": ROWS, "b": PartitionSpec()}
    source, target = st.shard(whole, Mesh(dp=2, tp=4), specs), st.abstract(whole, Mesh(tp=3), COLUMNS_OF_ALL)
    expected = moves(st.plan_reshard(source, target))
    for described in (
        [st.without_data(tree) for tree in source],
        [st.extract_metadata(tree) for tree in source],
        st.abstract(whole, Mesh(dp=2, tp=4), specs),
        st.layout_of(whole, Mesh(dp=2, tp=4), specs),
    ):
        assert moves(st.plan_reshard(described, target)) == expected


def test_a_checkpoint_is_planned_against_by_its_metadata(tmp_path: Path) -> None:
    whole = {"w": torch.zeros(8, 6), "rng": st.ShardedObject("rng", 1, (1,), (0,))}
    st.save(st.shard_at(whole, Mesh(tp=1), ROWS, 0), tmp_path / "ck")
    stored = st.load_tensors_metadata(tmp_path / "ck")
    target = st.abstract(stored, Mesh(tp=2), COLUMNS)
    for metadata in (stored, st.load_sharded_metadata(tmp_path / "ck")):
        plan = st.plan_reshard({2: metadata}, target)
        assert plan.links == {(2, 0): 96, (2, 1): 96} and plan.check() == ()


def test_ranks_without_main_replicas_are_enough() -> None:
    plan = st.plan_reshard({3: [shard("w", torch.zeros(6), replica=1)]}, {4: [shard("w", torch.zeros(6))]})
    check_reshard_plan(plan)
    assert plan.links == {(3, 4): 24}


def test_prepended_axes_make_no_difference() -> None:
    layers = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, i, 2), prepend_axis_num=1) for i in range(2)]
    plan = st.plan_reshard([layers], {1: [shard("w", torch.zeros(2, 4))]})
    check_reshard_plan(plan)


def test_a_box_is_cut_only_into_parts_that_are_worth_it() -> None:
    whole, one = PartitionSpec(), Mesh(dp=1).on_ranks([9])
    held, wanted = mesh_layout(Mesh(dp=4), whole), mesh_layout(one, whole)
    assert len(st.plan_reshard(held, wanted).transfers) == 1
    assert len(st.plan_reshard(held, wanted, shortest_cut=4000).transfers) == 2
    assert len(st.plan_reshard(held, wanted, shortest_cut=1).transfers) == 4


def test_small_tensors_are_dealt_to_all_who_have_them() -> None:
    tree = {f"w{n}": shard(f"w{n}", torch.zeros(4)) for n in range(10)}
    copy = {f"w{n}": shard(f"w{n}", torch.zeros(4), replica=1) for n in range(10)}
    assert st.plan_reshard([tree, copy], {7: tree}).sent == {0: 80, 1: 80, 7: 0}


@pytest.mark.parametrize(("rows", "ranks"), [(2**33, 1), (2**28, 7)])
def test_more_bytes_than_can_be_counted_are_refused(rows: int, ranks: int) -> None:
    layouts = mesh_layout(Mesh(tp=2), ROWS, (rows, 2**31)), mesh_layout(Mesh(dp=ranks), PartitionSpec(), (rows, 2**31))
    for one, other in (layouts, layouts[::-1]):
        with pytest.raises(st.errors.ShapeError, match=r"together are too large\n  'w' "):
            st.plan_reshard(one, other)


@pytest.mark.parametrize("shape", [(2**29, 2**29), (1, 2**58), (2**40, 3)])
def test_what_can_be_counted_is_planned_exactly(shape: tuple[int, int]) -> None:
    plan = st.plan_reshard(*(mesh_layout(Mesh(tp=4), spec, shape) for spec in (ROWS, COLUMNS)))
    assert plan.check() == st.plans.with_relays(plan).check() == () and plan.bytes_moved == plan.lower_bound
    assert plan.bytes_moved + plan.bytes_kept == 4 * shape[0] * shape[1]


def many(layout: ShardColumns, tensors: int) -> ShardColumns:
    """Return a layout of so many tensors that each lie as one does."""
    rows = np.tile(np.arange(len(layout)), tensors)
    repeated = replace(
        select_rows(layout, rows),
        keys=tuple(f"layers.{number:06}.weight" for number in range(tensors)),
        kinds=layout.kinds * tensors,
        key=np.repeat(np.arange(tensors), len(layout)),
    )
    return select_rows(repeated, np.argsort(repeated.rank, kind="stable"))


PAIRS = {
    "rows to columns": (Mesh(tp=32), ROWS, Mesh(tp=32), COLUMNS, 1024),
    "replicas to engines": (Mesh(dp=8, tp=8), ROWS, Mesh(dp=8, tp=8).on_ranks(range(64, 128)), COLUMNS, 512),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_hundred_thousand_chunk_pairs_move_no_more_than_they_must(name: str) -> None:
    mesh, spec, other_mesh, other_spec, each = PAIRS[name]
    shape, tensors = (4096, 4096), -(-100_000 // each)
    source, target = (many(mesh_layout(*layout, shape), tensors) for layout in ((mesh, spec), (other_mesh, other_spec)))
    plan = st.plan_reshard(source, target)
    assert len(plan.transfers) >= 100_000 and plan.bytes_moved == plan.lower_bound


def test_what_leaves_a_group_of_ranks_goes_to_others() -> None:
    plan = st.plan_reshard(*(mesh_layout(Mesh(tp=4), spec) for spec in (ROWS, COLUMNS)))
    each = plan.bytes_moved // 12
    groups: list[Any] = [[], [0], [0, 1], [1, 0, 1], [0, 1, 2], range(4), [7]]
    assert [plan.leaving(ranks) // each for ranks in groups] == [0, 3, 4, 4, 3, 0, 0]


def test_a_problem_holds_the_box_that_it_is_about() -> None:
    plan = st.plan_reshard([[shard("w", torch.zeros(4, 2))]], [[shard("w", torch.zeros(4, 2))]])
    (problem,) = replace(plan, transfers=replace(plan.transfers, nbytes=plan.transfers.nbytes + 1)).check()
    assert (problem.box, problem.flat, problem.ranks) == ((slice(0, 4), slice(0, 2)), None, (0,))
    flat = st.ShardedTensor.from_rank_offsets_flat("w", torch.zeros(7), (4, 2), flattened_range=slice(0, 7))
    wanted = st.plan_reshard([[shard("w", torch.zeros(4, 2))]], [[flat]])
    (problem,) = replace(wanted, transfers=select_none(wanted.transfers)).check()
    assert (problem.box, problem.flat) == ((slice(0, 4), slice(0, 2)), slice(0, 7))


def select_none(transfers: st.plans.Transfers) -> st.plans.Transfers:
    return replace(transfers, **{field.name: getattr(transfers, field.name)[:0] for field in fields(transfers)})
