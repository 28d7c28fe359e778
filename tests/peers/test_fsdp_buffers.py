"""Beside FSDP1's FlatParameter: a module's parameters in one buffer, whose shards hold what a plan says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardtree.buffers import BufferPlan, plan_buffers, slice_views
from tests.core.trees.samples import assert_caught
from tests.peers.groups import Group

pytestmark = pytest.mark.peers


@dataclass(frozen=True)
class Question:
    shapes: tuple[tuple[int, ...], ...]
    data_parallel: int
    use_orig_params: bool = True


@st.composite
def questions(draw: st.DrawFn) -> Question:
    shape = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)  # torch 2.13 fails on scalars
    shapes = tuple(draw(st.lists(shape, min_size=1, max_size=5)))
    return Question(shapes, draw(st.integers(1, 9)), draw(st.booleans()))


def parameters(question: Question) -> dict[str, torch.Tensor]:
    return {
        f"p{n}": 1000.0 * (n + 1) + torch.arange(float(torch.Size(shape).numel())).view(shape)
        for n, shape in enumerate(question.shapes)
    }


def their_shard(question: Question, rank: int) -> torch.Tensor:
    from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

    module = torch.nn.Module()
    for name, tensor in parameters(question).items():
        module.register_parameter(name, torch.nn.Parameter(tensor))
    handle: Any = FlatParamHandle(
        list(module.parameters()),
        module,
        torch.device("cpu"),
        HandleShardingStrategy.FULL_SHARD,
        False,
        None,
        None,
        False,
        Group(question.data_parallel, rank),  # type: ignore[arg-type]
        question.use_orig_params,
    )
    return handle._get_shard(handle.flat_param, rank, question.data_parallel)[0].detach()


def ours(question: Question) -> BufferPlan:
    align = 16 // torch.float32.itemsize if question.use_orig_params else 1
    return plan_buffers(parameters(question), data_parallel=question.data_parallel, align=align)


def check_as_fsdp(plan_of: Any, question: Question) -> None:
    plan, tensors = plan_of(question), parameters(question)
    for rank in range(question.data_parallel):
        shard = their_shard(question, rank)
        assert (len(shard),) == plan.slice_lengths
        views = slice_views(plan, rank, [shard])
        for part in plan.ranges(rank):
            assert views[part.name].tolist() == tensors[part.name].reshape(-1)[part.flattened_range].tolist()


@given(questions())
@example(Question(((3,), (5,), (7,)), 4))
@example(Question(((2,),), 9, use_orig_params=False))
def test_shards_hold_what_the_plan_says(question: Question) -> None:
    check_as_fsdp(ours, question)


def unaligned(question: Question) -> BufferPlan:
    return plan_buffers(parameters(question), data_parallel=question.data_parallel)


def test_the_comparison_catches_parameters_without_alignment() -> None:
    assert_caught(check_as_fsdp, unaligned, questions())
