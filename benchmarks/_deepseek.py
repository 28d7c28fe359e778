"""DeepSeek-V3 as a Hugging Face folder of sparse files: its true keys, shapes and dtypes, and few bytes of weights.

All weights are bfloat16, as after the conversion that its authors publish: 46,183 tensors, 1.37 TB in 163 files.
The published float8 files have a tensor of scales beside each matrix.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha512
from math import prod
from pathlib import Path

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a model of that family; the defaults are the public configuration's."""

    layers: int = 61
    dense_layers: int = 3
    experts: int = 256
    hidden: int = 7168
    intermediate: int = 18432
    moe_intermediate: int = 2048
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    vocab: int = 129280


SMALL = Config(2, 1, 4, 64, 128, 32, 4, 24, 16, 8, 4, 8, 256)
THIN = Config(hidden=448, intermediate=1152, moe_intermediate=128, heads=8, q_rank=96, kv_rank=32, vocab=8080)
"""As many tensors, of a 256th of the bytes."""

TRAINING = {
    "**.experts.**": (1, 1),
    **dict.fromkeys(("**.embed_tokens.weight", "**.*head.weight", "**.*_b_proj.weight", "**.gate_proj.weight"), (8, 1)),
    **dict.fromkeys(("**.up_proj.weight",), (8, 1)),
    **dict.fromkeys(("**.o_proj.weight", "**.down_proj.weight"), (1, 8)),
}
"""How its tensors are cut for TP 8, PP 16 and EP 64: an expert or a layer isn't; the rest by columns or by rows."""


def shapes_of(config: Config) -> Shapes:
    """Return the shape of each tensor, by key, in the order of the layers; the last layer predicts two tokens ahead."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers + 1):
        shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in _layer(config, layer))
    return shapes | {"model.norm.weight": (config.hidden,), "lm_head.weight": (config.vocab, config.hidden)}


def _layer(config: Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config.hidden, config.heads
    if layer == config.layers:
        yield "embed_tokens.weight", (config.vocab, hidden)
        yield from ((f"{name}.weight", (hidden,)) for name in ("enorm", "hnorm", "shared_head.norm"))
        yield "eh_proj.weight", (hidden, 2 * hidden)
        yield "shared_head.head.weight", (config.vocab, hidden)
    yield from ((f"{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
    yield "self_attn.q_a_proj.weight", (config.q_rank, hidden)
    yield "self_attn.q_a_layernorm.weight", (config.q_rank,)
    yield "self_attn.q_b_proj.weight", (heads * (config.nope + config.rope), config.q_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (config.kv_rank + config.rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (config.kv_rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (config.nope + config.value), config.kv_rank)
    yield "self_attn.o_proj.weight", (hidden, heads * config.value)
    if layer < config.dense_layers:
        yield from _mlp("mlp", hidden, config.intermediate)
        return
    yield "mlp.gate.weight", (config.experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (config.experts,)
    for expert in range(config.experts):
        yield from _mlp(f"mlp.experts.{expert}", hidden, config.moe_intermediate)
    yield from _mlp("mlp.shared_experts", hidden, config.moe_intermediate)


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from ((f"{name}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up"))
    yield f"{name}.down_proj.weight", (hidden, inner)


def nbytes_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how long tensors of these shapes are in bfloat16."""
    return sum(2 * prod(shape) for shape in shapes.values())


def make_folder(folder: Path, shapes: Shapes, files: int) -> None:
    """Make a Hugging Face folder of about so many sparse files; a tensor has bytes of its own first, then zeros."""
    folder.mkdir(parents=True)
    groups, most, size = [Shapes()], nbytes_of(shapes) / files, 0
    for key, shape in shapes.items():
        if size >= most * len(groups):
            groups.append({})
        groups[-1][key] = shape
        size += 2 * prod(shape)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        weight_map |= dict.fromkeys(group, name)
        _make_file(folder / name, group)
    index = {"metadata": {"total_size": nbytes_of(shapes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _make_file(path: Path, shapes: Shapes) -> None:
    listed: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        listed[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(listed, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        begin = 8 + len(header)
        file.truncate(begin + end)
        for key, shape in shapes.items():
            file.seek(begin)
            file.write(sha512(key.encode()).digest()[: 2 * prod(shape)])
            begin += 2 * prod(shape)
