"""Bit for bit what transformers' own CPU code makes of the same tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hy

from shardtree.quantised import FORMS
from shardtree.testing import first_difference
from tests.quantised.stored import stored

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


def quantiser(scale_fmt: str | None = None, block: list[int] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=block or [128, 128], scale_fmt=scale_fmt)
    )


@pytest.mark.parametrize("name", ["fp8_blocks", "fp8_blocks_ue8m0"])
@settings(max_examples=20)
@given(seed=hy.integers(0, 10_000), power=hy.integers(-20, 20))
def test_fp8_by_blocks(name: str, seed: int, power: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = (torch.randn(256, 384, generator=random) * 2.0**power).bfloat16()
    own = quantiser("ue8m0" if name.endswith("ue8m0") else None)
    expected = finegrained.Fp8Quantize(own).convert({"mlp.weight": weight})
    found = FORMS[name].quantise({"mlp.weight": weight})
    for key, tensor in expected.items():
        assert first_difference(found[key], tensor) is None, key
    back = finegrained.Fp8Dequantize(own)
    for dtype in DTYPES:
        dense = FORMS[name].dequantise(found, dtype)["mlp.weight"]
        assert first_difference(dense, back._dequantize_one(*expected.values(), output_dtype=dtype)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8(dtype: torch.dtype) -> None:
    values, scales = (tensors := stored("mxfp8", key="w")).values()
    expected = finegrained.Fp8Dequantize(quantiser())._dequantize_one(values, scales, output_dtype=dtype)
    assert first_difference(FORMS["mxfp8"].dequantise(tensors, dtype)["w"], expected) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_at_all_scales_that_are_numbers(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).expand(1, 255, 16).contiguous()
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = FORMS["mxfp4"].dequantise({"w_blocks": blocks, "w_scales": scales}, dtype)["w"]
    assert first_difference(found.contiguous(), expected) is None
