"""Checkpoints as Megatron-Core writes them with a `dp_reshardable` optimizer, from a description, and the truth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

import shardtree as st

STATES = ("param", "exp_avg", "exp_avg_sq")


class Kind(NamedTuple):
    """A parameter: its key, its shape without the layer's axis, and how it is cut over tensor-parallel ranks."""

    key: str
    shape: tuple[int, ...]
    axis: int | None = None
    fill: float | None = None  # all weights are this, while masters differ, unless the job is `exact`
    gated: bool = False
    frozen: bool = False


class Parameter(NamedTuple):
    """A parameter of one layer, or of none."""

    key: str
    layer: int | None
    kind: Kind


def layer_kinds(hidden: int, *, fused: bool = False, bias: bool = False) -> list[Kind]:
    """A layer's parameters in the order of its modules."""
    norm = Kind("self_attention.linear_qkv.layer_norm_weight", (hidden,), fill=1.0)
    projection = [Kind("self_attention.linear_proj.weight", (hidden, hidden), 1)]
    projection += [Kind("self_attention.linear_proj.bias", (hidden,), fill=0.0)] * bias
    qkv = [Kind("self_attention.linear_qkv.weight", (2 * hidden, hidden), 0)]
    qkv += [Kind("self_attention.linear_qkv.bias", (2 * hidden,), 0, fill=0.0)] * bias
    mlp = [
        Kind("mlp.linear_fc1.layer_norm_weight", (hidden,), fill=1.0),
        Kind("mlp.linear_fc1.weight", (4 * hidden, hidden), 0, gated=True),
        Kind("mlp.linear_fc2.weight", (hidden, 2 * hidden), 1),
    ]
    return [*projection, norm, *qkv, *mlp] if fused else [norm, *projection, *qkv, *mlp]


@dataclass
class Job:
    """A model on tensor-parallel ranks and pipeline stages, whose optimizer is cut over data-parallel ranks."""

    kinds: Sequence[Kind]
    layers: int = 2
    hidden: int = 16
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    tied: bool = False
    bucket_size: int = 2000
    seed: int = 0
    exact: bool = False  # filled masters are what weights are
    padding: float | None = None  # between parameters; None for what was there
    moments: float | None = None  # all of them; None for random ones
    truth: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.embedding = Kind("embedding.word_embeddings.weight", (8, self.hidden), 0)
        self.before = [self.embedding]
        self.after = [Kind("decoder.final_layernorm.weight", (self.hidden,), fill=1.0)]
        # On another stage than the first, a tied output layer is a copy of the embedding.
        self.after += [] if self.tied and self.pp == 1 else [self.embedding if self.tied else self.output()]
        generator = torch.Generator().manual_seed(self.seed)
        for key, kind, lead in self.tensors():
            master = torch.randn(*lead, *kind.shape, generator=generator)
            if kind.fill is not None:
                master = kind.fill + master * (0.0 if self.exact else 1e-4 if kind.fill else 1e-44)
            moments = (self.random(master.shape, generator) for _ in STATES[1:])
            self.weights[key] = master.bfloat16()
            states = () if kind.frozen else zip(STATES, (master, *moments), strict=True)
            self.truth |= {f"optimizer.state.{state}.{key}": value for state, value in states}

    def random(self, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator)
        return drawn if self.moments is None else torch.full_like(drawn, self.moments)

    def output(self) -> Kind:
        return Kind("output_layer.weight", (8, self.hidden), 0)

    def tensors(self) -> Iterator[tuple[str, Kind, tuple[int, ...]]]:
        yield from ((f"decoder.layers.{kind.key}", kind, (self.layers,)) for kind in self.kinds)
        yield from {kind.key: (kind.key, kind, ()) for kind in (*self.before, *self.after)}.values()

    def parameters(self, stage: int, chunk: int) -> Iterator[Parameter]:
        """The parameters of a stage's chunk of layers, in the order of its modules."""
        each, number = self.layers // (self.pp * self.vpp), chunk * self.pp + stage
        if number == 0:
            yield from (Parameter(kind.key, None, kind) for kind in self.before)
        for layer in range(number * each, (number + 1) * each):
            yield from (Parameter(f"decoder.layers.{kind.key}", layer, kind) for kind in self.kinds)
        if number == self.pp * self.vpp - 1:
            yield from (Parameter(kind.key, None, kind) for kind in self.after)

    def local(self, tensor: torch.Tensor, parameter: Parameter, rank: int) -> torch.Tensor:
        """What a tensor-parallel rank holds of a tensor, flattened."""
        whole, kind = tensor if parameter.layer is None else tensor[parameter.layer], parameter.kind
        if kind.axis is None:
            return whole.reshape(-1)
        halves = whole.chunk(2) if kind.gated else (whole,)
        return torch.cat([half.chunk(self.tp, dim=kind.axis)[rank].reshape(-1) for half in halves])

    def size(self, kind: Kind) -> int:
        return math.prod(kind.shape) // (1 if kind.axis is None else self.tp)

    def shards(self) -> Iterator[st.ShardedTensor]:
        """All tensors that the job stores: the model's pieces, and the optimizer's buckets."""
        for key, kind, lead in self.tensors():
            for layer in range(*lead) if lead else (None,):
                yield from self.pieces(Parameter(key, layer, kind))
        for stage in range(self.pp):
            for rank in range(self.tp):
                yield from self.buckets(stage, rank)

    def pieces(self, parameter: Parameter) -> Iterator[st.ShardedTensor]:
        key, layer, kind = parameter
        weight, layers = self.weights[key], []
        if layer is not None:
            weight, layers = weight[layer], [(0, layer, self.layers)]
        axis, count = (0, 1) if kind.axis is None else (kind.axis, self.tp * (1 + kind.gated))
        for number, part in enumerate(weight.chunk(count, dim=axis)):
            cuts = (*layers, (axis + len(layers), number, count))
            yield st.ShardedTensor.from_rank_offsets(key, part.contiguous(), *cuts, prepend_axis_num=len(layers))

    def buckets(self, stage: int, rank: int) -> Iterator[st.ShardedTensor]:
        group = f"optimizer.distributed.dp_group_idx_{rank + self.tp * stage}"
        for chunk in range(self.vpp):
            for number, bucket in enumerate(self.laid_out(stage, chunk)):
                name = f"{group}.gbuf_idx_{chunk}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}"
                for state in STATES:
                    yield from self.bucket_chunks(f"{name}.{state}", state, bucket, rank)

    def laid_out(self, stage: int, chunk: int) -> list[dict[int, Parameter]]:
        """Each bucket's parameters, by where they begin in it."""
        buckets: list[dict[int, Parameter]] = [{}]
        end = 0
        for parameter in reversed([each for each in self.parameters(stage, chunk) if not each.kind.frozen]):
            if end >= self.bucket_size:
                buckets.append({})
                end = 0
            begin = -(-end // 64) * 64
            buckets[-1][begin] = parameter
            end = begin + self.size(parameter.kind)
        return buckets

    def bucket_chunks(
        self, key: str, state: str, bucket: dict[int, Parameter], rank: int
    ) -> Iterator[st.ShardedTensor]:
        ends = {begin: begin + self.size(parameter.kind) for begin, parameter in bucket.items()}
        length = max(ends.values())
        data = torch.linspace(-9, 9, length) if self.padding is None else torch.full((length,), self.padding)
        for begin, parameter in bucket.items():
            truth = self.truth[f"optimizer.state.{state}.{parameter.key}"]
            data[begin : ends[begin]] = self.local(truth, parameter, rank)
        unit = math.lcm(self.dp, 128)
        slices = range(0, length, -(-length // unit) * unit // self.dp)
        for begin, end in pairwise(sorted({0, length, *ends, *ends.values(), *slices})):
            part = data[begin:end].clone()
            yield st.ShardedTensor(key, part, part.dtype, (end - begin,), (length,), (begin,), None)


def write(job: Job, place: Any) -> None:
    """Save a job's checkpoint, from one process."""
    groups = {"param_groups": [{"lr": 1e-3, "step": 3.0}]}
    objects = [
        st.ShardedObject(f"optimizer.distributed.dp_group_idx_{group}.optimizer", groups, (1,), (0,))
        for group in range(job.tp * job.pp)
    ]
    tree = {"shards": [*job.shards(), *objects], "optimizer": {"param_state_sharding_type": "dp_reshardable"}}
    st.save(tree, place, sharded_strategy=("torch_dist", 1), common_strategy=("torch", 1))
