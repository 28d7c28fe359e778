"""transformers' own loading, traced whole: its renamings, its converters and its threads."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardtree as st

pytestmark = [pytest.mark.peers, pytest.mark.slow]

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"head_dim": 4},
    "Phi3": {"pad_token_id": 0},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 8},
    "Qwen3Moe": {**EXPERTS, "head_dim": 4},
    "Olmoe": {"num_experts": 4},
    "DeepseekV3": {
        **LATENT, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_s_own_loading_is_traced_there_and_back(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name]})
    model = kind(config)
    model.save_pretrained(tmp_path)
    stored = {key: each for file in tmp_path.glob("*.safetensors") for key, each in load_file(file).items()}
    held: dict[str, torch.Tensor] = {}

    def load(tensors: dict[str, torch.Tensor]) -> None:
        held.update(kind.from_pretrained(None, config=config, state_dict=tensors).state_dict())

    found = st.trace(load, stored, into=lambda: held)
    outputs = found(stored)
    expected = model.state_dict()
    assert outputs.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(outputs[key], tensor)] == []
    assert found.check() == ()
    elements = sum(prod(box.shape) for boxes in found.reads().values() for box in boxes)
    assert elements == sum(tensor.numel() for tensor in stored.values()), "each element is read once"
    back = found.inverse()(outputs)
    assert [key for key, tensor in stored.items() if not torch.equal(back[key], tensor)] == []
