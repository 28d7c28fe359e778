"""The kit's laws: what they accept, what each of them catches, and that its message says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.lenses import as_factory, gate_and_up, padded_axis
from shardtree.mapping import ShardedTensor, ShardedTensorFactory
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import (
    GlobalState,
    check_factory,
    check_layouts_agree,
    check_reshard,
    check_roundtrip,
    even_layout,
    glu,
    random_bits,
    transposed,
)

WHOLE = torch.arange(48).reshape(16, 3)

# -- layouts agree


def hold_fused(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Each rank holds its gate rows above its up rows."""
    gate, up = (half.chunk(ranks) for half in whole.chunk(2))
    return [torch.cat(pair) for pair in zip(gate, up, strict=True)]


def as_rows(local: torch.Tensor, rank: int, ranks: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", local, (0, rank, ranks))


def as_gate_and_up(local: torch.Tensor, rank: int, ranks: int) -> ShardedTensorFactory:
    return as_factory(as_rows(local, rank, ranks), gate_and_up(tensor_parallel=ranks))


def as_halves(local: torch.Tensor, rank: int, ranks: int) -> ShardedTensorFactory:
    return glu("w", local, rank, ranks)


@pytest.mark.parametrize("build", [as_gate_and_up, as_halves])
def test_gate_and_up_agree_in_all_layouts(build: Any) -> None:
    check_layouts_agree(WHOLE, hold_fused, build)


def test_the_law_of_layouts_catches_halves_described_as_rows() -> None:
    """The bug that every layout of its own comes back with: only another number of ranks shows it."""
    check_layouts_agree(WHOLE, hold_fused, as_rows, ranks=[2])
    with pytest.raises(AssertionError) as failure:
        check_layouts_agree(WHOLE, hold_fused, as_rows, ranks=[2, 4])
    first, second = str(failure.value).splitlines()[:2]
    assert first == "saved on 2 ranks, loaded on 4: rank 0 gets other elements than it should hold"
    assert second.strip() == "6 of 12 elements differ, the first one at (2, 0): found 6, expected 24"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda local, rank, ranks: as_rows(local, 0, ranks), "saved on 2 ranks: copies of 'w' differ"),
        (lambda local, rank, ranks: as_rows(local, 0, 2 * ranks), "saved on 1 rank: .* of 'w' are on no rank"),
        (
            lambda local, rank, ranks: replace(as_rows(local, rank, ranks), key=f"w.{ranks}"),
            r"saved on 1 rank, loaded on 2: 'w.2' is not stored; stored are \['w.1'\]",
        ),
    ],
)
def test_the_law_of_layouts_catches(build: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_layouts_agree(WHOLE, hold_fused, build)


def test_an_oracle_for_other_ranks_is_told() -> None:
    with pytest.raises(AssertionError, match=r"hold\(whole, 2\) gave 1 tensors, expected one for each rank"):
        check_layouts_agree(WHOLE, lambda whole, ranks: [whole], as_rows)


# -- factories


def padded(fill: float = 0) -> ShardedTensorFactory:
    data = torch.cat([torch.arange(1.0, 11).view(5, 2), torch.full((3, 2), fill)])
    return as_factory(ShardedTensor.from_rank_offsets("embedding", data), padded_axis(5, fill=fill))


@pytest.mark.parametrize("fill", [0, -1])
def test_a_factory_that_does_not_store_its_padding_is_a_lens(fill: float) -> None:
    check_factory(padded(fill), flat=[slice(0, 16), slice(3, 12), slice(11, 15)])


def test_padding_that_is_not_the_fill_does_not_come_back() -> None:
    wrong = replace(padded(), data=torch.ones(8, 2))
    with pytest.raises(AssertionError, match="merge does not undo build for 'embedding': 6 of 16 elements differ"):
        check_factory(wrong)
    states = [torch.ones(8, 2)]
    with pytest.raises(AssertionError, match=r"merge does not undo build for 'optimizer\.state\.0\.embedding'"):
        check_factory(padded(), states=states)
    check_factory(padded(), states=[states[0] * padded().data.clamp(max=1)])


def remembering(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    """Merge to the tensor that was built, whatever was loaded."""
    given: list[torch.Tensor] = []

    def build(key: str, data: Any, *rest: Any) -> Any:
        given.append(data.clone())
        return factory.build_fn(key, data, *rest)

    return replace(factory, build_fn=build, merge_fn=lambda parts: given[-1])


def cut_by_dtype(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    def build(key: str, data: Any, *rest: Any) -> Any:
        as_one = [ShardedTensor.from_rank_offsets(key, data)]
        return as_one if data.dtype == torch.bfloat16 else factory.build_fn(key, data, *rest)

    return replace(factory, build_fn=build)


def writing(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    def build(key: str, data: Any, *rest: Any) -> Any:
        return factory.build_fn(key, data.neg_(), *rest)

    return replace(factory, build_fn=build)


def sliding(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    """Store a flat range as if it began with the tensor: it comes back, and lies where others belong."""

    def build(key: str, data: Any, replica_id: Any, flat: slice | None) -> Any:
        begun = None if flat is None else slice(0, flat.stop - flat.start)
        return factory.build_fn(key, data, replica_id, begun)

    return replace(factory, build_fn=build)


FAULTS: dict[str, tuple[Callable[[ShardedTensorFactory], ShardedTensorFactory], str]] = {
    "remembered": (remembering, r"build does not undo merge for 'w': 'w' at built\[0\]\[0\]: 6 of 6 elements differ"),
    "cut by dtype": (cut_by_dtype, "'optimizer.state.1.w' is cut differently from 'w'"),
    "in the caller's memory": (writing, "building 'w' changed the factory's tensor"),
    "a range that slides": (
        sliding,
        r"'w' on slice\(2, 7, None\) is not that part of the whole: "
        r"'w'\[0, 0\] is element 2, of the whole it is element 0",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_law_of_factories_catches_a_merge_or_build(name: str) -> None:
    fault, message = FAULTS[name]
    factory = glu("w", torch.arange(12.0).view(4, 3))
    check_factory(factory, flat=[slice(2, 7)])
    with pytest.raises(AssertionError, match=message):
        check_factory(fault(factory), flat=[slice(2, 7)])


def test_a_merge_that_gives_no_tensor_is_told() -> None:
    factory = replace(transposed("w", torch.zeros(2, 3)), merge_fn=lambda tensor: [tensor])
    with pytest.raises(AssertionError, match="merge of 'w' gave a list, not a tensor"):
        check_factory(factory)


# -- round trips through a format, and resharding

STATE = GlobalState({"w": random_bits((4, 6), torch.float32, 1)}, {}, {})
ROWS, COLUMNS = {"w": even_layout((4, 6), 2, 0)}, {"w": even_layout((4, 6), 3, 1)}
FORMATS = [name for action, *name in default_strategies if action is StrategyAction.SAVE_SHARDED]


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_a_round_trip_goes_through_any_format(name: list[Any]) -> None:
    backend, version = name
    check_roundtrip(STATE, ROWS, COLUMNS, backend=backend, version=version)


def test_a_round_trip_goes_through_a_table_of_ones_own() -> None:
    row = (StrategyAction.LOAD_SHARDED, "zarr", 3)

    def nothing(checkpoint: Any, shards: Any) -> st.storage.ReadReport:
        return default_strategies[row](checkpoint, [])

    with pytest.raises(AssertionError, match=r"'w': .* elements differ"):
        check_roundtrip(STATE, ROWS, COLUMNS, backend="zarr", version=3, strategies=default_strategies | {row: nothing})


def test_a_reshard_is_checked_as_trees_and_as_a_plan() -> None:
    tree = {"w": torch.arange(12).view(4, 3)}
    rows, columns = (
        st.shard(tree, st.Mesh(dp=2), st.PartitionSpec("dp")),
        st.shard(tree, st.Mesh(tp=3), st.PartitionSpec(None, "tp")),
    )
    check_reshard(rows, columns)
    plan = st.plan_reshard(rows, columns)
    check_reshard(plan)
    transfers = replace(plan.transfers, source_element=plan.transfers.source_element[::-1].copy())
    with pytest.raises(AssertionError, match=r"transfer \d+ takes|reads beyond"):
        check_reshard(replace(plan, transfers=transfers))
    with pytest.raises(AssertionError, match=r"check_reshard\(trees, targets\)"):
        check_reshard(rows)  # type: ignore[call-overload]
