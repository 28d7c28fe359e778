"""FP8 values that would be cast without the scales beside them: every way to cast refuses, and says the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.core.trees import SCALED_DTYPES, scaled_values, those_of
from shardtree.core.trees._scaled import _ROWS
from shardtree.errors import KeyMismatch, ShapeError
from shardtree.interop.dtensor import load_module
from shardtree.quantised import FORMS
from shardtree.storage import MemoryStorage
from tests.cli.checkpoints import run
from tests.quantised.stored import UNKNOWN, stored

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
Tensors = Mapping[str, torch.Tensor]


def shards(tensors: Tensors) -> dict[str, st.ShardedTensor]:
    return {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}


def saved(tensors: Tensors) -> MemoryStorage:
    place = MemoryStorage()
    st.save(shards(tensors), place, "safetensors")
    return place


def numbers(tensors: Tensors, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return a target: some of the tensors as bfloat16, by which numbers are meant."""
    return {key: torch.zeros(tensors[key].shape, dtype=BF16) for key in keys}


def load(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    return st.load(shards(numbers(tensors, keys)), saved(tensors), cast=True, plain=plain)


def load_whole(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    return st.load(st.trees.nested(numbers(tensors, keys)), saved(tensors), cast=True, plain=plain)


def load_through_a_trace(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    place = saved(tensors)
    same = st.trace(lambda given: dict(given), st.open_checkpoint(place))
    return st.load(shards(numbers(tensors, keys)), place, cast=True, plain=plain, transform=same)


def load_into_a_module(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    module = torch.nn.Module()
    for key, tensor in numbers(tensors, keys).items():
        owner = module
        *parents, name = key.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, torch.nn.Module())
            owner = getattr(owner, parent)
        owner.register_parameter(name, torch.nn.Parameter(tensor))
    load_module(module, saved(tensors), cast=True, plain=plain)
    return module.state_dict()


def redistribute(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    """Let rank 0 have the values, and rank 1 the scales: all that ranks have counts."""

    def move(world: st.World) -> Any:
        own = {key: each for key, each in shards(tensors).items() if (key in keys) == (world.rank == 0)}
        target = shards(numbers(tensors, keys)) if world.rank else {}
        return st.redistribute(own, target, cast=True, plain=plain, world=world)

    return {key: shard.data for key, shard in st.simulate(2, move)[1].items()}


def reshard(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    [tree] = st.reshard([shards(tensors)], [shards(numbers(tensors, keys))], cast=True, plain=plain)
    return {key: shard.data for key, shard in tree.items()}


def cast(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    return {key: shard.data for key, shard in st.cast(shards(tensors), BF16, plain=plain).items()}


def convert(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    done = MemoryStorage()
    half = st.bind(st.cast, BF16, plain=plain)
    st.convert(saved(tensors), done, backend="safetensors", transform=half)
    return st.load_plain_tensors(done)


def convert_without_the_rest(tensors: Tensors, keys: Sequence[str], plain: Sequence[str]) -> Any:
    done, half = MemoryStorage(), st.bind(st.cast, BF16)
    rest = [key for key in tensors if key not in keys]
    st.convert(saved(tensors), done, backend="safetensors", transform=half, leave_out=rest, plain=plain)
    return st.load_plain_tensors(done)


WAYS: list[Callable[..., Any]] = [
    *(load, load_whole, load_through_a_trace, load_into_a_module),
    *(redistribute, reshard, cast, convert, convert_without_the_rest),
]
VALUES = torch.tensor([[448.0, -2.0], [0.5, 1.0]]).to(FP8)
SCALES = {
    "blocks": {"up.weight_scale_inv": torch.full((1, 1), 0.3 / 448)},
    "rows": {"up.weight_scale": torch.full((2, 1), 0.3 / 448)},
    "one for all": {"up.weight_scale": torch.tensor(0.3 / 448), "up.input_scale": torch.tensor(1.0)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scales", SCALES.values(), ids=[*SCALES])
def test_values_arent_cast_without_their_scales(way: Callable[..., Any], scales: dict[str, torch.Tensor]) -> None:
    tensors = {"up.weight": VALUES, "mask": VALUES} | scales
    with pytest.raises(ShapeError) as caught:
        way(tensors, ["up.weight", "mask"], [])
    text = str(caught.value)
    assert f"'up.weight': float8_e4m3fn values that need {next(iter(scales))!r} beside them" in text
    assert "form.lens" in text and "recode" in text and "plain=[patterns" in text and "'mask'" not in text


@pytest.mark.parametrize("way", WAYS)
def test_plain_fp8_is_cast_and_so_is_what_the_caller_calls_plain(way: Callable[..., Any]) -> None:
    tensors = {"up.weight": VALUES, "up.weight_scale": torch.tensor(2.0), "mask": VALUES}
    assert torch.equal(way({"mask": VALUES, "x": torch.ones(2)}, ["mask"], [])["mask"].float(), VALUES.float())
    found = st.trees.flat(way(tensors, ["up.weight", "mask"], ["**.weight"]))
    assert torch.equal(found["up.weight"].float(), VALUES.float()) and found["up.weight"].dtype is BF16
    with pytest.raises(KeyMismatch, match=r": plain: patterns fit no key\n +'down'"):
        way(tensors, ["up.weight", "mask"], ["**.weight", "down"])


@pytest.mark.parametrize("name", FORMS)
def test_the_table_of_names_has_what_the_forms_have(name: str) -> None:
    """Of each form, whichever scale is there: else a new form's values would be cast."""
    parts = stored(name)
    first, *others = FORMS[name].keys("mlp.weight")
    dtypes = {key: tensor.dtype for key, tensor in parts.items()}
    for other, part in zip(others, FORMS[name].parts[1:], strict=True):
        for dtype in part.dtypes if part.group == 0 else ():
            there = {first: dtypes[first], other: dtype}
            assert scaled_values({first: dtypes[first]}, those_of(there)) == {first: (other,)}
    assert {row[1][0] for row in _ROWS} <= SCALED_DTYPES


@pytest.mark.parametrize("tensors", UNKNOWN.values(), ids=[*UNKNOWN])
def test_values_of_programs_whose_forms_arent_known_arent_cast(tensors: dict[str, torch.Tensor]) -> None:
    first = next(iter(tensors))
    with pytest.raises(ShapeError, match=rf"'{first}': \w+ values that need 'up\."):
        load(tensors, [first], [])
    assert load(tensors, [first], [first])[first].dtype is BF16


def test_powers_of_two_as_bytes_arent_taken_for_numbers() -> None:
    tensors = stored("mxfp8", key="w")
    with pytest.raises(ShapeError, match="'w_scale_inv': uint8 values that need 'w' beside them"):
        load(tensors, ["w_scale_inv"], [])
    scales = load(stored("fp8_blocks", key="w"), ["w_scale_inv"], [])
    assert scales["w_scale_inv"].dtype is BF16  # of numbers only their digits change


NO_SCALES = {
    "attn.logit_scale": torch.ones(4, 1, 1),  # Swin V2
    "attn.relative_position_index": torch.zeros(4, 4, dtype=torch.int64),
    "act.scale": torch.ones(1),  # trained with quantisation in mind
    "act.zero_point": torch.zeros(1, dtype=torch.int32),
    "fake.weight": torch.ones(4, 4),
    "fake.weight_scale": torch.ones(4, 1),
    "pixels": torch.ones(4, 4, dtype=torch.uint8),
    "pixels_scale": torch.ones(1),
}


@pytest.mark.parametrize("way", [load, load_into_a_module, redistribute])
def test_numbers_beside_what_is_called_a_scale_are_cast(way: Callable[..., Any]) -> None:
    found = st.trees.flat(way(NO_SCALES, [*NO_SCALES], []))
    assert {tensor.dtype for tensor in found.values()} == {BF16}


def test_explanations_and_plans_say_the_same_and_all_ranks_agree() -> None:
    tensors = {"up.weight": VALUES} | SCALES["rows"]
    place, target = saved(tensors), shards(numbers(tensors, ["up.weight"]))
    [problem] = st.explain(target, place, cast=True).problems
    assert str(problem) == "'up.weight': float8_e4m3fn values that need 'up.weight_scale' beside them"
    assert st.explain(target, place, cast=True, plain=["up.*"]).ok
    refused, (own,) = st.explain_ranks([target], place, cast=True), st.explain(target, place).problems
    assert not refused.ok and "target asks for (2, 2) bfloat16" in str(own)  # without cast it's another dtype
    scales = shards(SCALES["rows"])
    back = st.plan_reshard([target | scales], [shards(tensors)], cast=True).inverse()
    assert back.casts == {"up.weight": (FP8, BF16)}  # what this plan has cast is cast back

    def halves(world: st.World) -> Any:
        """Only rank 1 asks for the values: rank 0 fails with it."""
        return st.load(target if world.rank else {}, place, cast=True, world=world)

    with pytest.raises(ShapeError, match=r"'up\.weight': float8_e4m3fn values that need"):
        st.simulate(2, halves)


@pytest.mark.parametrize("which", ["convert", "convert without them", "explain", "plan"])
def test_the_command_line_refuses_too(tmp_path: Path, which: str) -> None:
    tensors = {"up.weight": VALUES} | SCALES["blocks"]
    fp8, model = tmp_path / "fp8", tmp_path / "model"
    st.save(shards(tensors), fp8, "huggingface")
    st.save(shards(numbers(tensors, ["up.weight"])), model, "huggingface")
    convert = ["convert", fp8, tmp_path / "out", "--to", "hf", "--cast", "bf16"]
    command = {
        "convert": convert,
        "convert without them": [*convert, "--leave-out", "**_scale_inv"],
        "explain": ["explain", fp8, "--like", model, "--cast"],
        "plan": ["plan", fp8, model, "--cast"],
    }[which]
    try:
        done = run(*command)
        text, status = done.output, done.exit_code
    except ShapeError as error:  # printed by the process
        text, status = str(error), 2
    assert status and "float8_e4m3fn values that need 'up.weight_scale_inv'" in " ".join(text.split())
    assert run(*command, "--plain", "**.weight").exit_code == 0


def test_the_law_of_scales_catches_a_cast_that_looks_at_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtree.core.plans._without_scales.scaled_values", lambda *_: {})
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_values_arent_cast_without_their_scales(load, SCALES["rows"])
