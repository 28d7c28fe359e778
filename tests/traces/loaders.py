"""Loaders in the manner of inference engines, in our own words: each says which file and commit it stands for.

Those without a commit were compared with copies of the code whose commit isn't known; row parallel is from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]
HEADS, KV, SIZE, HIDDEN, FFN, EXPERTS, VOCAB = 8, 2, 4, 12, 16, 8, 30


@dataclass(frozen=True)
class Loader:
    """A loader of one rank: makes the rank's parameters, and fills them from named weights."""

    stands_for: str
    sources: Mapping[str, tuple[int, ...]]
    make: Callable[[int, int], tuple[dict[str, nn.Parameter], Callable[[Weights], None]]]
    ranks: tuple[int, ...] = (1, 2, 4, 8)


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def rows_of(weight: torch.Tensor, rank: int, count: int, dim: int = 0) -> torch.Tensor:
    return weight.narrow(dim, rank * count, count)


def qkv_by_shard_id(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    """Queries are cut over ranks; where there are more ranks than heads of keys, several ranks have the same head."""
    q, kv, copies = HEADS // ranks * SIZE, max(1, KV // ranks) * SIZE, max(1, ranks // KV)
    qkv = empty(q + 2 * kv, HIDDEN)
    slots = {"q": (0, q, rank), "k": (q, kv, rank // copies), "v": (q + kv, kv, rank // copies)}

    def load(weights: Weights) -> None:
        for name, weight in weights:
            start, count, part = slots[name.split("_")[0][-1]]
            qkv.data.narrow(0, start, count).copy_(rows_of(weight, part, count))

    return {"qkv": qkv}, load


def fused_gate_and_up(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    each = FFN // ranks
    both = empty(2 * each, HIDDEN)

    def load(weights: Weights) -> None:
        for name, weight in weights:
            both.data[("gate", "up").index(name) * each :][:each] = rows_of(weight, rank, each)

    return {"gate_up": both}, load


def row_parallel(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    down = empty(HIDDEN, FFN // ranks)

    def load(weights: Weights) -> None:
        [(_, weight)] = weights
        down.data.copy_(rows_of(weight, rank, FFN // ranks, dim=1))

    return {"down": down}, load


def padded_vocabulary(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    each = -(-VOCAB // (8 * ranks)) * 8
    table = empty(each, HIDDEN)

    def load(weights: Weights) -> None:
        [(_, weight)] = weights
        first = min(rank * each, VOCAB)
        count = min(each, VOCAB - first)
        table[:count].data.copy_(weight.narrow(0, first, count))
        table[count:].data.fill_(0)

    return {"embed": table}, load


def experts(*, parallel: str) -> Callable[[int, int], tuple[dict[str, nn.Parameter], Callable[[Weights], None]]]:
    def make(rank: int, ranks: int):  # type: ignore[no-untyped-def]
        here = EXPERTS // ranks if parallel == "ep" else EXPERTS
        part, each = (0, FFN) if parallel == "ep" else (rank, FFN // ranks)
        local = torch.full((EXPERTS,), -1, dtype=torch.int32)
        local[rank * here if parallel == "ep" else 0 :][:here] = torch.arange(here, dtype=torch.int32)
        w13, w2 = empty(here, 2 * each, HIDDEN), empty(here, HIDDEN, each)

        def load(weights: Weights) -> None:
            for name, weight in weights:
                expert, kind = name.split(".")
                if (number := local[int(expert)].item()) == -1:
                    continue
                if kind == "w2":
                    w2.data[number].copy_(rows_of(weight, part, each, dim=1))
                else:
                    slot = w13.data[number].narrow(0, each * (kind == "w3"), each)
                    slot.copy_(rows_of(weight, part, each))

        return {"w13": w13, "w2": w2}, load

    return make


def experts_in_one(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    each = FFN // ranks
    w13, w2 = empty(EXPERTS, 2 * each, HIDDEN), empty(EXPERTS, HIDDEN, each)

    def load(weights: Weights) -> None:
        for name, weight in weights:
            if name == "gate_up":  # (experts, hidden, 2 * ffn)
                for number, half in enumerate(weight.transpose(1, 2).chunk(2, dim=1)):
                    w13.data[:, number * each : (number + 1) * each].copy_(rows_of(half, rank, each, dim=1))
            else:
                w2.data.copy_(rows_of(weight, rank, each, dim=1).transpose(1, 2).contiguous())

    return {"w13": w13, "w2": w2}, load


def interleaved_experts(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    """Rows of gate and up alternate: cut so, and taken apart once they are loaded."""
    each = FFN // ranks
    w13 = empty(EXPERTS, 2 * each, HIDDEN)

    def load(weights: Weights) -> None:
        [(_, weight)] = weights
        mine = weight[:, 2 * rank * each : 2 * (rank + 1) * each, ...]
        w13.data[:, : mine.shape[1], : mine.shape[2]].copy_(mine)
        w13.data = torch.cat([w13.data[:, ::2], w13.data[:, 1::2]], dim=1)

    return {"w13": w13}, load


def tied_head(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    table = empty(VOCAB // 2, HIDDEN)

    def load(weights: Weights) -> None:
        [(_, weight)] = weights
        table.data.copy_(weight)

    return {"embed": table, "head": table}, load


def transposed(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    each = FFN // ranks
    weight_of = empty(each, HIDDEN)

    def load(weights: Weights) -> None:
        [(_, weight)] = weights
        weight_of.data.copy_(rows_of(weight.t(), rank, each))

    return {"fc": weight_of}, load


def grouped_qkv(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    """Stored group by group: several queries, a key, a value."""
    group = HEADS // KV
    parameters, by_shard_id = qkv_by_shard_id(rank, ranks)

    def load(weights: Weights) -> None:
        [(_, weight)] = weights
        parts = weight.view(-1, group + 2, SIZE, HIDDEN).split([group, 1, 1], dim=1)
        by_shard_id((f"{name}_proj", part.reshape(-1, HIDDEN)) for name, part in zip("qkv", parts, strict=True))

    return parameters, load


def latent_attention(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    """The fused up-projection of latent attention is taken apart once it is loaded, and kept turned."""
    heads = HEADS // ranks
    fused = empty(heads * 2 * SIZE, HIDDEN)
    parts: dict[str, nn.Parameter] = {}

    def load(weights: Weights) -> None:
        [(_, weight)] = weights
        fused.data.copy_(rows_of(weight, rank, heads * 2 * SIZE))
        keys, values = fused.data.unflatten(0, (heads, 2 * SIZE)).split([SIZE, SIZE], dim=1)
        parts["w_kc"] = nn.Parameter(keys.transpose(1, 2).contiguous().transpose(1, 2), requires_grad=False)
        parts["w_vc"] = nn.Parameter(values.contiguous().transpose(1, 2), requires_grad=False)

    return parts, load


def replaced_data(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    each = FFN // ranks
    w2 = nn.Parameter(torch.empty(0), requires_grad=False)

    def load(weights: Weights) -> None:
        [(_, weight)] = weights
        w2.data = rows_of(weight[:], rank, each, dim=2)
        w2.data = w2.data.transpose(1, 2)

    return {"w2": w2}, load


def block_scales(rank: int, ranks: int):  # type: ignore[no-untyped-def]
    """Values of 8 bits by scales of blocks of 8 by 8, the last ones cut short, as bfloat16."""
    each = FFN // ranks
    weight_of = nn.Parameter(torch.empty(each, HIDDEN, dtype=torch.bfloat16), requires_grad=False)

    def load(weights: Weights) -> None:
        given = dict(weights)
        values = given["w"]
        scales = given["scale"].repeat_interleave(8, dim=-2).repeat_interleave(8, dim=-1)
        whole = (values.to(torch.float32) * scales[..., : values.shape[-2], : values.shape[-1]]).to(torch.bfloat16)
        weight_of.data.copy_(rows_of(whole, rank, each))

    return {"w": weight_of}, load


ATTENTION = {f"{name}_proj": (count * SIZE, HIDDEN) for name, count in (("q", HEADS), ("k", KV), ("v", KV))}
BY_EXPERT = {
    f"{number}.{name}": shape
    for number in range(EXPERTS)
    for name, shape in (("w1", (FFN, HIDDEN)), ("w2", (HIDDEN, FFN)), ("w3", (FFN, HIDDEN)))
}
VLLM, SGLANG = "vLLM: vllm/model_executor", "SGLang: python/sglang/srt"

LOADERS = {
    "qkv by shard id, kv heads on several ranks": Loader(
        f"{VLLM}/layers/linear.py @ 0036d38: QKVParallelLinear.weight_loader", ATTENTION, qkv_by_shard_id
    ),
    "gate and up": Loader(
        f"{VLLM}/layers/linear.py @ 0036d38: MergedColumnParallelLinear.weight_loader",
        {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN)},
        fused_gate_and_up,
    ),
    "row parallel": Loader(
        f"{VLLM}/layers/linear.py: RowParallelLinear.weight_loader", {"w": (HIDDEN, FFN)}, row_parallel
    ),
    "padded vocabulary": Loader(
        f"{VLLM}/layers/vocab_parallel_embedding.py @ 00db011: VocabParallelEmbedding.weight_loader",
        {"w": (VOCAB, HIDDEN)},
        padded_vocabulary,
        (1, 2),
    ),
    "experts by tp": Loader(
        f"{VLLM}/layers/fused_moe/layer.py @ 0014ec6: FusedMoE.weight_loader", BY_EXPERT, experts(parallel="tp")
    ),
    "experts by ep": Loader(
        f"{SGLANG}/layers/moe/fused_moe_triton/layer.py @ 008d7d0: FusedMoE.weight_loader",
        BY_EXPERT,
        experts(parallel="ep"),
    ),
    "experts in one tensor, transposed": Loader(
        f"{VLLM}/models/llama4.py @ 0121c95: Llama4Model.load_moe_expert_weights",
        {"gate_up": (EXPERTS, HIDDEN, 2 * FFN), "down": (EXPERTS, FFN, HIDDEN)},
        experts_in_one,
    ),
    "gate and up of experts, interleaved": Loader(
        f"{VLLM}/models/gpt_oss.py @ 0025d69: GptOssModel.load_weights; then process_moe_weights, for TPUs",
        {"w": (EXPERTS, 2 * FFN, HIDDEN)},
        interleaved_experts,
    ),
    "tied": Loader(
        f"{VLLM}/models/llama.py: LlamaForCausalLM, tie_weights", {"w": (VOCAB // 2, HIDDEN)}, tied_head, (1,)
    ),
    "transposed": Loader(
        f"{VLLM}/models/gpt2.py @ 0176894: GPT2LMHeadModel.load_weights", {"w": (HIDDEN, FFN)}, transposed
    ),
    "qkv by groups": Loader(
        f"{VLLM}/models/internlm2.py: InternLM2ForCausalLM.load_weights; not as of 0531c22, which splits activations",
        {"w": ((HEADS + 2 * KV) * SIZE, HIDDEN)},
        grouped_qkv,
    ),
    "latent attention": Loader(
        f"{SGLANG}/models/deepseek_v2.py @ v0.3.0, in load_weights, as of 00114ae in post_load_weights",
        {"w": (HEADS * 2 * SIZE, HIDDEN)},
        latent_attention,
    ),
    "data replaced": Loader(
        f"{SGLANG}/layers/quantization/unquant.py @ 0038b2b: UnquantizedFusedMoEMethod, after loading, on NPUs",
        {"w": (EXPERTS, HIDDEN, FFN)},
        replaced_data,
    ),
    "scales of blocks": Loader(
        f"{SGLANG}/layers/quantization/fp8_utils.py: block_quant_dequant",
        {"w": (FFN, HIDDEN), "scale": (FFN // 8, -(-HIDDEN // 8))},
        block_scales,
        (1, 2, 4),
    ),
}
