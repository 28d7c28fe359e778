"""What each case of a ready lens stores, written plainly on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Oracle = Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]

WEIGHT = "layers.3.mlp.w.weight"
APART = [WEIGHT.replace("w.w", f"{name}.w") for name in ("q", "k", "v")]
GATED = [WEIGHT.replace("w.w", f"{name}.w") for name in ("gate", "up")]


def one(change: Callable[[torch.Tensor], torch.Tensor], key: str = WEIGHT) -> Oracle:
    return lambda held: {key: change(held[0])}


def gates(held: torch.Tensor, ranks: int, axis: int = 0) -> list[torch.Tensor]:
    """Gate and up of all ranks, each of which holds [gate; up]."""
    halves = [rank.chunk(2, axis) for rank in held.chunk(ranks, axis)]
    return [torch.cat([gate for gate, _ in halves], axis), torch.cat([up for _, up in halves], axis)]


def by_group(held: torch.Tensor, groups: int, rows: Sequence[int]) -> list[torch.Tensor]:
    """Queries, keys and values, which lie group by group."""
    parts = [group.split(list(rows)) for group in held.chunk(groups)]
    return [torch.cat([part[number] for part in parts]) for number in range(3)]


def grouped(held: torch.Tensor) -> list[torch.Tensor]:
    return by_group(held, 2, (4, 2, 2))


def interleaved(held: torch.Tensor) -> torch.Tensor:
    q, k, v = held.split([8, 4, 4])
    return torch.cat([torch.cat(group) for group in zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True)])


def halves(held: torch.Tensor, head: int) -> torch.Tensor:
    """Hugging Face's `permute` of Meta's weights."""
    rest = held.shape[1:]
    return held.view(-1, head // 2, 2, *rest).transpose(1, 2).reshape(held.shape)


def pairs(held: torch.Tensor, head: int) -> torch.Tensor:
    return held.view(-1, 2, head // 2, *held.shape[1:]).transpose(1, 2).reshape(held.shape)


def some_halves(held: torch.Tensor) -> torch.Tensor:
    heads = [torch.cat([halves(head[:4], 4), head[4:]]) for head in held.split(5)]
    return torch.cat(heads)


def four_deep(held: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    experts = [[gates(expert, 2, 1) for expert in layer.chunk(2, 1)] for layer in held]
    return {
        f"layers.experts.{name}": torch.stack([torch.stack([expert[at].T for expert in layer]) for layer in experts])
        for at, name in enumerate(("gate", "up"))
    }


def expert_ranks(held: torch.Tensor) -> torch.Tensor:
    """Rank (p, t) of 2 x 2 holds, of its one expert, gate and up rows of its own, as columns."""
    columns = held.split(4, 1)
    experts = [[columns[2 * p + t].chunk(2, 1) for t in (0, 1)] for p in (0, 1)]
    return torch.stack([torch.cat([ranks[t][two] for two in (0, 1) for t in (0, 1)], 1).T for ranks in experts])


def mapped(held: torch.Tensor) -> dict[str, torch.Tensor]:
    first, second = held.chunk(2, 1)
    parts = torch.cat([first[:, :1], second[:, :1]], 1), torch.cat([first[:, 1:], second[:, 1:]], 1)
    return {WEIGHT.replace("w.w", f"{name}.w"): part for name, part in zip("ab", parts, strict=True)}


ORACLES: dict[str, Oracle] = {
    "transposed": one(lambda w: w.T),
    "transposed: a prepended axis": one(lambda w: w.transpose(1, 2)),
    "transposed: three axes": one(lambda w: w.permute(2, 0, 1)),
    "gate_and_up: 1 rank": one(lambda w: w),
    "gate_and_up: 3 ranks": one(lambda w: torch.cat(gates(w, 3))),
    "gate_and_up: named": lambda held: dict(zip(GATED, gates(held[0], 2, 1), strict=True)),
    "gate_and_up: axis 1": lambda held: dict(zip(GATED, gates(held[0], 2, 1), strict=True)),
    "attention_qkv: multi-head": one(lambda w: torch.cat(by_group(w, 3, (2, 2, 2)))),
    "attention_qkv: grouped": lambda held: dict(zip(APART, grouped(held[0]), strict=True)),
    "attention_qkv: grouped, in one": one(lambda w: torch.cat(grouped(w))),
    "attention_qkv: bias": lambda held: dict(zip(APART, grouped(held[0]), strict=True)),
    "attention_qkv: to interleaved": one(interleaved),
    "attention_qkv: rank by rank": lambda held: dict(zip(APART, by_group(held[0], 2, (4, 2, 2)), strict=True)),
    "attention_qkv: rank by rank, in one": one(lambda w: torch.cat(by_group(w, 2, (2, 2, 2)))),
    "rotary_halves": one(lambda w: halves(w, 4)),
    "rotary_halves: some rows": one(some_halves),
    "rotary_pairs": one(lambda w: pairs(w, 6)),
    "stacked_layers": lambda held: {"layers.w": torch.stack(list(held))},
    "stacked_layers: of a scalar": lambda held: {"layers.w": torch.stack(list(held))},
    "unstacked_layers": lambda held: {f"layers.{at}.norm": layer for at, layer in enumerate(held[0])},
    "unstacked_layers: a prepended axis": lambda held: {f"layers.{at}.norm": row for at, row in enumerate(held[0])},
    "expert_stack": one(lambda w: torch.stack(w.split(2, 1))),
    "expert_keys": lambda held: {f"mlp.experts.{at}.fc2": part for at, part in enumerate(held[0].split(3))},
    "expert_keys: in stacked layers": lambda held: {
        f"layers.experts.{at}.fc2": held[0][:, 3 * at : 3 * at + 3] for at in range(2)
    },
    "padded_axis": one(lambda w: w[:5]),
    "padded_axis: axis 1": one(lambda w: w[:, :3]),
    "tied": one(lambda w: w, "layers.3.mlp.embedding.weight"),
    "renamed": one(lambda w: w, "layers.3.ffn.weight"),
    "by_pattern": lambda held: {
        key: part if ".v." in key else halves(part, 2) for key, part in zip(APART, grouped(held[0]), strict=True)
    },
    "rearranged: experts": one(lambda w: torch.stack([expert.T for expert in w.chunk(2)])),
    "rearranged: ranks of experts": one(expert_ranks),
    "rearranged: prepended too": one(lambda w: torch.cat([layer.T for layer in w], 1)),
    "mapped_axis": lambda held: mapped(held[0]),
    "from_function: transposed": one(lambda w: w.T),
    "from_function: a prepended axis": one(lambda w: torch.stack([layer.flip(0).T for layer in w])),
    "from_function: gate and up": lambda held: dict(zip(GATED, held[0].view(2, 2, 2, 3).unbind(1), strict=True)),
    "from_function: rows of padding": one(lambda w: w[:5]),
    "from_function: of experts": lambda held: {f"ffn.experts.{at}": part for at, part in enumerate(held[0].split(3))},
    "compose": one(lambda w: w),
    "compose: four deep": four_deep,
}
