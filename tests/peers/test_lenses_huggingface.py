"""Lenses beside transformers: rotary rows as its conversion has them, fused tensors as its models take them apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import shardtree as st
from shardtree.lenses import attention_qkv, gate_and_up, rotary_halves, rotary_pairs
from shardtree.testing import check_lens, first_difference

pytestmark = pytest.mark.peers
HEADS, SIZE, WIDTH = 4, 6, 5


def whole(tensor: torch.Tensor) -> list[st.ShardedTensor]:
    return [st.ShardedTensor.from_rank_offsets("w", part, (0, at, 2)) for at, part in enumerate(tensor.chunk(2))]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(HEADS * SIZE, WIDTH), (HEADS * SIZE,)], ids=["weight", "bias"])
def test_rotary_rows_are_permuted_as_theirs(inverse: bool, shape: tuple[int, ...]) -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    rows = torch.randn(shape)
    expected = loading.PermuteForRope(inverse=inverse)._permute_for_rope(
        rows, SimpleNamespace(num_attention_heads=HEADS)
    )
    lens = (rotary_pairs if inverse else rotary_halves)(head_size=SIZE)
    assert first_difference(check_lens(lens, whole(rows))["w"], expected.contiguous()) is None


def test_the_comparison_catches_the_other_direction() -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    rows = torch.randn(HEADS * SIZE, WIDTH)
    theirs = loading.PermuteForRope()._permute_for_rope(rows, SimpleNamespace(num_attention_heads=HEADS))
    assert first_difference(check_lens(rotary_pairs(head_size=SIZE), whole(rows))["w"], theirs.contiguous())


def test_phi3_s_fused_tensors_are_taken_apart_as_the_model_does() -> None:
    """Its forward cuts what the fused layers give; with the unit matrix as input these are the weights' rows."""
    phi = pytest.importorskip("transformers.models.phi3")
    config = phi.Phi3Config(
        hidden_size=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=6, num_hidden_layers=1,
        vocab_size=11, pad_token_id=0,
    )  # fmt: skip
    layer = phi.modeling_phi3.Phi3DecoderLayer(config, 0)
    fused = layer.self_attn.qkv_proj.weight.detach()
    lens = attention_qkv(heads=4, head_size=2, query_groups=2, held="concatenated", part="w", names=("q", "k", "v"))
    stored = check_lens(lens, whole(fused))
    assert [first_difference(stored[name], rows) for name, rows in zip("qkv", fused.split([8, 4, 4]), strict=True)] == [
        None
    ] * 3
    gate, up = check_lens(
        gate_and_up(tensor_parallel=1, part="w", names=("gate", "up")), whole(layer.mlp.gate_up_proj.weight.detach())
    ).values()
    inputs = torch.randn(2, 8)
    expected = layer.mlp(inputs)
    ours = layer.mlp.down_proj(inputs @ up.T * torch.nn.functional.silu(inputs @ gate.T))
    assert torch.allclose(ours, expected, atol=1e-6)


def test_gpt_neox_s_heads_are_taken_apart_as_the_model_does() -> None:
    """Each head holds its query, key and value: `view(heads, 3 * size)`, then `chunk(3)`, in its forward."""
    neox = pytest.importorskip("transformers.models.gpt_neox")
    config = neox.GPTNeoXConfig(hidden_size=8, num_attention_heads=4, intermediate_size=6, num_hidden_layers=1)
    fused = neox.modeling_gpt_neox.GPTNeoXAttention(config, 0).query_key_value.weight.detach()
    by_head = fused.view(4, 3, 2, 8)
    stored = check_lens(attention_qkv(heads=4, head_size=2, part="w", names=("q", "k", "v")), whole(fused))
    for number, name in enumerate("qkv"):
        assert first_difference(stored[name], by_head[:, number].reshape(8, 8)) is None
