"""torchao's quantised optimizer states and weights go on bit for bit, also on another number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardtree as st
from shardtree.errors import CheckpointingException
from shardtree.interop.dtensor import from_dtensors
from shardtree.storage import MemoryStorage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its modules, compiled the first time, have invalid escapes
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

pytestmark = pytest.mark.peers

ROWS, WIDTH = 64, 256
OPTIMIZERS = (AdamW8bit, AdamW4bit, AdamWFp8)


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes a minute


def inner(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a tensor is made of, as bytes."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {"": tensor.detach().reshape(-1).view(torch.uint8)}
    return {name: getattr(tensor, name).reshape(-1).view(torch.uint8) for name in tensor.__tensor_flatten__()[0]}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    left, right = inner(one), inner(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def rows(rank: int, ranks: int) -> slice:
    return slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)


def gradient(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(kind: Any, steps: range, part: slice, start: torch.Tensor | None = None) -> tuple[Any, Any]:
    """Return a rank's rows of a parameter, and the optimizer that made steps on them."""
    weight = torch.nn.Parameter(gradient(99)[part].clone() if start is None else start)
    optimizer = kind([weight], lr=0.1)
    go_on(optimizer, weight, steps, part)
    return weight, optimizer


def go_on(optimizer: Any, weight: torch.nn.Parameter, steps: range, part: slice) -> None:
    for step in steps:
        weight.grad = gradient(step)[part].clone()
        optimizer.step()


def tree(weight: Any, optimizer: Any, rank: int, ranks: int) -> dict[str, Any]:
    state = optimizer.state[weight]
    cut = {name: state[name] for name in ("exp_avg", "exp_avg_sq")} | {"w": weight.detach()}
    shards = {name: st.ShardedTensor.from_rank_offsets(name, each, (0, rank, ranks)) for name, each in cut.items()}
    return shards | {"step": state["step"]}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_on_other_ranks_as_if_uncut(kind: Any, donate: bool) -> None:
    folder = MemoryStorage()
    held = [tree(*trained(kind, range(2), rows(rank, 4)), rank, 4) for rank in range(4)]
    st.simulate(4, lambda world: st.save(held[world.rank], folder, world=world))
    whole, whole_optimizer = trained(kind, range(4), slice(None))
    parts = [trained(kind, range(7, 8), rows(rank, 2)) for rank in range(2)]
    trees = [tree(*part, rank, 2) for rank, part in enumerate(parts)]
    loaded = st.simulate(2, lambda world: st.load(trees[world.rank], folder, donate=donate, world=world))
    for rank, ((weight, optimizer), got) in enumerate(zip(parts, loaded, strict=True)):
        weight.data = got["w"]
        optimizer.state[weight].update({name: got[name] for name in ("exp_avg", "exp_avg_sq", "step")})
        go_on(optimizer, weight, range(2, 4), rows(rank, 2))
        assert torch.equal(weight, whole[rows(rank, 2)])
    joined = torch.cat([optimizer.state[weight]["exp_avg"].scale for weight, optimizer in parts])
    assert torch.equal(joined, whole_optimizer.state[whole]["exp_avg"].scale)


def eight_bits(codes: torch.Tensor, block: int) -> OptimState8bit:
    scale = codes.reshape(-1, block)[:, 0].float() + 1
    return OptimState8bit(codes, scale, torch.arange(256.0), True)


@given(
    some.integers(1, 3), some.sampled_from([1, 2, 3, 6]), some.sampled_from([1, 2, 3, 6]), some.sampled_from([2, 4, 8])
)
def test_states_in_blocks_are_cut_into_rows_as_their_values_are(
    height: int, ranks: int, others: int, block: int
) -> None:
    codes = torch.randint(0, 256, (6 * height, 8), dtype=torch.uint8)
    parts = {count: [eight_bits(part.clone(), block) for part in codes.chunk(count)] for count in (ranks, others)}
    folder = MemoryStorage()

    def shard(tensor: torch.Tensor, rank: int, count: int) -> dict[str, Any]:
        return {"m": st.ShardedTensor.from_rank_offsets("m", tensor, (0, rank, count))}

    st.simulate(ranks, lambda world: st.save(shard(parts[ranks][world.rank], world.rank, ranks), folder, world=world))
    blank = [eight_bits(torch.zeros_like(part.codes), block) for part in parts[others]]
    loaded = st.simulate(
        others, lambda world: st.load(shard(blank[world.rank], world.rank, others), folder, world=world)
    )
    assert all(same(got["m"], part) for got, part in zip(loaded, parts[others], strict=True))


def test_states_in_dtensors_come_back_in_their_class() -> None:
    def sharded(rank: int, optimizer: Any, weight: Any) -> Any:
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=rank)
        return from_dtensors({"m": DTensor.from_local(optimizer.state[weight]["exp_avg"], mesh, [Shard(0)])})

    folder = MemoryStorage()
    parts = [trained(AdamW8bit, range(2), rows(rank, 2)) for rank in range(2)]
    others = [trained(AdamW8bit, range(7, 8), rows(rank, 2)) for rank in range(2)]

    def move(world: st.World) -> Any:
        st.save(sharded(world.rank, *parts[world.rank][::-1]), folder, world=world)
        return st.load(sharded(world.rank, *others[world.rank][::-1]), folder, world=world)

    for got, (weight, optimizer) in zip(st.simulate(2, move), parts, strict=True):
        assert same(got["m"], optimizer.state[weight]["exp_avg"])


def quantised(weight: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, len(weight), bias=False))
    module[0].weight = torch.nn.Parameter(weight)
    quantize_(module, Int8WeightOnlyConfig())
    return module[0].weight


def test_int8_weights_load_on_another_number_of_ranks() -> None:
    folder, weight = MemoryStorage(), gradient(5)
    held = [quantised(weight[rows(rank, 4)]) for rank in range(4)]
    blank = [quantised(torch.ones(ROWS // 2, WIDTH)) for _ in range(2)]

    def shard(tensor: torch.Tensor, rank: int, ranks: int) -> dict[str, Any]:
        return {"w": st.ShardedTensor.from_rank_offsets("w", tensor, (0, rank, ranks))}

    st.simulate(4, lambda world: st.save(shard(held[world.rank], world.rank, 4), folder, world=world))
    assert sorted(st.open_checkpoint(folder)) == ["w.qdata", "w.scale", "w.zero_point"]
    loaded = st.simulate(2, lambda world: st.load(shard(blank[world.rank], world.rank, 2), folder, world=world))
    assert all(same(got["w"], quantised(weight[rows(rank, 2)])) for rank, got in enumerate(loaded))


def test_a_rank_never_keeps_its_own_scales_beside_loaded_values() -> None:
    folder, weight = MemoryStorage(), gradient(5)
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", quantised(weight))}, folder)
    part = quantised(torch.ones(ROWS, WIDTH // 2))  # a scale a row, of half of the row
    shard = st.ShardedTensor.from_rank_offsets("w", part, (1, 1, 2), allow_shape_mismatch=True)
    with pytest.raises(CheckpointingException, match=r"w\.scale"):
        st.load({"w": shard}, folder, validate_access_integrity=False)
