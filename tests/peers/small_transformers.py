"""Models of transformers of any type or class, so small that hundreds are made in a minute."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

SIZES = {
    r"vocab_size|max_position_embeddings": 64,
    r".*(experts_per_tok|experts_per_token|topk|top_k|moe_k)": 2,
    r"topk_group|n_group|n(um)?_shared_experts|first_k_dense_replace|num_dense_layers": 1,
    r"(moe_)?(num|n)_(routed_|local_)?experts|zero_expert_num": 4,
    r".*(key_value|kv)_heads": 2,
    r".*heads?|multi_query_group_num": 4,
    r".*lora_rank": 8,
    r".*head_dim": 4,
    r"n_layers?|.*_layers|depth": 2,
    r".*intermediate_size|.*ffn_\w*(dim|size)|.*inner.*|mlp_dim": 32,
    r".*hidden_size|d_model|.*embed_dim|dim|.*hidden_dim|adapter_(in|out)_dim": 16,
    r"image_size": 16,
    r"patch_size": 4,
}
"""The most that a number in a configuration may be, by what its name matches first."""

GATED = {"use_swiglu_ffn": True}
GIVEN: dict[str, dict[str, Any]] = {
    "Dinov2Model": GATED,
    "Dinov2Backbone": GATED,
    "Dinov2WithRegistersModel": GATED,
    "Dinov2WithRegistersBackbone": GATED,
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {
        "text_config.hidden_size": 32,
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "flint": {"mlp_only_layers": []},
    "hunyuan_v1_moe": {"head_dim": 4, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 8, "talker_config.spatial_merge_size": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 4, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "layer_types": ["linear_attention", "indexed_attention"],
        "ngram_vocab_size_base": 16, "ple_layer_ids": [1],
    },
}  # fmt: skip
"""What a configuration needs besides, by type of model."""


def small_model(entry: str, given: dict[str, Any] | None = None) -> Any:
    """Return a small model without memory of a type, or a class, that transformers' mapping names.

    Raises:
        ValueError: none of the classes could be made; says why.
    """
    failed = []
    for kind in _classes_of(entry):
        try:
            config = _shrink(kind.config_class())
            for path, value in (GIVEN.get(entry, {}) if given is None else given).items():
                *parents, name = path.split(".")
                held = config
                for parent in parents:
                    held = getattr(held, parent)
                setattr(held, name, value)
            with torch.device("meta"):
                model = kind(config)
            if (count := sum(each.numel() for each in model.state_dict().values())) > 1 << 26:
                raise ValueError(f"{count} elements")
        except Exception as error:  # whatever a model's own code raises
            failed.append(f"{kind.__name__}: {error!r}")
        else:
            return model
    raise ValueError("; ".join(failed) or f"transformers has no {entry!r}")


def _shrink(config: Any) -> Any:
    from transformers import PretrainedConfig

    heads = [vars(config).get(f"num_{name}_heads") for name in ("attention", "key_value")]
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _shrink(value)
        elif type(value) is int and name.endswith("_token_id"):
            setattr(config, name, min(value, 1))
        elif type(value) is int:
            most = next((most for pattern, most in SIZES.items() if re.fullmatch(pattern, name)), value)
            setattr(config, name, min(value, most))
    if heads[0] == heads[1] is not None:
        config.num_key_value_heads = vars(config)["num_attention_heads"]
    for name, value in list(vars(config).items()):
        if name in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
            # Each kind of layer comes first once, as far as there are layers.
            setattr(config, name, [*dict.fromkeys(value), *value][: config.num_hidden_layers])
    return config


def _classes_of(entry: str) -> list[Any]:
    """Return the classes of an entry, those that hold the most first."""
    from transformers import PreTrainedModel

    classes, configs = _listed()
    if entry in classes:
        return [getattr(import_module(classes[entry]), entry)]
    if entry not in configs:
        return []
    name, module = configs[entry]
    config = getattr(import_module(module), name)
    found = [
        each
        for each in vars(import_module(module.replace("configuration_", "modeling_"))).values()
        if isinstance(each, type) and issubclass(each, PreTrainedModel) and "PreTrained" not in each.__name__
        if getattr(each, "config_class", None) is config
    ]
    endings = ("ForCausalLM", "ForConditionalGeneration", "Model")
    rank = {each: [each.__name__.endswith(end) for end in endings] for each in found}
    return sorted(found, key=rank.__getitem__, reverse=True)


@cache
def _listed() -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Return the module of each class, and the configuration of each type, from the text: importing takes minutes."""
    import transformers

    classes: dict[str, str] = {}
    configs: dict[str, tuple[str, str]] = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/*.py")):
        module = f"transformers.models.{file.parent.name}.{file.stem}"
        if file.stem.startswith("modeling_"):
            classes |= dict.fromkeys(re.findall(r"^class (\w+)\(", file.read_text(), re.M), module)
        elif file.stem.startswith("configuration_"):
            for name, body in re.findall(r"^class (\w+)\((.*?)(?=^class |\Z)", file.read_text(), re.M | re.S):
                if found := re.search(r'^    model_type(?:: str)? = "(.*)"', body, re.M):
                    configs.setdefault(found[1], (name, module))
    return classes, configs
