"""A folder that Megatron-FSDP itself wrote, `fsdp_dtensor`, opens bit for bit, and takes the usual names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardtree as st
from tests.formats.test_megatron_optimizer_types import usual_name
from tests.peers.test_megatron_dp_reshardable import run_script

pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "megatron_fsdp.py"


def held(folder: Path, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, list[float]]]:
    """What the ranks had in memory: tensors, whose rows follow one another, and the steps on each rank.

    Torch's Adam counts no step for a parameter of which a rank has no rows.
    """
    own = [torch.load(folder / f"own-{rank}") for rank in range(ranks)]
    whole = {key: torch.cat([each[key] for each in own]) for key, one in own[0].items() if one.dim()}
    return whole, {key: [each[key].item() for each in own] for key in own[0].keys() - whole.keys()}


def test_a_folder_of_megatron_fsdp_opens_bit_for_bit(tmp_path: Path) -> None:
    run_script(SCRIPT, tmp_path, "2")
    (expected, steps), found = held(tmp_path, 2), st.load_plain_tensors(tmp_path / "saved")
    assert found.keys() == expected.keys() | steps.keys() and len(expected) == 3 * len(steps) == 3 * 17
    assert all(found[key].item() in of_ranks for key, of_ranks in steps.items())
    assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []
    st.convert(tmp_path / "saved", tmp_path / "ours", backend="safetensors", transform=st.bind(st.rename, usual_name))
    ours = st.load_plain_tensors(tmp_path / "ours")
    key = "decoder.layers.1.mlp.linear_fc2.weight"
    assert torch.equal(ours[f"optimizer.state.exp_avg.{key}"], expected[f"optimizer.state.module.module.{key}.exp_avg"])
    assert torch.equal(ours[key], expected[f"model.module.{key}"])
    assert {name.count("module.") for name in ours} == {0}
