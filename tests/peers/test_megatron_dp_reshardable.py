"""Megatron-Core resumes its default optimizer format in layouts in which it can't load that itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CorruptCheckpoint
from shardtree.interop.megatron_optimizer import model_space
from tests.formats.test_dp_reshardable_fixture import FOLDER, TRUTH

pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "megatron_optimizer.py"

OTHERS = [
    ('{"tp": 2, "dp": 2}', '{"tp": 4}'),
    ('{"pp": 2, "vpp": 2}', '{"tp": 2}'),
    ('{"dp": 2, "tied": true}', '{"tp": 2, "tied": true}'),
    ('{"dp": 2, "bias": true}', '{"tp": 2, "bias": true}'),
    ('{"tp": 2, "bf16": false}', '{"dp": 2, "bf16": false}'),
    ('{"tp": 2, "mla": true}', '{"pp": 2, "mla": true}'),
]

# As tests/training has it: layouts add in other orders.
TOLERANCE = 1e-5


def run(folder: Path, *jobs: str) -> None:
    """Run the script: a layout and its steps, then another one."""
    run_script(SCRIPT, folder, *jobs)


def run_script(script: Path, folder: Path, *arguments: str, first: str | None = None) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(script), *([first] if first else []), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def states(folder: Path) -> dict[str, torch.Tensor]:
    opened = st.open_checkpoint(folder)
    keys = [key for key in opened if key.startswith("optimizer.state.") and ".step." not in key]
    return {key: opened[key].data.read() for key in keys}


def convert(source: Path, folder: Path, **options: bool) -> None:
    st.convert(source, folder, backend="torch_dist", **model_space(st.open_checkpoint(source), **options))


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() >= right.keys()
    return [key for key, value in right.items() if not torch.equal(left[key], value)]


def test_tensor_parallel_ranks_become_pipeline_stages(tmp_path):
    convert(FOLDER, tmp_path / "full")
    run(tmp_path, '{"pp": 2}', "load:full,save:again")
    assert differing(states(tmp_path / "again"), TRUTH) == []


def test_a_live_optimizer_is_saved_without_a_gather_and_loads_in_another_layout(tmp_path):
    live = '{"dp": 2}', "train:a,save ours:ours,save:theirs"
    run(tmp_path, *live, '{"dp": 2}', "load ours:ours,same:a", '{"tp": 2}', "load ours:ours,save ours:again")
    ours, again = (st.load_plain_tensors(tmp_path / name) for name in ("ours", "again"))
    assert differing(ours, states(tmp_path / "theirs")) == [] == differing(again, ours)


@pytest.mark.parametrize("layout", ['{"tp": 2, "dp": 2, "bias": true}', '{"dp": 4, "bias": true, "gated": false}'])
def test_a_run_at_step_0_opens_as_its_ranks_hold_it(layout, tmp_path):
    run(tmp_path, layout, "begin:a,save:a,save ours:ours")
    assert differing(states(tmp_path / "a"), st.load_plain_tensors(tmp_path / "ours")) == []


def test_what_megatron_core_saved_wrong_is_refused_and_what_it_saved_right_loads(tmp_path):
    one_bucket = '{"dp": 2, "bucket": 1000000}'
    run(tmp_path, '{"dp": 2}', "train:a,save full:wrong", one_bucket, "train:b,save full:right,save:b")
    with pytest.raises(CorruptCheckpoint, match="do not belong to the weights"):
        states(tmp_path / "wrong")
    assert {key for damage in st.verify(tmp_path / "wrong", report=lambda _: None) for key in damage.keys} >= {
        "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight",
        "optimizer.state.param.embedding.word_embeddings.weight",
    }
    assert differing(states(tmp_path / "right"), states(tmp_path / "b")) == []


def test_experts_of_two_ranks_go_on_on_one_and_on_two_again(tmp_path):
    """Without expert parallelism Megatron-Core has one optimizer, and can't load what it saved of two by itself."""
    two, one = '{"dp": 2, "ep": 2, "experts": 4, "layers": 2}', '{"experts": 4, "layers": 2}'
    run(tmp_path, two, "train:a,save:a,save ours:live")
    assert differing(st.load_plain_tensors(tmp_path / "live"), states(tmp_path / "a")) == []
    convert(tmp_path / "a", tmp_path / "one", expert_parallel=False)
    run(tmp_path, one, "load:one,save:b")
    convert(tmp_path / "b", tmp_path / "two", expert_parallel=True)
    convert(tmp_path / "a", tmp_path / "as it was")
    run(tmp_path, two, "load:two,same:a,train:c,load:as it was,same:a")


def losses(file: Path) -> list[float]:
    found: list[float] = json.loads(file.read_text())
    return found


def furthest(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) == 3
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


def with_swapped_moments(tree: dict[str, Any]) -> dict[str, Any]:
    """Plant a fault: the moments of the first two layers' projections in each other's place."""
    key = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight"
    swapped = tree[key].data.read()[[1, 0, 2, 3]]
    return {**tree, key: st.ShardedTensor.from_rank_offsets(key, swapped)}


def test_training_goes_on_with_the_same_losses_in_another_layout(tmp_path):
    shape = '"bf16": false, "lr": 0.01}'
    run(tmp_path, f'{{"tp": 2, "dp": 2, {shape}', "learn:before-0,save:a,learn:on-3")
    convert(tmp_path / "a", tmp_path / "full")
    st.convert(tmp_path / "full", tmp_path / "faulty", backend="torch_dist", transform=with_swapped_moments)
    faulty = f'{{"pp": 2, {shape}', "load:faulty,learn:faulty-3"
    run(tmp_path, f'{{"pp": 2, "dp": 2, {shape}', "load:full,learn:other-3", *faulty)
    expected = losses(tmp_path / "on-3")
    assert (
        furthest(losses(tmp_path / "other-3"), expected) < TOLERANCE < furthest(losses(tmp_path / "faulty-3"), expected)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "other"), OTHERS)
def test_a_trained_optimizer_goes_on_in_any_layout(layout, other, tmp_path):
    run(tmp_path, layout, "train:a,save:a")
    convert(tmp_path / "a", tmp_path / "full")
    run(tmp_path, layout, "load:full,same:a", other, "load:full,save:b")
    assert differing(states(tmp_path / "b"), states(tmp_path / "a")) == []
