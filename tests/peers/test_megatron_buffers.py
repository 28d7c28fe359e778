"""Beside Megatron-Core's ParamAndGradBuffer and DistributedOptimizer: the same buckets, places and ranges on each rank.

Its buffer is built by its own code. It asks for a CUDA device and for process groups; it is given the CPU, and groups
that know their size and rank, which is all that it asks of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardtree.buffers import BufferPlan, flat_shards, plan_buffers
from shardtree.mapping import ShardedTensor
from tests.core.trees.samples import assert_caught
from tests.peers.groups import Group
from tests.peers.megatron_versions import buffer_of

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("one_process")]
logging.getLogger("megatron.core").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Question:
    """Shapes in the model's order, and how Megatron-Core is told to make its buffer."""

    shapes: tuple[tuple[int, ...], ...]
    data_parallel: int
    bucket_size: int | None = None
    shared: int | None = None
    is_wide: bool = False


@st.composite
def questions(draw: st.DrawFn) -> Question:
    shapes = tuple(
        draw(st.lists(st.lists(st.sampled_from([1, 2, 5, 13, 40, 0]), max_size=3).map(tuple), min_size=1, max_size=6))
    )
    return Question(
        shapes,
        draw(st.integers(1, 9)),
        draw(st.none() | st.sampled_from([1, 64, 100, 500, 5000])),
        draw(st.none() | st.integers(0, len(shapes) - 1)),
        draw(st.booleans()),
    )


def theirs(question: Question) -> tuple[Any, dict[str, Any]]:
    """Return Megatron-Core's buffer on the first data-parallel rank, and its parameters by name."""
    from megatron.core.distributed import DistributedDataParallelConfig

    parameters = {f"p{n}": torch.nn.Parameter(torch.zeros(shape)) for n, shape in enumerate(question.shapes)}
    if question.shared is not None:
        parameters[f"p{question.shared}"].shared_embedding = True  # type: ignore[attr-defined]
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=question.is_wide
    )
    group = Group(question.data_parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        buffer = buffer_of(config, parameters, SimpleNamespace(tp=Group(1), dp_cp=group), question.bucket_size)
    return buffer, parameters


def ours(question: Question) -> BufferPlan:
    shapes = {f"p{n}": shape for n, shape in enumerate(question.shapes)}
    return plan_buffers(
        shapes,
        data_parallel=question.data_parallel,
        bucket_size=question.bucket_size,
        align=64,
        bucket_align=2**16 if question.is_wide else 128,
        order=reversed(shapes),
        alone=[] if question.shared is None else [f"p{question.shared}"],
    )


def check_as_megatron(plan_of: Any, question: Question) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    plan = plan_of(question)
    buffer, parameters = theirs(question)
    for rank in range(question.data_parallel):
        buffer.data_parallel_group = Group(question.data_parallel, rank)
        names = {parameter: name for name, parameter in parameters.items()}
        assert [tuple(span) for span in buffer.bucket_indices] == list(plan.buckets)
        assert {names[p]: place for p, place in buffer.param_index_map.items()} == {
            place.name: (place.start, place.stop, place.bucket) for place in plan.places
        }
        [of_buckets] = DistributedOptimizer._build_gbuf_range_map(buffer).values()
        expected = [
            (names[parameter], bucket, as_slice(held["gbuf_local"]), as_slice(held["param"]))
            for bucket, held_there in enumerate(of_buckets)
            for parameter, held in held_there["param_map"].items()
        ]
        # It has no range for what has no elements; ours has one, so that it is stored.
        found = [
            (part.name, part.bucket, part.taken, part.flattened_range)
            for part in plan.ranges(rank)
            if part.taken.start < part.taken.stop
        ]
        assert found == expected


def as_slice(theirs: Any) -> slice:
    return slice(theirs.start, theirs.end)


@given(questions())
@example(Question(((256, 64), (64,), (192, 64), (64,)), 8, 10000))
@example(Question(((256, 64), (64,), (192, 64), (64,)), 3, 10000, shared=0))
@example(Question(((5,), (5,), (5,)), 2, None, shared=1))
def test_buckets_and_ranges_are_those_of_megatron(question: Question) -> None:
    check_as_megatron(ours, question)


def without_alignment(question: Question) -> BufferPlan:
    shapes = {f"p{n}": shape for n, shape in enumerate(question.shapes)}
    return plan_buffers(shapes, data_parallel=question.data_parallel, bucket_align=128, order=reversed(shapes))


def test_the_comparison_catches() -> None:
    assert_caught(check_as_megatron, without_alignment, questions())


def their_states(model: dict[str, Any], buffer: Any) -> dict[str, Any]:
    """Return what Megatron-Core's optimizer saves of states that are full of sevens, by key."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    ranges = DistributedOptimizer._build_gbuf_range_map(buffer)
    lengths = {
        parameter: held["param"].size
        for of_buckets in ranges.values()
        for bucket in of_buckets
        for parameter, held in bucket["param_map"].items()
    }

    def states(parameter: Any) -> dict[str, torch.Tensor]:
        return {kind: torch.full((lengths[parameter],), 7.0) for kind in ("param", "exp_avg", "exp_avg_sq")}

    optimizer = SimpleNamespace(
        gbuf_ranges=[ranges], distributed_optimizer_instance_id=0, _get_main_param_and_optimizer_states=states
    )
    found = DistributedOptimizer.sharded_param_state_fs_model_space(optimizer, model)
    return {leaf.key: leaf for tensors in found.values() for leaf in tensors.values()}


def check_states(shards: Callable[..., Any], question: Question) -> None:
    """Raise unless our shards of all ranks are its states: 0.16 makes them of factories, and refuses flat tensors."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory as MegatronFactory

    plan = ours(question)
    buffer, parameters = theirs(question)
    for rank in range(question.data_parallel):
        buffer.data_parallel_group = Group(question.data_parallel, rank)
        replica = (0, 1, rank)
        model = {name: MegatronFactory(name, held, list, list, replica) for name, held in parameters.items()}
        expected = {key: told(leaf) for key, leaf in their_states(model, buffer).items()}
        own = {
            name: ShardedTensor.from_rank_offsets(name, held.data, replica_id=replica)
            for name, held in parameters.items()
        }
        slices = [torch.full((length,), 7.0) for length in plan.slice_lengths]
        found = {
            leaf.key: told(leaf)
            for kind in ("fp32_param", "exp_avg", "exp_avg_sq")
            for leaf in shards(plan, rank, slices, own, prefix=f"optimizer.state.{kind}").values()
            if leaf.flattened_range.start < leaf.flattened_range.stop
        }
        assert found == expected


def told(leaf: Any) -> Any:
    return leaf.replica_id, leaf.flattened_range, leaf.data.dtype, leaf.data.tolist()


@settings(max_examples=15)
@given(questions())
@example(Question(((24, 5), (7,), (12, 3)), 4, 64))
def test_states_have_the_keys_and_replicas_of_its_fully_sharded_model_space(question: Question) -> None:
    check_states(flat_shards, question)


def keeping_replicas(*args: Any, **options: Any) -> Any:
    return flat_shards(*args, **options, replica_id=lambda replica: replica)


def test_the_comparison_catches_a_data_parallel_part_that_is_kept() -> None:
    assert_caught(check_states, keeping_replicas, questions())
