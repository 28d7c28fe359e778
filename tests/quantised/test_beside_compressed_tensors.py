"""Bit for bit what compressed-tensors' own decompression makes of the same tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardtree.quantised import FORMS
from shardtree.testing import first_difference
from tests.quantised.stored import stored

Tensors = dict[str, torch.Tensor]
INT4, FP8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "float"}
GROUPS = INT4 | {"strategy": "group", "group_size": 128}
ROWS = INT4 | {"strategy": "channel"}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4_packed": ("pack-quantized", GROUPS),
    "int4_packed_rows": ("pack-quantized", ROWS),
    "int4_packed_zeros": ("pack-quantized", GROUPS | {"symmetric": False}),
    "int4_packed_rows_zeros": ("pack-quantized", ROWS | {"symmetric": False}),
    "mxfp4_packed": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "nvfp4_packed": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "fp8_blocks_scale": ("naive-quantized", FP8 | {"strategy": "block", "block_structure": [128, 128]}),
    "fp8_rows": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8_tensor": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8_tensor_1": ("float-quantized", FP8 | {"strategy": "tensor"}),
}
"""By form, their format and arguments."""


@pytest.fixture(scope="module")
def theirs() -> SimpleNamespace:
    """Return their compressor and their scheme of a form: imported here, since that takes seconds."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def of(name: str) -> tuple[Any, Any]:
        kind, args = SCHEMES[name]
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        return BaseCompressor.get_value_from_registry(kind), scheme

    return SimpleNamespace(of=of)


def scales_as(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    scale = tensors["weight_scale"]
    return tensors | {"weight_scale": scale if scale.dtype.itemsize == 1 else scale.to(dtype)}


@pytest.mark.peers
@pytest.mark.slow
def test_what_is_stored_means_the_same(theirs: SimpleNamespace) -> None:
    """One test, so that one process imports them."""
    for name in SCHEMES:
        compressor, scheme = theirs.of(name)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            tensors = scales_as(stored(name, key="weight"), dtype)
            expected = compressor.decompress(tensors, scheme)["weight"]
            found = FORMS[name].dequantise(tensors, expected.dtype)["weight"]
            assert first_difference(found, expected) is None, (name, dtype)

    random = torch.Generator().manual_seed(1)
    weight = torch.randn(20, 256, generator=random).bfloat16()
    for name in filter(lambda name: name.startswith("int4"), SCHEMES):
        compressor, scheme = theirs.of(name)
        columns = 1 if "rows" in name else 2
        scale = (torch.rand(20, columns, generator=random) / 4 + 0.1).bfloat16()
        zeros = torch.randint(-8, 8, (20, columns), generator=random, dtype=torch.int8) if "zeros" in name else None
        made = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zeros}, scheme)
        made = {key: each for key, each in made.items() if each is not None}
        expected = compressor.decompress(made, scheme)["weight"]
        assert made.keys() == set(FORMS[name].keys("weight"))
        assert first_difference(FORMS[name].dequantise(made)["weight"], expected) is None, name
