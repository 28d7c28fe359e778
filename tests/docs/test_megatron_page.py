"""docs/megatron.md: its functions on a real GPT with a distributed optimizer, both ways, in other processes."""

from __future__ import annotations

import pytest

from tests.peers.test_megatron_dp_reshardable import run

pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

OURS_LOAD = "train:a,megatron_saves:m,train:b,shardtree_loads:m,same:a"
THEIRS_LOAD = "shardtree_saves:s,train:c,megatron_loads:s,same:a"


def test_what_either_library_saves_the_other_loads(tmp_path):
    """Three more steps come before each load; after it each process holds what it held when it saved."""
    run(tmp_path, '{"tp": 2, "dp": 2}', f"{OURS_LOAD},{THEIRS_LOAD}")


def test_the_comparison_catches_a_load_that_is_left_out(tmp_path):
    with pytest.raises(AssertionError, match="exit codes"):
        run(tmp_path, '{"layers": 1}', "train:a,megatron_saves:m,train:b,same:a")
