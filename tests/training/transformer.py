"""A small tensor-parallel transformer: fused QKV of grouped queries, SwiGLU, RMSNorm, a padded vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tests.training.place import Place, copied, largest, reduced


@dataclass(frozen=True)
class Config:
    """The model, whatever the layout. Odd sizes, so that ranges of buffers end within rows."""

    layers: int = 2
    width: int = 20
    heads: int = 8
    groups: int = 4
    head_dim: int = 4
    hidden: int = 28
    vocabulary: int = 35
    vocabulary_multiple: int = 12  # on 4 ranks the last one holds nothing but padding
    time: int = 10
    tied: bool = False
    dtype: torch.dtype = torch.float32

    def padded_vocabulary(self, tp: int) -> int:
        multiple = self.vocabulary_multiple * tp
        return -(-self.vocabulary // multiple) * multiple


class Weight(nn.Module):
    """One parameter, with a module's name."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))


class Norm(Weight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight.float()


class Column(Weight):
    """Each rank has some of the rows of the weight, and so of the outputs."""

    def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        return functional.linear(copied(x, place.tp_group), self.weight.float())


class Row(Weight):
    """Each rank has some of the columns of the weight, for the inputs that it has."""

    def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        return reduced(functional.linear(x, self.weight.float()), place.tp_group)


class Attention(nn.Module):
    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        self.config, self.place, tp = config, place, place.layout.tp
        fused = (config.heads + 2 * config.groups) * config.head_dim
        self.linear_qkv = Column(fused // tp, config.width, dtype=config.dtype)
        self.linear_proj = Row(config.width, config.heads * config.head_dim // tp, dtype=config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        each = self.config.heads // self.config.groups
        # Group by group: its queries, its key, its value.
        fused = self.linear_qkv(x, self.place).view(batch, time, -1, each + 2, self.config.head_dim)
        query, key, value = fused.permute(0, 2, 3, 1, 4).split([each, 1, 1], dim=2)
        scores = query @ key.transpose(-1, -2) / self.config.head_dim**0.5
        future = torch.ones(time, time, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        return self.linear_proj(mixed.permute(0, 3, 1, 2, 4).reshape(batch, time, -1), self.place)


class Mlp(nn.Module):
    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        self.place, part = place, config.hidden // place.layout.tp
        self.linear_fc1 = Column(2 * part, config.width, dtype=config.dtype)
        self.linear_fc2 = Row(config.width, part, dtype=config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(x, self.place).chunk(2, dim=-1)
        return self.linear_fc2(functional.silu(gate) * up, self.place)


class Layer(nn.Module):
    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.width, dtype=config.dtype)
        self.self_attention = Attention(config, place)
        self.pre_mlp_layernorm = Norm(config.width, dtype=config.dtype)
        self.mlp = Mlp(config, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Transformer(nn.Module):
    """It computes the sum of the losses of some rows of tokens, the same on all ranks that share its tensors."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        self.config, self.place = config, place
        self.rows = config.padded_vocabulary(place.layout.tp) // place.layout.tp
        self.embedding = Weight(self.rows, config.width, dtype=config.dtype)
        self.position = Weight(config.time, config.width, dtype=config.dtype)
        self.layers = nn.ModuleList(Layer(config, place) for _ in range(config.layers))
        self.final_layernorm = Norm(config.width, dtype=config.dtype)
        self.output_layer = self.embedding if config.tied else Weight(self.rows, config.width, dtype=config.dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self._embedded(inputs) + self.position.weight.float()[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(
            copied(self.final_layernorm(x), self.place.tp_group), self.output_layer.weight.float()
        )
        return self._loss(logits, targets)

    @property
    def _first(self) -> int:
        return self.place.tp_rank * self.rows

    def _mine(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's row on this rank, and whether it is here."""
        rows = tokens - self._first
        here = (rows >= 0) & (rows < self.rows)
        return rows.where(here, 0), here

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, here = self._mine(tokens)
        found = functional.embedding(rows, self.embedding.weight.float())
        return reduced(found * here[..., None], self.place.tp_group)

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        group = self.place.tp_group
        is_padding = torch.arange(self._first, self._first + self.rows) >= self.config.vocabulary
        logits = logits.masked_fill(is_padding, float("-inf"))
        top = largest(logits.detach().amax(-1), group)
        total = reduced((logits - top[..., None]).exp().sum(-1), group)
        rows, here = self._mine(targets)
        chosen = logits.gather(-1, rows[..., None])[..., 0].where(here, 0)
        return (total.log() + top - reduced(chosen, group)).sum()


# How each tensor is cut over tensor-parallel ranks: along which axis; others are whole on each.
CUT_AXIS = {"embedding": 0, "output_layer": 0, "linear_qkv": 0, "linear_proj": 1, "linear_fc1": 0, "linear_fc2": 1}


def cut_axis(name: str) -> int | None:
    """Return the axis along which ranks share a parameter; None where each has all of it."""
    return CUT_AXIS.get(name.split(".")[-2])


def initial_weights(config: Config, seed: int) -> dict[str, torch.Tensor]:
    """Return all weights whole and apart, as a plain model has them: by name, without padding."""
    draw = torch.Generator().manual_seed(seed)
    heads, groups, width = config.heads * config.head_dim, config.groups * config.head_dim, config.width
    shapes = {"embedding.weight": (config.vocabulary, width), "position.weight": (config.time, width)}
    for layer in range(config.layers):
        own = {
            "self_attention.q_proj": (heads, width),
            "self_attention.k_proj": (groups, width),
            "self_attention.v_proj": (groups, width),
            "self_attention.linear_proj": (width, heads),
            "mlp.gate_proj": (config.hidden, width),
            "mlp.up_proj": (config.hidden, width),
            "mlp.linear_fc2": (width, config.hidden),
            "input_layernorm": (width,),
            "pre_mlp_layernorm": (width,),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    shapes["final_layernorm.weight"] = (width,)
    if not config.tied:
        shapes["output_layer.weight"] = (config.vocabulary, width)
    weights = {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes.items()}
    return {name: (1 + each if "norm" in name else each).to(config.dtype) for name, each in weights.items()}


def fill_model(model: Transformer, weights: dict[str, torch.Tensor]) -> None:
    """Copy whole weights into what a rank holds. Written by hand: the lenses are what is tested with it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(held_weight(model, name, weights))


def held_weight(model: Transformer, name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what a rank holds of a parameter, or of a state of it, from the whole ones by their names."""
    config, place = model.config, model.place
    tp, rank = place.layout.tp, place.tp_rank
    if "linear_qkv" in name:
        parts = [weights[name.replace("linear_qkv", part)] for part in ("q_proj", "k_proj", "v_proj")]
        by_group = [part.view(config.groups, -1, config.width) for part in parts]
        return torch.cat(by_group, dim=1).chunk(tp)[rank].reshape(-1, config.width)
    if "linear_fc1" in name:
        parts = [weights[name.replace("linear_fc1", part)] for part in ("gate_proj", "up_proj")]
        return torch.cat([part.chunk(tp)[rank] for part in parts])
    whole, axis = weights[name], cut_axis(name)
    if name in ("embedding.weight", "output_layer.weight"):
        whole = functional.pad(whole, (0, 0, 0, config.padded_vocabulary(tp) - config.vocabulary))
    return whole if axis is None else whole.chunk(tp, dim=axis)[rank]
