"""A picture of each kind, some with what is hard to draw: long and hostile keys, thousands of ranks, faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

import shardtree as st
from shardtree.core.layouts import tree_columns
from shardtree.layouts import StoredLayout, layout_of, shard_columns
from shardtree.pictures import (
    Picture,
    factory_picture,
    layout_picture,
    lens_picture,
    mesh_picture,
    plan_picture,
    schedule_picture,
    series_picture,
    shard_picture,
    stored_picture,
    trace_picture,
    tree_picture,
)
from shardtree.retention import SavedStep, keep_any, keep_every, keep_last

LONG = "decoder.layers.0." + "very_long_" * 20 + "weight"
HOSTILE = "</svg><script>alert(1)</script>\x00\u202e&'\"漢字漢字 ﷽"


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def laid(shape: tuple[int, ...], mesh: st.Mesh, spec: st.PartitionSpec, key: str = "w") -> st.layouts.ShardColumns:
    return layout_of({key: tensor(*shape)}, mesh, spec, key=lambda path: path[0])


def shards(*places: tuple[int, ...], rows: int = 1, key: str = "w") -> list[st.ShardedTensor]:
    return [st.ShardedTensor.from_rank_offsets(key, tensor(rows, 3), (0, *place)) for place in places]


def flat(*ends: int) -> list[st.ShardedTensor]:
    return [
        st.ShardedTensor.from_rank_offsets_flat("w", tensor(stop - start), (6, 8), flattened_range=slice(start, stop))
        for start, stop in zip((0, *ends), ends, strict=False)
    ]


@cache
def plan(ranks: int) -> st.ReshardPlan:
    model = {"down": tensor(128, 512), LONG: tensor(512, 128)}
    specs = {"down": st.P(None, "tp"), LONG: st.P("tp")}
    before = layout_of(model, st.Mesh(dp=ranks), st.P("dp"))
    return st.plan_reshard(before, layout_of(model, st.Mesh(tp=ranks), specs))


def steps(count: int, **fields: float) -> list[SavedStep]:
    return [
        SavedStep(100 * n, 1.8e9 + 600 * n, {"loss": 3 / n} if fields else {}, pinned=n == 4) for n in range(1, count)
    ]


def held(key: str, rows: int, ranks: int) -> list[st.ShardedTensor]:
    return [st.ShardedTensor.from_rank_offsets(key, tensor(rows, 2), (0, rank, ranks)) for rank in range(ranks)]


def stored(files: int) -> StoredLayout:
    names = tuple(f"save-1/{number:05}-of-{files:05}.safetensors" for number in range(files))
    return StoredLayout(laid((64, 32), st.Mesh(tp=files), st.P("tp")), names)


QKV = {"heads": 4, "query_groups": 2, "head_size": 2, "part": "linear_qkv", "names": ("q_proj", "k_proj", "v_proj")}
SEVERAL = {"up": tensor(512, 128), "down": tensor(128, 512), "norm": tensor(128), LONG: tensor(5120, 128)}


def traced() -> st.Trace:
    """Return what fuses two tensors, one of them with a hostile name, pads them, and casts a third."""

    def load(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        fused = torch.cat([given["w"], given[HOSTILE].t(), torch.zeros(2, 6)])
        return {"fused": fused, LONG: given[LONG].bfloat16()[::2]}

    return st.trace(load, {"w": torch.empty(8, 6), HOSTILE: torch.empty(6, 4), LONG: torch.empty(9)})


KINDS: dict[str, Callable[[], Picture]] = {
    "replicas": lambda: layout_picture(laid((8, 6), st.Mesh(dp=2, tp=4), st.P("tp"))),
    "two axes": lambda: layout_picture(laid((4096, 1024), st.Mesh(dp=2, tp=4), st.P("tp", "dp"), LONG)),
    "one axis": lambda: layout_picture(laid((10,), st.Mesh(tp=4), st.P("tp"))),
    "scalar": lambda: layout_picture(laid((), st.Mesh(tp=4), st.P())),
    "no elements": lambda: layout_picture(laid((0, 4), st.Mesh(tp=4), st.P("tp"))),
    "slices": lambda: layout_picture(laid((4, 8, 6), st.Mesh(pp=2, dp=2, tp=2), st.P("pp", "dp", "tp"))),
    "many slices": lambda: layout_picture(laid((64, 8, 6), st.Mesh(pp=64, dp=2, tp=2), st.P("pp", "dp", "tp"))),
    "uneven": lambda: layout_picture(laid((7, 5), st.Mesh(dp=3, tp=2), st.P("dp", "tp"))),
    "flat ranges": lambda: layout_picture(tree_columns(flat(13, 30, 48))),
    "holes and overlaps": lambda: layout_picture(
        tree_columns([*shards((0, 4), (1, 4), (3, 4)), *shards((0, 2), rows=2)])
    ),
    "a thin hole": lambda: layout_picture(
        tree_columns([*shards((0, 1000), (2, 1000)), *shards(*((n, 1000) for n in range(3, 1000)))])
    ),
    "10,000 rows": lambda: layout_picture(laid((20_000, 64), st.Mesh(tp=10_000), st.P("tp"))),
    "100 by 100": lambda: layout_picture(laid((20_000, 6400), st.Mesh(dp=100, tp=100), st.P("tp", "dp"))),
    "several": lambda: layout_picture(layout_of(SEVERAL, st.Mesh(dp=2, tp=4), st.P("tp"))),
    "hostile key": lambda: layout_picture(laid((8, 6), st.Mesh(tp=2), st.P("tp"), HOSTILE)),
    "mesh": lambda: mesh_picture(st.Mesh(dp=2, tp=4)),
    "mesh and spec": lambda: mesh_picture(st.Mesh(dp=2, tp=4), st.P("tp"), (8, 6)),
    "pipeline": lambda: mesh_picture(st.Mesh(pp=2, dp=2, tp=4), st.P(("dp", "tp"), at={"pp": 1})),
    "mesh of 10,000": lambda: mesh_picture(st.Mesh(dp=100, tp=100), st.P("tp")),
    "gate and up": lambda: lens_picture(st.lenses.gate_and_up(tensor_parallel=2), held("fc1.weight", 8, 2)),
    "fused attention": lambda: lens_picture(st.lenses.attention_qkv(**QKV), held("layers.0.linear_qkv.weight", 8, 2)),
    "padding": lambda: lens_picture(st.lenses.padded_axis(7), held(LONG, 5, 2)),
    "experts": lambda: lens_picture(st.lenses.expert_stack(experts=4, axis=0), held("w", 8, 1)),
    "many runs": lambda: lens_picture(st.lenses.rotary_halves(head_size=4), held("w", 256, 1)),
    "factory": lambda: factory_picture(st.lenses.as_factory(held("w", 4, 1)[0], st.lenses.transposed())),
    "trace": lambda: trace_picture(traced()),
    "plan": lambda: plan_picture(plan(4)),
    "plan of many": lambda: plan_picture(plan(64), LONG),
    "schedule": lambda: schedule_picture(plan(4).schedule(max_bytes_in_flight=60_000)),
    "series": lambda: series_picture(steps(25, loss=1), keep_any(keep_last(3), keep_every(500))),
    "long series": lambda: series_picture(steps(3000), keep_last(2)),
    "one step": lambda: series_picture(steps(2)),
    "a shard": lambda: shard_picture(st.ShardedTensor.from_rank_offsets("w", tensor(2, 3), (0, 1, 4), (1, 0, 2))),
    "a tree": lambda: tree_picture(shard_columns([*shards((1, 4)), *shards((1, 4), key=LONG)])),
    "stored": lambda: stored_picture(stored(4)),
    "stored in many files": lambda: stored_picture(stored(64)),
}


@cache
def picture(name: str) -> Picture:
    return KINDS[name]()
