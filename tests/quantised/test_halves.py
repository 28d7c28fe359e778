"""What `recode` is given and doesn't know: half of a weight, patterns that fit nothing, and what is no weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch, MetadataError, ShapeError
from shardtree.quantised import FORMS, recode
from shardtree.storage import MemoryStorage
from tests.quantised.stored import UNKNOWN, stored


def shards(tensors: dict[str, torch.Tensor]) -> dict[str, st.ShardedTensor]:
    return {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "detected"])
@pytest.mark.parametrize("name", FORMS)
def test_a_weight_without_any_one_of_its_parts_is_refused(name: str, is_named: bool) -> None:
    """Blocks without scales, AWQ without zeros, scales without values: each was passed on as it is."""
    whole = stored(name)
    change = recode(torch.bfloat16, forms=[FORMS[name]] if is_named else None)
    for lost in whole:
        if lost.endswith("zero_point") and not is_named:
            continue  # what is left is a whole weight without zeros
        rest = {key: each for key, each in whole.items() if key != lost}
        with pytest.raises(ShapeError, match=r"recode: tensors that fit no known Form\n  'mlp\.") as caught:
            change(shards(rest | {"norm.weight": torch.ones(4)}))
        text = str(caught.value)
        assert (f"'{lost}'" in text or "FP8 values without scales" in text) and "'norm.weight'" not in text


def test_a_conversion_refuses_half_of_a_weight_before_it_writes() -> None:
    place, target = MemoryStorage(), MemoryStorage()
    st.save(shards({"up_blocks": stored("mxfp4", key="up")["up_blocks"]}), place)
    with pytest.raises(ShapeError, match="'up_blocks': mxfp4 without 'up_scales'"):
        st.convert(place, target, backend="safetensors", transform=recode(torch.bfloat16))
    assert not st.is_checkpoint(target)


@pytest.mark.parametrize("tensors", UNKNOWN.values(), ids=[*UNKNOWN])
def test_values_beside_scales_that_no_form_explains_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    tree = shards(tensors | {"norm.weight": torch.ones(4)} | stored("fp8_blocks", key="known"))
    first = next(iter(tensors))
    for forms in (None, [FORMS["fp8_blocks"]]):
        with pytest.raises(ShapeError, match="recode: tensors that fit no known Form") as caught:
            recode(torch.bfloat16, forms=forms)(tree)
        text = str(caught.value)
        assert f"'{first}'" in text and "plain=[...]" in text and "norm" not in text and "'known'" not in text
    done = recode(torch.bfloat16, plain=["up.**"])(tree)
    assert all(done[key] is tree[key] for key in tensors) and done["known"].dtype is torch.bfloat16


def test_a_conversion_refuses_what_no_form_explains_before_it_writes() -> None:
    place, target = MemoryStorage(), MemoryStorage()
    st.save(shards(UNKNOWN["bitsandbytes' INT8"]), place, "safetensors")
    with pytest.raises(ShapeError, match=r"'up\.weight': int8 beside 'up\.SCB', which no form explains"):
        st.convert(place, target, backend="safetensors", transform=recode(torch.bfloat16))
    assert not st.is_checkpoint(target)


PLAIN = {
    "attn.logit_scale": torch.ones(4, 1, 1),
    "attn.relative_position_index": torch.zeros(4, 4, dtype=torch.int64),
    "layer_scale": torch.ones(8, 1),
    "kv.k_scale": torch.tensor(0.5),
    "act.scale": torch.tensor([0.5]),
    "act.zero_point": torch.zeros(1, dtype=torch.int32),
    "weight_fake_quant.scale": torch.ones(8),
    "weight_fake_quant.zero_point": torch.zeros(8, dtype=torch.int32),
    "mask": torch.ones(4, 4, dtype=torch.uint8),
    "up.scales": torch.ones(4, 4).half(),
    "up.weight": torch.ones(4, 4).bfloat16(),
    "up.weight_scale": torch.ones(4, 1),
    "blocks": torch.ones(4, 16, dtype=torch.uint8),
}


def test_what_belongs_to_no_quantised_weight_stays_as_it_is() -> None:
    tree = shards(PLAIN)
    assert recode(torch.bfloat16)(tree) == tree


@pytest.mark.parametrize("also", [["**.wieght"], ["up.weight", "down.*"], ["ids"], ["phase"]])
def test_a_pattern_of_also_that_quantises_nothing_is_an_error(also: list[str]) -> None:
    tree = shards({"up.weight": torch.ones(2, 4), "ids": torch.ones(2, 4).int(), "phase": torch.ones(2, 4) * 1j})
    with pytest.raises(KeyMismatch) as caught:
        recode(FORMS["fp8_rows"], also=also)(tree)
    assert str(caught.value).startswith(f"recode: also: patterns fit no key\n  '{also[-1]}'")


def test_a_pattern_may_fit_a_weight_that_is_quantised_already() -> None:
    tree = shards(stored("fp8_rows"))
    assert sorted(recode(FORMS["fp8_blocks"], also=["**.weight"])(tree)) == ["mlp.weight", "mlp.weight_scale_inv"]


def test_patterns_without_a_form_that_weights_get_are_refused() -> None:
    with pytest.raises(MetadataError, match="recode: invalid value of also"):
        recode(torch.bfloat16, also=["**.weight"])
    with pytest.raises(KeyMismatch, match="recode: also: the patterns are not a list of strings\n  found '\\*\\*'"):
        recode(FORMS["fp8_rows"], also="**")
    with pytest.raises(ShapeError, match=r"recode: `to` is not a floating-point dtype\n  found torch\.int8"):
        recode(torch.int8)


def test_what_is_plain_is_named_and_passed_on() -> None:
    odd: dict[str, Any] = {"a.weight_scale": torch.ones(2, 1), "b.weight": torch.ones(2, 4).to(torch.float8_e4m3fn)}
    tree = shards(odd | stored("fp8_rows", key="c"))
    with pytest.raises(ShapeError, match=r"'b\.weight': FP8 values without scales\n.*\n.*\n.*plain=\[\.\.\.\]"):
        recode(torch.bfloat16)(tree)
    done = recode(torch.bfloat16, plain=["a.*", "b.weight"])(tree)
    assert sorted(done) == ["a.weight_scale", "b.weight", "c"] and done["b.weight"] is tree["b.weight"]
    with pytest.raises(KeyMismatch, match="recode: plain: patterns fit no key\n  'd'"):
        recode(torch.bfloat16, plain=["a.*", "b.weight", "d"])(tree)


def test_four_bit_floats_without_scales_are_refused_by_name() -> None:
    pairs = st.ShardedTensor.from_rank_offsets("a.weight", torch.zeros(2, 16).byte().view(torch.float4_e2m1fn_x2))
    folder = MemoryStorage()
    st.save({"a": pairs, "b": st.ShardedTensor.from_rank_offsets("b", torch.ones(2))}, folder)
    for to in (torch.bfloat16, FORMS["fp8_rows"]):
        with pytest.raises(ShapeError, match=r"'a\.weight': FP4 values without scales"):
            st.convert(folder, MemoryStorage(), backend="safetensors", transform=recode(to))
    kept = MemoryStorage()
    st.convert(folder, kept, backend="safetensors", transform=recode(torch.bfloat16, plain=["a.weight"]))
    assert st.load_plain_tensors(kept)["a.weight"].dtype == torch.float4_e2m1fn_x2
