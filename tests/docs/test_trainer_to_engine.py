"""docs/trainer-to-engine.md: its code, in four processes and on what Megatron-Core wrote, gives what torch says."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.live import run_processes
from shardtree.testing import first_difference
from shardtree.world import World
from tests.docs.test_blocks import ROOT, fences

CODE = [
    code for _, language, code in fences((ROOT / "docs" / "trainer-to-engine.md").read_text()) if language == "python"
]
FIXTURE = ROOT / "tests" / "fixtures" / "megatron_0161_tp2"
Weights = dict[str, torch.Tensor]


def page(right: str = "", wrong: str = "") -> dict[str, Any]:
    """Return the names that the page makes, with a fault, without what runs on simulated ranks."""
    code = CODE[1] + CODE[2].partition("\ntrained = ")[0] + CODE[4].partition("\nplan = ")[0]
    assert right in code
    names: dict[str, Any] = {"torch": torch, "st": st}
    exec(code.replace(right, wrong) if right else code, names)
    return names


def served_by_torch(names: dict[str, Any], rank: int) -> Weights:
    """Return what an engine's rank must hold, cut by hand from what the trainers' first two ranks hold."""
    left, right = names["trainer_weights"](0), names["trainer_weights"](1)
    groups, size, hidden = (names[name] for name in ("GROUPS", "SIZE", "HIDDEN"))

    def whole(key: str, dim: int = 0) -> torch.Tensor:
        return torch.cat([left[key], right[key]], dim)

    def mine(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(4, dim)[rank]

    found = {"model.embed_tokens.weight": mine(whole("embedding.word_embeddings.weight"))}
    found["model.norm.weight"] = left["decoder.final_layernorm.weight"]
    for n in range(names["LAYERS"]):
        old, new = f"decoder.layers.{n}.", f"model.layers.{n}."
        qkv = whole(f"{old}self_attention.linear_qkv.weight").view(groups, 4, size, hidden)
        gate, up = torch.cat([half[f"{old}mlp.linear_fc1.weight"].view(2, -1, hidden) for half in (left, right)], 1)
        parts = [qkv[:, :2], qkv[:, 2], qkv[:, 3]]
        found |= {
            f"{new}input_layernorm.weight": left[f"{old}self_attention.linear_qkv.layer_norm_weight"],
            f"{new}self_attn.qkv_proj.weight": torch.cat([mine(part.reshape(-1, hidden)) for part in parts]),
            f"{new}self_attn.o_proj.weight": mine(whole(f"{old}self_attention.linear_proj.weight", 1), 1),
            f"{new}mlp.gate_up_proj.weight": torch.cat([mine(gate), mine(up)]),
            f"{new}mlp.down_proj.weight": mine(whole(f"{old}mlp.linear_fc2.weight", 1), 1),
        }
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def updates_an_engine(world: World, right: str = "", wrong: str = "") -> list[str]:
    """Run the page's update twice, the second time by a plan, and return the names of what differs."""
    names = page(right, wrong)
    trained, served = names["trainer_weights"](world.rank), names["engine_weights"](world.rank)
    places = {name: tensor.data_ptr() for name, tensor in served.items()}
    source, target = names["trainer_tree"](trained, world.rank), names["engine_tree"](served, world.rank)
    names["update"](source, target, world)
    expected = served_by_torch(page(), world.rank)
    differ = [name for name, tensor in expected.items() if first_difference(served[name], tensor) is not None]
    for tensor in trained.values():
        tensor.mul_(2)
    names["update"](source, target, world, plan=names["plan_update"](trained, served))
    for name, tensor in expected.items():
        assert name in differ or torch.equal(served[name], 2 * tensor), name
    assert {name: tensor.data_ptr() for name, tensor in served.items()} == places
    return differ


@pytest.mark.slow
@pytest.mark.torchrun
def test_four_processes_update_an_engine_as_torch_says() -> None:
    assert run_processes(4, updates_an_engine, timeout=300) == [[], [], [], []]


FAULTS = {
    "QKV as it is held": (
        'held="concatenated", tensor_parallel=4, stored="interleaved"',
        'held="interleaved", stored="interleaved"',
    ),
    "another order of ranks": ("st.Mesh(dp=2, tp=2)", "st.Mesh(tp=2, dp=2)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches(fault: str) -> None:
    assert any(st.simulate(4, partial(updates_an_engine, right=FAULTS[fault][0], wrong=FAULTS[fault][1])))


def test_simulated_ranks_do_the_same() -> None:
    assert st.simulate(4, updates_an_engine) == [[], [], [], []]


def value(key: str, *shape: int) -> torch.Tensor:
    """Return what the fixture's tensor of this key holds."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251 + zlib.crc32(key.encode()) % 97).reshape(shape).bfloat16()


def from_megatron(world: World, lens: Any) -> list[str]:
    """Load one layer of what Megatron-Core wrote into an engine's fused tensors, and return the names that differ."""
    qkv, fc1 = "decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.mlp.linear_fc1.weight"
    held = {"qkv": torch.zeros(12, 16, dtype=torch.bfloat16), "gate_up": torch.zeros(16, 16, dtype=torch.bfloat16)}
    tree = st.from_local(held, st.Mesh(tp=4), st.PartitionSpec("tp"), world.rank)
    tree = st.rename(tree, {"qkv": qkv.replace("layers", "layers.2"), "gate_up": fc1.replace("layers", "layers.2")})
    target = st.lenses.factories_by_pattern(tree, {"**.linear_qkv.weight": lens[0], "**.linear_fc1.weight": lens[1]})
    loaded = st.load(target, FIXTURE, cast=True, world=world, validate_access_integrity=False)
    groups = value(qkv, 4, 48, 16)[2].view(4, 3, 4, 16)
    gate, up = value(fc1, 4, 64, 16)[2].chunk(2)
    expected = {
        "qkv": groups[world.rank].reshape(12, 16),
        "gate_up": torch.cat([gate.chunk(4)[world.rank], up.chunk(4)[world.rank]]),
    }
    return [name for name, tensor in expected.items() if not torch.equal(loaded[name], tensor)]


def test_what_megatron_core_wrote_loads_by_such_a_target() -> None:
    stacked = st.lenses.stacked_layers("decoder.layers", 4)
    form: Any = {"held": "concatenated", "tensor_parallel": 4, "stored": "interleaved"}
    qkv = st.lenses.compose(st.lenses.attention_qkv(heads=4, head_size=4, **form), stacked)
    fc1 = st.lenses.compose(st.lenses.gate_and_up(tensor_parallel=4), stacked)
    assert st.simulate(4, partial(from_megatron, lens=(qkv, fc1))) == [[]] * 4
    assert st.simulate(4, partial(from_megatron, lens=(qkv, stacked))) == [["gate_up"]] * 4
