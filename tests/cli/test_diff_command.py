"""`shardtree diff`: its exit status, and what it shows of a difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.checkpoint import compare
from tests.cli.checkpoints import document, run, save_training_state, training_state
from tests.cli.test_verify_command import data_file, flip

Change = Callable[[dict[str, Any], int], None]


def another_value(state: dict[str, Any], rank: int) -> None:
    if rank == 2:
        state["model"]["weight"].data[1, 2] = 4.5


def another_dtype(state: dict[str, Any], rank: int) -> None:
    state["step"] = st.ShardedTensor.from_rank_offsets("step", torch.tensor(7, dtype=torch.int32), replica_id=rank)


def one_key_less(state: dict[str, Any], rank: int) -> None:
    del state["model"]["bias"]


def one_key_more(state: dict[str, Any], rank: int) -> None:
    state["more"] = st.ShardedTensor.from_rank_offsets("more", torch.zeros(3), replica_id=rank)


def another_object(state: dict[str, Any], rank: int) -> None:
    state["rng"].data["seed"] += 10 * (rank == 3)


def another_common_state(state: dict[str, Any], rank: int) -> None:
    state["args"]["lr"] = 0.5


# What is found, and whether structure alone shows it.
CHANGES: dict[Change, tuple[str, bool]] = {
    another_value: ("model.weight 1 128 2.5 (1, 10) 2 4.5", False),
    another_dtype: ("step int64 () int32 ()", True),
    one_key_less: ("model.bias bfloat16 (6,)", True),
    one_key_more: ("more float32 (3,)", True),
    another_object: ("rng/shard_1.1_2.2['seed'] 3 13", False),
    another_common_state: ("common['args']['lr'] 0.001 0.5", False),
}


def save_changed(folder: Path, change: Change) -> Path:
    def save(world: st.World) -> None:
        state = training_state(world.rank)
        change(state, world.rank)
        st.save(state, folder, world=world, content_metadata={"optimizer": "adam"})

    st.simulate(4, save)
    return folder


def test_equal_checkpoints_have_status_0(folder: Path, tmp_path: Path) -> None:
    save_training_state(tmp_path)
    done = run("diff", folder, tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")
    words = "are equal, bit for bit: 5 tensors, 644 B, 4 objects, the common state\n"
    assert done.stdout == f"✓ {folder} and {tmp_path} {words}"
    found = document("diff", folder, tmp_path)
    assert (found["equal"], found["bytes_compared"]) == (True, 644)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_difference_is_shown_has_status_1_and_is_the_librarys(folder: Path, tmp_path: Path, change: Change) -> None:
    other = save_changed(tmp_path / "changed", change)
    words, is_structure = CHANGES[change]
    done = run("diff", folder, other)
    assert (done.exit_code, done.stderr) == (1, "")
    assert words in [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"✗ {folder} and {other} differ: " in done.stdout
    assert run("diff", folder, other, "--structure-only").exit_code == int(is_structure)
    assert run("diff", folder, other, "--key", "model.uneven").exit_code == 0
    found, expected = document("diff", folder, other, status=1), compare(folder, other)
    names = "left right equal bytes_compared only_left only_right kinds values objects common"
    assert list(found) == names.split()
    assert found["equal"] is False
    assert found["bytes_compared"] == expected.nbytes
    assert (found["only_left"], found["only_right"]) == (list(expected.only_left), list(expected.only_right))
    assert [one["key"] for one in found["kinds"]] == [one.key for one in expected.kinds]
    assert [(one["key"], one["count"], one["first"]) for one in found["values"]] == [
        (one.key, one.count, list(one.first)) for one in expected.values
    ]
    assert [one["unique_key"] for one in found["objects"]] == list(expected.objects)
    assert len(found["common"]["mismatch"]) == len(expected.common.mismatch)


def test_key_compares_those_keys_and_no_common_state(folder: Path, tmp_path: Path) -> None:
    def all_of_them(state: dict[str, Any], rank: int) -> None:
        for change in CHANGES:
            change(state, rank)

    other = save_changed(tmp_path / "changed", all_of_them)
    found = document("diff", folder, other, "--key", "model.w*", "--key", "rng", status=1)
    assert [one["key"] for one in found["values"]] == ["model.weight"]
    assert [one["unique_key"] for one in found["objects"]] == ["rng/shard_1.1_2.2"]
    assert (found["only_left"], found["only_right"], found["kinds"]) == ([], [], [])
    assert found["common"] == {"only_left": [], "only_right": [], "mismatch": []}
    everything = document("diff", folder, other, status=1)
    assert (everything["only_left"], everything["only_right"]) == (["model.bias"], ["more"])


def test_a_tensor_and_an_object_of_one_name_differ(tmp_path: Path) -> None:
    name = "rng/shard_0_1"
    st.save([st.ShardedTensor.from_rank_offsets(name, torch.zeros(1))], tmp_path / "a")
    st.save([st.ShardedObject("rng", 0, (1,), (0,))], tmp_path / "b")
    for words in ((), ("--structure-only",)):
        found = document("diff", tmp_path / "a", tmp_path / "b", *words, status=1)
        assert (found["only_left"], found["only_right"]) == ([name], [name])


def test_damage_is_trouble_not_a_difference(folder: Path, tmp_path: Path) -> None:
    save_training_state(tmp_path)
    path = data_file(tmp_path)
    flip(path, -1)
    done = run("diff", folder, tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert path.name in done.stderr
