"""States under the model's names are read once masters were compared with the weights; those that differ are named."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CorruptCheckpoint
from shardtree.formats.torch_dist import _model_states
from shardtree.storage import MemoryStorage
from shardtree.strategies import LoadOptions

BACKEND = ("torch_dist", 1)
SKIP = LoadOptions(verify=None)
Tensors = dict[str, torch.Tensor]

SHAPES = {"embedding.weight": (6, 4), "decoder.layers.mlp.linear_fc1.weight": (3, 4, 2), "norm.weight": (4,)}


def job(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16, master: str = "param") -> Tensors:
    """Weights, masters and moments of a model."""
    generator = torch.Generator().manual_seed(0)
    tree = {}
    for key, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        states = {"exp_avg": values + 1, "exp_avg_sq": values**2, master: values}
        tree |= {key: values.to(dtype)} | {f"optimizer.state.{name}.{key}": state for name, state in states.items()}
    return tree


def shifted(tree: Tensors, keys: list[str], places: int = 1) -> Tensors:
    """States as Megatron-Core 0.15.0 to 0.19.2 writes them after a padding: some elements are the neighbours'."""
    wrong = dict(tree)
    for state in ("param", "exp_avg", "exp_avg_sq"):
        names = [f"optimizer.state.{state}.{key}" for key in keys]
        flat = torch.cat([tree[name].flatten() for name in names]).roll(places)
        parts = flat.split([tree[name].numel() for name in names])
        wrong |= {name: part.view_as(tree[name]) for name, part in zip(names, parts, strict=True)}
    return wrong


def saved(tree: Tensors, **options: Any) -> MemoryStorage:
    folder = MemoryStorage()
    shards = {key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tree.items()}
    st.save(shards, folder, BACKEND, **options)
    return folder


def targets(tree: Tensors, part: str = "") -> Tensors:
    empty = {key: torch.zeros_like(tensor) for key, tensor in tree.items() if part in key}
    return {key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in empty.items()}


def weights(tree: Tensors) -> dict[str, st.ShardedTensor]:
    return {key: shard for key, shard in targets(tree).items() if "optimizer" not in key}


HONEST = job(SHAPES)
WRONG = ["decoder.layers.mlp.linear_fc1.weight", "norm.weight"]
BROKEN = shifted(HONEST, WRONG)


def test_masters_that_arent_the_weights_are_refused_by_name() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"Megatron-Core 0\.15\.0") as error:
        st.load(targets(HONEST, "exp_avg_sq.embedding"), saved(BROKEN))
    named = [key for key in SHAPES if f"optimizer.state.param.{key}" in str(error.value)]
    assert named == WRONG


def test_a_conversion_is_refused_and_one_of_the_weights_is_not() -> None:
    with pytest.raises(CorruptCheckpoint, match="do not belong to the weights"):
        st.convert(saved(BROKEN), MemoryStorage(), backend=("safetensors", 1))
    model = MemoryStorage()
    st.convert(saved(BROKEN), model, backend=("safetensors", 1), leave_out=["optimizer.**"])
    assert torch.equal(st.load_plain_tensors(model)["norm.weight"], HONEST["norm.weight"])


def test_the_weights_alone_load_whatever_is_done_about_other_keys() -> None:
    loaded, missing, _ = st.load(weights(HONEST), saved(BROKEN), strict="return_all")
    assert torch.equal(loaded["norm.weight"], HONEST["norm.weight"]) and len(missing) == 9


def test_without_verification_all_loads_and_the_report_says_so() -> None:
    reports, key = [], "optimizer.state.exp_avg.norm.weight"
    options = LoadOptions(verify=None, report=reports.append)
    loaded = st.load(targets(HONEST, "exp_avg.norm"), folder := saved(BROKEN), options=options)
    assert torch.equal(loaded[key], BROKEN[key]) and reports[0].uncompared == (key,)
    found = st.explain(targets(HONEST, "exp_avg.norm"), folder, options=SKIP)
    assert found.uncompared == (key,) and f"master not compared with the weight: {key!r}" in str(found)


def test_verify_finds_them() -> None:
    found = st.verify(saved(BROKEN), report=lambda _: None)
    assert [damage.keys for damage in found] == [(f"optimizer.state.param.{key}",) for key in WRONG]
    assert st.verify(saved(HONEST), report=lambda _: None) == ()


def test_a_master_without_a_weight_isn_t_compared() -> None:
    alone = {key: tensor for key, tensor in BROKEN.items() if key not in WRONG}
    assert st.load(targets(alone), saved(alone)).keys() == alone.keys()


def test_zeros_of_another_sign_differ_in_float32_alone() -> None:
    for dtype, count in ((torch.float32, 1), (torch.bfloat16, 0)):
        tree = job({"w": (2,)}, dtype)
        tree["w"], tree["optimizer.state.param.w"] = torch.zeros(2, dtype=dtype), -torch.zeros(2)
        assert len(st.verify(saved(tree), report=lambda _: None)) == count


def test_ranks_share_the_comparison_out_and_all_of_them_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    original = _model_states.first_difference
    noted = lambda read, pair, box, dtype: compared.append(pair.master) or original(read, pair, box, dtype)  # noqa: E731
    monkeypatch.setattr(_model_states, "first_difference", noted)

    def load(world: st.World, folder: MemoryStorage) -> Any:
        wanted = targets(HONEST) if world.rank else weights(HONEST)
        return st.load(wanted, folder, world=world, validate_access_integrity=False)

    good, bad = saved(HONEST), saved(BROKEN)
    loaded = st.simulate(3, lambda world: load(world, good))
    assert all(torch.equal(loaded[2][key], tensor) for key, tensor in HONEST.items())
    assert sorted(compared) == sorted(f"optimizer.state.param.{key}" for key in SHAPES)
    with pytest.raises(CorruptCheckpoint, match=r"norm\.weight"):
        st.simulate(3, lambda world: load(world, bad))


# Any cut, any place


@some.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], int, int]:
    """Return a shape, the number of ranks along its first axis, and an element."""
    shape = tuple(draw(some.lists(some.integers(1, 5), min_size=1, max_size=3)))
    return (
        shape,
        draw(some.sampled_from([n for n in range(1, 6) if shape[0] % n == 0])),
        draw(some.integers(0, prod(shape) - 1)),
    )


def stored_in_parts(tree: Tensors, ranks: int) -> MemoryStorage:
    folder = MemoryStorage()

    def one(key: str, tensor: torch.Tensor, rank: int) -> st.ShardedTensor:
        part = tensor.chunk(ranks)[rank]
        return st.ShardedTensor.from_rank_offsets(key, part, (0, rank, ranks))

    def save(world: st.World) -> None:
        shards = {key: one(key, tensor, world.rank) for key, tensor in tree.items()}
        st.save(shards, folder, BACKEND, world=world)

    st.simulate(ranks, save)
    return folder


def refused(folder: MemoryStorage) -> bool:
    try:
        st.open_checkpoint(folder)["optimizer.state.exp_avg.w"].data.read()
    except CorruptCheckpoint:
        return True
    return False


def check_one_wrong_element(shape: tuple[int, ...], ranks: int, element: int) -> None:
    tree = job({"w": shape})
    assert not refused(stored_in_parts(tree, ranks))
    tree["optimizer.state.param.w"].view(-1)[element] += 1
    assert refused(stored_in_parts(tree, ranks))


@pytest.mark.slow
@given(cuts())
def test_one_wrong_element_of_a_master_is_refused_wherever_it_is(cut: tuple[tuple[int, ...], int, int]) -> None:
    check_one_wrong_element(*cut)


def test_the_law_catches_a_share_that_nobody_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _model_states._rows
    monkeypatch.setattr(_model_states, "_rows", lambda *how: original(*how)[:-1])
    with pytest.raises(AssertionError):
        check_one_wrong_element((4, 2), 2, 7)
