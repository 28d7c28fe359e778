"""A load needs nothing of what a target's memory holds: it is filled, and no quantiser looks at it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.core.lazy import computed, only_filled
from shardtree.errors import UnsupportedValue
from shardtree.lenses import Lens, StoredForm, as_factory, compose, transposed
from shardtree.quantised import FORMS, Form, _form
from shardtree.storage import MemoryStorage
from tests.quantised.stored import stored


def never(*_: Any) -> tuple[torch.Tensor, ...]:
    raise AssertionError("the target's memory was quantised")


BLOCKS = replace(FORMS["fp8_blocks"], encode=never)
PARTS = stored("fp8_blocks", key="w")
WHOLE = BLOCKS.dequantise(PARTS)["w"]


@pytest.fixture(scope="module")
def folder() -> MemoryStorage:
    return saved(PARTS)


def saved(parts: dict[str, torch.Tensor]) -> MemoryStorage:
    place = MemoryStorage()
    st.save({key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in parts.items()}, place, "safetensors")
    return place


def held(fill: float | None, rows: slice, device: str = "cpu") -> torch.Tensor:
    memory = torch.empty(WHOLE[rows].shape, dtype=WHOLE.dtype, device=device)
    return memory if fill is None else memory.fill_(fill)


def factory(data: torch.Tensor, rank: int = 0, ranks: int = 1, form: Form = BLOCKS) -> Any:
    return as_factory(st.ShardedTensor.from_rank_offsets("w", data, (0, rank, ranks)), form.lens)


HELD = [(math.nan, "cpu"), (math.inf, "cpu"), (None, "cpu"), (None, "meta")]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("fill", "device"), HELD, ids=["nan", "inf", "empty", "meta"])
def test_a_load_fills_memory_that_holds_anything(
    folder: MemoryStorage, fill: float | None, device: str, donate: bool
) -> None:
    def load(world: st.World) -> torch.Tensor:
        data = held(fill, slice(100 * world.rank, 100 * world.rank + 100), device)
        target = {"w": factory(data, world.rank, 3)}
        found: torch.Tensor = st.load(target, folder, world=world, donate=donate)["w"]
        assert type(found) is torch.Tensor and (found is data) == (donate and device == "cpu")
        return found

    assert torch.equal(torch.cat(st.simulate(3, load)), WHOLE)  # through blocks that two ranks share


def test_explanations_and_plans_look_at_no_memory(folder: MemoryStorage) -> None:
    tree = {"w": factory(held(math.nan, slice(None)))}
    source = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in PARTS.items()}
    assert st.explain(tree, folder).ok and st.explain_ranks([tree], folder).ok
    assert st.plan_reshard([source], [tree]).bytes_moved == 0 == st.plan_reshard([tree], [source]).bytes_moved
    assert sorted(st.trees.extract_metadata(tree)) == sorted(PARTS)


@pytest.mark.parametrize("donate", [False, True])
def test_what_is_redistributed_fills_memory_that_holds_anything(donate: bool) -> None:
    def move(world: st.World) -> torch.Tensor:
        source = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in PARTS.items()}
        target = {"w": factory(held(math.nan, slice(150 * world.rank, 150 * world.rank + 150)), world.rank, 2)}
        moved = st.redistribute(source if world.rank == 0 else {}, target, world=world, donate=donate)
        data: torch.Tensor = moved["w"].data
        return data

    assert torch.equal(torch.cat(st.simulate(2, move)), WHOLE)
    source = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in PARTS.items()}
    [moved] = st.reshard([source], [{"w": factory(held(math.nan, slice(None)))}])
    assert torch.equal(moved["w"].data, WHOLE)


def by_rows(shard: st.ShardedTensor) -> StoredForm:
    """Store numbers and their rows' largest, by functions that mustn't see a target's memory."""
    rows = shard.local_shape[0]

    def largest(data: torch.Tensor) -> torch.Tensor:
        assert bool(data.isfinite().all())
        return data.abs().amax(1, keepdim=True)

    scale = computed(largest, shard.data, (rows, 1), shard.dtype)
    values = computed(lambda data: data / largest(data), shard.data, shard.local_shape, shard.dtype)
    side = replace(shard, key="s", data=scale, local_shape=(rows, 1), global_shape=(rows, 1), global_offset=(0, 0))
    return StoredForm((replace(shard, data=values), side), lambda parts: parts[0] * parts[1])


@pytest.mark.parametrize(
    ("lens", "whole"),
    [
        (compose(transposed(), BLOCKS.lens), WHOLE.T),
        (compose(BLOCKS.lens, lambda shard: StoredForm((shard,), lambda parts: parts[0])), WHOLE),
    ],
    ids=["after a turn", "before another lens"],
)
def test_a_lens_in_a_chain_looks_at_no_memory(folder: MemoryStorage, lens: Lens, whole: torch.Tensor) -> None:
    data = torch.full(whole.shape, math.nan, dtype=whole.dtype)
    target = as_factory(st.ShardedTensor.from_rank_offsets("w", data), lens)
    assert torch.equal(st.load({"w": target}, folder)["w"], whole)
    flat = replace(target, data=torch.full((300,), math.nan, dtype=whole.dtype), flattened_range=slice(70, 370))
    part = st.load({"w": flat}, folder, validate_access_integrity=False)["w"]
    assert torch.equal(part, whole.flatten()[70:370])


def test_a_lens_of_a_users_own_that_computes_isnt_called_for_a_load() -> None:
    place, whole = MemoryStorage(), torch.arange(1.0, 7).reshape(2, 3)
    make = partial(as_factory, lens=by_rows)
    st.save({"w": make(st.ShardedTensor.from_rank_offsets("w", whole))}, place)
    target = {"w": make(st.ShardedTensor.from_rank_offsets("w", torch.full((2, 3), math.nan)))}
    assert st.explain(target, place).ok
    assert torch.allclose(st.load(target, place)["w"], whole)


def test_layers_that_are_stacked_are_loaded_and_saved_as_one() -> None:
    form, layers = FORMS["fp8_blocks"], torch.randn(2, 130, 40, generator=torch.Generator().manual_seed(2))

    def stacked(rank: int, data: torch.Tensor) -> dict[str, Any]:
        shard = st.ShardedTensor.from_rank_offsets("w", data, (0, rank, 2), prepend_axis_num=1)
        return {"w": as_factory(shard, form.lens)}

    place = MemoryStorage()
    st.simulate(2, lambda world: st.save(stacked(world.rank, layers[world.rank]), place, world=world))
    expected = form.dequantise(form.quantise({"w": layers}), torch.float32)["w"]
    nothing = torch.full((130, 40), math.nan)
    for rank in range(2):
        found = st.load(stacked(rank, nothing), place, validate_access_integrity=False)["w"]
        assert torch.equal(found, expected[rank])


# What a lens builds for a target is what it builds for a save, but for the data.


def check_targets(form: Form, shard: st.ShardedTensor) -> None:
    saved, described = (form.lens(replace(shard, data=data)).shards for data in (shard.data, shard.data.to("meta")))
    with only_filled():
        filled = form.lens(shard).shards
    for built in (described, filled):
        for one, other in zip(saved, built, strict=True):
            assert other.without_data() == one.without_data(), "another shard"
            assert (other.data.shape, other.data.dtype) == (one.data.shape, one.data.dtype), "other memory"


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.encode is not None])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_target_and_a_description_are_stored_as_a_save_is(name: str, rank: int) -> None:
    form, data = FORMS[name], torch.ones(2, 256, 128)
    check_targets(form, st.ShardedTensor.from_rank_offsets("w", data, (0, rank, 2)))
    quantised, meta = form.quantise({"w": data}), form.quantise({"w": data.to("meta")})
    for key, each in quantised.items():
        assert meta[key].is_meta and (meta[key].shape, meta[key].dtype) == (each.shape, each.dtype)


def test_the_law_of_targets_catches_parts_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    make = _form.memory_beside
    monkeypatch.setattr(_form, "memory_beside", lambda data, shape, dtype: make(data, shape, torch.float32))
    with pytest.raises(AssertionError, match="another shard"):
        check_targets(FORMS["fp8_rows"], st.ShardedTensor.from_rank_offsets("w", torch.ones(2, 4)))


def test_a_save_after_a_load_is_quantised_again(folder: MemoryStorage) -> None:
    """A lens is told for as long as a target is built, also where that fails."""
    form = FORMS["fp8_blocks"]
    target = {"w": factory(held(math.nan, slice(None)), form=form)}
    with pytest.raises(st.errors.KeyMismatch):
        st.load(target | {"x": st.ShardedTensor.from_rank_offsets("x", torch.zeros(2))}, folder)
    with pytest.raises(RuntimeError, match="a lens that fails"):
        st.load({"w": as_factory(st.ShardedTensor.from_rank_offsets("w", WHOLE.clone()), failing)}, folder)
    with pytest.raises(UnsupportedValue, match="are not finite"):
        st.save(target, MemoryStorage())


def failing(_: st.ShardedTensor) -> StoredForm:
    raise RuntimeError("a lens that fails")


def quantise(data: torch.Tensor) -> Any:
    return FORMS["fp8_rows"].quantise({"w": data})


def save(data: torch.Tensor) -> Any:
    return st.save({"w": factory(data, form=FORMS["fp8_rows"])}, MemoryStorage())


@pytest.mark.parametrize("doing", [quantise, save])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_imaginary_parts_arent_dropped(doing: Callable[[torch.Tensor], Any], device: str) -> None:
    data = torch.ones(2, 4, dtype=torch.complex64, device=device)
    with pytest.raises(UnsupportedValue, match=r"quantised: 'w' is complex\n  found torch\.complex64"):
        doing(data)
