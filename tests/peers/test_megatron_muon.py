"""Muon of Megatron-Core, each rank with all of it or with some layers: saved by either, loaded by either elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardtree as st
from tests.peers.megatron_versions import INSTALLED
from tests.peers.test_megatron_dp_reshardable import convert, run_script

pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytest.importorskip("emerging_optimizers")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(INSTALLED < (0, 17), reason="0.16 takes an emerging_optimizers that is not on PyPI"),
]

SCRIPT = Path(__file__).parent / "scripts" / "megatron_muon.py"
# Buckets that end without padding: else Megatron-Core writes fully_reshardable wrong.
SMALL = '"layers": 2, "bucket": 1000000}'
HOWS = ["whole", "layers", *(["fully_reshardable"] if INSTALLED >= (0, 18) else [])]


def differing(folder: Path, others: list[str], expected: str) -> dict[str, list[str]]:
    """Return the keys that some folders lack or hold with other values, by folder."""
    right = st.load_plain_tensors(folder / expected)
    found = {}
    for name in others:
        tensors = st.load_plain_tensors(folder / name)
        unequal = [key for key in right.keys() & tensors.keys() if not torch.equal(right[key], tensors[key])]
        found[name] = [*sorted(right.keys() ^ tensors.keys()), *unequal]
    return {name: keys for name, keys in found.items() if keys}


@pytest.mark.parametrize("how", HOWS)
def test_either_goes_on_with_what_the_other_saved_in_another_layout(how: str, tmp_path: Path) -> None:
    both = f'{{"tp": 2, "dp": 2, {SMALL}', "train:a,megatron_saves:theirs,shardtree_saves:ours"
    staged = f'{{"pp": 2, "dp": 2, {SMALL}', "train:x,megatron_loads:ours,megatron_saves:b"
    run_script(
        SCRIPT, tmp_path, *both, *staged, f"{{{SMALL}", "train:x,shardtree_loads:theirs,megatron_saves:c", first=how
    )
    assert differing(tmp_path, ["ours", "b", "c"], "theirs") == {}
    assert "optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc2.weight" in st.open_checkpoint(tmp_path / "c")
    assert st.verify(tmp_path / "theirs", report=lambda _: None) == ()


@pytest.mark.skipif(INSTALLED < (0, 18), reason="until 0.17 no distributed Adam stands beside it")
def test_what_is_converted_goes_on_in_another_layout(tmp_path: Path) -> None:
    shape = f'{{"tp": 2, "dp": 2, {SMALL}'
    run_script(SCRIPT, tmp_path, shape, "train:a,megatron_saves:buckets", first="dp_reshardable")
    convert(tmp_path / "buckets", tmp_path / "full")
    staged = f'{{"pp": 2, {SMALL}', "train:x,megatron_loads:full,megatron_saves:again"
    run_script(SCRIPT, tmp_path, shape, "train:b,megatron_saves:theirs", *staged, first="fully_reshardable")
    assert differing(tmp_path, ["full", "again"], "theirs") == {}
    assert st.load_common_state_dict(tmp_path / "full") == st.load_common_state_dict(tmp_path / "theirs")
