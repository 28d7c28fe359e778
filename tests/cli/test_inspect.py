"""`shardtree inspect`: its table and its JSON say what is in a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardtree as st
from shardtree.cli import _files
from shardtree.core.trees import match_key
from shardtree.inspection import needed_files
from tests.cli.checkpoints import ROOT, document, process, run, training_state


def test_json_says_what_the_library_says(folder: Path) -> None:
    found = document("inspect", folder)
    metadata = st.load_tensors_metadata(folder)
    assert {row["key"]: (row["dtype"], tuple(row["shape"])) for row in found["tensors"]} == {
        key: (str(shard.dtype).removeprefix("torch."), shard.global_shape) for key, shard in metadata.items()
    }
    for row in found["tensors"]:
        dtype = getattr(torch, row["dtype"])
        assert (row["elements"], row["bytes"]) == (prod(row["shape"]), prod(row["shape"]) * dtype.itemsize)
    assert {row["key"]: row["cut"] for row in found["tensors"]} == {
        "model.bias": {"kind": "whole", "counts": [1], "chunks": 1},
        "model.moment": {"kind": "flat", "counts": [], "chunks": 4},
        "model.uneven": {"kind": "uneven", "counts": [4, 1], "chunks": 4},
        "model.weight": {"kind": "regular", "counts": [2, 2], "chunks": 4},
        "step": {"kind": "whole", "counts": [], "chunks": 1},
    }
    assert [row["unique_key"] for row in found["objects"]] == [
        key for key, item in st.load_sharded_metadata(folder).items() if isinstance(item, st.ShardedObject)
    ]
    assert found["totals"] == {"tensors": 5, "elements": 163, "bytes": 644, "objects": 4}
    files = [path for path in folder.rglob("*") if path.is_file()]
    lengths = sum(path.stat().st_size for path in files)
    assert found["files"] == {"count": len(files), "bytes": lengths, "complete": True, "missing": []}
    assert found["content_metadata"] == {"optimizer": "adam"}
    assert [row["name"] for row in found["common"]] == ["iteration", "args"]
    shown = run("inspect", folder).stdout
    for text in (
        "5 tensors, 163 elements, 644 B",
        "156 float32, 6 bfloat16, 1 int64",
        "1 object in 4 cells",
        "7 files",
    ):
        assert text in shown


def test_json_has_these_names(folder: Path) -> None:
    found = document("inspect", folder)
    names = "checkpoint format save_id content_metadata totals selected files tensors objects common"
    assert list(found) == names.split()
    assert list(found["tensors"][0]) == ["key", "dtype", "shape", "elements", "bytes", "cut", "shape_proven"]
    assert list(found["objects"][0]) == ["key", "unique_key", "shape", "offset", "bytes"]
    assert list(found["common"][0]) == ["name", "type", "value"]


@pytest.mark.parametrize("patterns", [["model.*"], ["*.bias", "step"], ["rng"], ["rng/shard_1.**"], ["**.w*"]])
def test_key_selects_by_the_patterns_of_all_else(folder: Path, patterns: list[str]) -> None:
    found = document("inspect", folder, *(word for pattern in patterns for word in ("--key", pattern)))
    everything = st.load_sharded_metadata(folder)
    expected = {
        name
        for name, shard in everything.items()
        if any(match_key(pattern, each) is not None for pattern in patterns for each in (name, shard.key))
    }
    shown = {row["key"] for row in found["tensors"]} | {row["unique_key"] for row in found["objects"]}
    assert shown == expected
    assert found["selected"]["tensors"] + found["selected"]["objects"] == len(expected)
    assert found["totals"]["tensors"] == 5


def test_a_pattern_that_a_shell_reads_otherwise_gets_a_note(tmp_path: Path) -> None:
    keys = ("h.0.w", "h.0.a.w", "h.0.a.w_sq")
    st.save([st.ShardedTensor.from_rank_offsets(key, torch.zeros(1)) for key in keys], tmp_path)
    for pattern, shown, note in (
        ("h.*.w", ["h.0.w"], "note: --key 'h.*.w' fits 1 key, a shell's 2: write 'h.**.w'; * is one part"),
        ("h.**.w", ["h.0.a.w", "h.0.w"], ""),
        ("**.w*", ["h.0.a.w", "h.0.a.w_sq", "h.0.w"], ""),
    ):
        done = run("inspect", tmp_path, "--key", pattern, "--json")
        assert [row["key"] for row in json.loads(done.stdout)["tensors"]] == shown
        assert done.stderr.startswith(note) and bool(done.stderr) is bool(note)
    lost = run("inspect", tmp_path, "--key", "*.w", "--key", "**.a.v*", "--key", "**.aa.w")
    assert "'*.w' (did you mean '**.w'?)" in lost.stderr and "'**.aa.w' (did you mean '**.a.w'?)" in lost.stderr


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_a_pattern_that_matches_nothing_is_an_error(folder: Path, command: str) -> None:
    folders = [folder] * (2 if command == "diff" else 1)
    done = run(command, *folders, "--key", "rng", "--key", "model.wieght", "--key", "MODEL.*")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"shardtree {command}: --key matches nothing" in done.stderr
    assert "'model.wieght' (did you mean 'model.weight'?)" in done.stderr and "'MODEL.*'" in done.stderr
    assert "'rng'" not in done.stderr


def test_sort_by_bytes_puts_the_largest_first_and_limit_says_what_is_left(folder: Path) -> None:
    done = run("inspect", folder, "--sort", "bytes", "--limit", "2")
    lines = done.stdout.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["model.weight", "model.moment"]
    assert lines[4:] == ["and 3 more"]
    sizes = [row["bytes"] for row in document("inspect", folder, "--sort", "bytes")["tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(document("inspect", folder, "--limit", "2")["tensors"]) == 2


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    st.save({"step": 7}, tmp_path)
    assert "0 tensors, 0 elements, 0 B" in run("inspect", tmp_path).stdout
    assert document("inspect", tmp_path)["common"] == [{"name": "step", "type": "int", "value": "7"}]


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "report", "explain"])
def test_no_checkpoint_is_an_error_without_a_traceback(command: str, folder: Path, tmp_path: Path) -> None:
    done = run(command, *[folder] * (command == "diff"), tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.match(rf"shardtree {command}: \w+: '{tmp_path}' is not a checkpoint\n  found", done.stderr)
    assert run(command).exit_code == 2


@pytest.mark.parametrize("words", [["--sort", "size"], ["--limit", "-1"], ["--limit", "x"], ["--bogus"], ["another"]])
def test_wrong_usage_has_status_2(folder: Path, words: list[str]) -> None:
    assert run("inspect", folder, *words).exit_code == 2


def test_pickled_common_state_is_loaded_only_when_allowed(tmp_path: Path) -> None:
    st.save(
        {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "f": prod},
        tmp_path,
        options=st.SaveOptions(allow_pickle=True),
    )
    refused = run("inspect", tmp_path)
    assert refused.exit_code == 1
    assert "Pass --allow-pickle if you trust its writer." in refused.stderr
    assert "1 tensor, 2 elements" in refused.stdout
    assert document("inspect", tmp_path, status=1)["common"] is None
    allowed = run("inspect", tmp_path, "--allow-pickle")
    assert allowed.exit_code == 0
    assert allowed.stderr.startswith("warning: --allow-pickle")
    assert "builtin_function_or_method" in allowed.stdout


@pytest.mark.slow
def test_an_encoding_without_our_signs_gets_others(folder: Path) -> None:
    done = process("inspect", folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "8 x 16" in done.stdout
    assert done.stdout.isascii()


BUCKETS = ROOT / "tests" / "fixtures" / "megatron_0161_dp_reshardable_tp2dp2" / "checkpoint"


def test_buckets_are_listed_as_they_are_stored_and_no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtree.formats.torch_dist._optimizer.read_bucket", None)
    found = document("inspect", BUCKETS, "--key", "**bucket**", "--key", "decoder.**")
    assert {row["key"] for row in found["tensors"]} >= {"decoder.layers.mlp.linear_fc2.weight"}
    assert not any(row["key"].startswith("optimizer.state.") for row in found["tensors"])
    assert "buckets  " in run("inspect", str(BUCKETS)).stdout


def test_a_pattern_that_means_states_lists_them() -> None:
    found = document("inspect", BUCKETS, "--key", "optimizer.state.exp_avg.**")
    assert all(row["cut"] is not None for row in found["tensors"])
    assert len(found["tensors"]) == 10
    assert "buckets  " not in run("inspect", str(BUCKETS), "--key", "optimizer.state.**").stdout


@pytest.mark.parametrize(
    "name", ["megatron_0161_tp2", "megatron_0140_torch_dist_flat", "megatron_old_zarr", "megatron_main202608_tp2"]
)
def test_every_fixture_is_shown_whole(name: str) -> None:
    folder = ROOT / "tests" / "fixtures" / name
    found = document("inspect", folder)
    metadata = st.load_sharded_metadata(folder)
    assert {row["key"] for row in found["tensors"]} | {row["unique_key"] for row in found["objects"]} == set(metadata)
    assert all(row["cut"] is not None for row in found["tensors"])
    assert found["common"]


# What is missing is named; what is there is whole.


FORMATS = {
    ("safetensors", 1): "**/00001-of-*",
    ("torch_dist", 1): "__1_0.distcp",
    ("dcp", 1): "__1_0.distcp",
    ("zarr", 3): "model.weight/c.1.0",
    ("huggingface", 1): "model.safetensors",
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", FORMATS, ids=str)
@pytest.mark.parametrize("is_cut", [False, True], ids=["gone", "cut"])
def test_a_data_file_that_is_gone_or_cut_is_missing(backend: tuple[str, int], is_cut: bool, tmp_path: Path) -> None:
    def save(world: st.World) -> None:
        tree = training_state(world.rank)
        if backend[0] == "huggingface":
            tree = {key: tree["model"][key] for key in ("weight", "bias", "uneven")}
        st.save(tree, tmp_path, backend, world=world)

    st.simulate(4, save)
    found = document("inspect", tmp_path)
    assert (found["files"]["complete"], found["files"]["missing"]) == (True, [])
    (path,) = tmp_path.glob(FORMATS[backend])
    name = path.relative_to(tmp_path).as_posix()
    data = path.read_bytes()
    path.unlink()
    if is_cut:
        path.write_bytes(data[: len(data) // 2])
    done = run("inspect", tmp_path)
    if backend[0] == "huggingface":  # which has no metadata but the file's own
        assert (done.exit_code, done.stdout) == (2, "")
        return
    assert done.exit_code == 1
    assert f"missing           1 file, or a part: {name}\n" in done.stdout
    found = document("inspect", tmp_path, status=1)
    assert (found["files"]["complete"], found["files"]["missing"]) == (False, [name])


def test_a_common_state_and_a_chunk_without_a_fill_value_can_be_missing(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "tests" / "fixtures" / "megatron_old_zarr", copy)
    assert document("inspect", copy)["files"]["complete"] is True
    (copy / "layer.weight" / "0.0").unlink()
    (copy / "common.pt").unlink()
    files = document("inspect", copy, status=1)["files"]
    assert (files["complete"], files["missing"]) == (False, ["common.pt", "layer.weight/0.0"])


def test_links_as_in_a_cache_are_files_and_manifests_name_some(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    source = ROOT / "tests" / "fixtures" / "megatron_0161_tp2"
    for path in source.iterdir():
        (copy / path.name).symlink_to(path)
    assert document("inspect", copy)["files"]["complete"] is True
    hashes = {"../outside": "0" * 64, "gone": "0" * 64, "common.pt": "0" * 64}
    (copy / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": hashes}))
    done = run("inspect", copy, "--json")
    assert json.loads(done.stdout)["files"]["missing"] == ["../outside", "gone"]


def test_an_incomplete_step_of_a_run_is_marked(tmp_path: Path) -> None:
    series = st.CheckpointSeries(tmp_path)

    def found() -> list[tuple[bool | None, int]]:
        return [(step["complete"], len(step["missing"])) for step in document("inspect", tmp_path)["steps"]]

    for step in range(1, 4):
        series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2))}, step)
    next((tmp_path / "step_00000002").glob("*/00000-of-*")).unlink()
    # Older ones aren't opened.
    assert found() == [(None, 0), (None, 0), (True, 0)]
    next((tmp_path / "step_00000003").glob("*/00000-of-*")).unlink()
    assert found() == [(None, 0), (None, 0), (False, 1)]
    next((tmp_path / "step_00000003").glob("*/index-0*")).unlink()
    assert found() == [(None, 0), (None, 0), (False, 0)]
    shown = run("inspect", tmp_path).stdout
    assert re.search(r"00003 .* newest, incomplete\n", shown) and shown.count("incomplete\n") == 1


def model(folder: Path) -> Path:
    """Write a Hugging Face model of two files with an index, and return the path of the second."""
    folder.mkdir()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for key, name in zip("ab", files, strict=True):
        save_file({key: torch.arange(600.0)}, folder / name)
    listing = {"metadata": {}, "weight_map": dict(zip("ab", files, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
    return folder / files[1]


def test_a_file_that_a_models_index_names_and_that_is_gone_is_missing(tmp_path: Path) -> None:
    path = model(tmp_path / "checkpoint-10")
    assert document("inspect", path.parent)["files"]["complete"] is True
    path.unlink()
    files = document("inspect", path.parent, status=1)["files"]
    assert (files["complete"], files["missing"]) == (False, [path.name])
    [step] = document("inspect", tmp_path)["steps"]
    assert (step["complete"], step["missing"]) == (False, [path.name])


def test_a_folder_of_too_many_files_to_count_is_neither_complete_nor_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "checkpoint-10")
    monkeypatch.setattr(_files, "_MOST", 1)
    # Files that weren't counted aren't asked for one by one.
    monkeypatch.setattr(needed_files, "_length", lambda storage, name: pytest.fail(name))
    assert document("inspect", path.parent)["files"] | {"bytes": 0} == {
        "count": 1,
        "bytes": 0,
        "complete": None,
        "missing": [],
    }
    [step] = document("inspect", tmp_path)["steps"]
    assert step["complete"] is None and "incomplete" not in run("inspect", tmp_path).stdout
