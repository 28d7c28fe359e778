"""`shardtree inspect` of a run's steps, of keys as a tree, of the common state, and of one tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardtree as st
from shardtree.cli._contents import TensorRow
from shardtree.cli._output import Output
from shardtree.cli._views import common_rows, key_rows, show_values
from shardtree.storage import MemoryStorage
from tests.cli.checkpoints import document, run, save_training_state
from tests.quick_python.command import quick_python
from tests.s3.environment import ROOT, s3

HOSTILE = "a\x1b[2J\u202e[red]\n.w"


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "--key", "lm_head.weight"],
        ["inspect", "--values", "lm_head.weight[0:2]"],
        ["explain", "--key", "lm_head.weight"],
        ["plan", "--key", "lm_head.weight", "--ranks", "2"],
        ["picture", "lm_head.weight"],
    ],
)
def test_a_tensor_that_an_index_lists_and_no_file_has_is_named_with_the_reason(
    words: list[str], tmp_path: Path
) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "lm_head.weight": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = run(words[0], tmp_path, *words[1:])
    assert (done.exit_code, done.stdout) == (2, "")
    reason = "'lm_head.weight': 'model.safetensors.index.json' lists it, and 'x.safetensors' does not have it"
    assert reason in done.stderr, done.stderr


def saved(root: str) -> st.CheckpointSeries:
    series = st.CheckpointSeries(root)
    for number in (100, 200, 300):
        series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, number, metrics={"loss": 1 / number})
    series.pin(200)
    return series


def test_object_stores_have_steps_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3(monkeypatch):
        series = st.CheckpointSeries(f"{ROOT}/run")
        series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(8.0))}, 5)
        assert [row["folder"] for row in document("inspect", f"{ROOT}/run")["steps"]] == ["step_00000005"]
        assert document("inspect", f"{ROOT}/run/step_00000005", "--values", "w[2:4]")["values"] == [2, 3]
        assert document("explain", f"{ROOT}/run/step_00000005", "--ranks", "2")["ok"] is True


@pytest.mark.parametrize("root", ["run", "memory://inspect-more/run"])
def test_a_run_lists_its_steps(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(root)
    found = document("inspect", root)
    assert [(row["step"], row["pinned"], row["newest"]) for row in found["steps"]] == [
        (100, False, False),
        (200, True, False),
        (300, False, True),
    ]
    assert found["steps"][0]["metrics"] == {"loss": 0.01} and found["steps"][0]["files"] == 5
    lines = run("inspect", root).stdout.splitlines()
    assert lines[2].split() == ["step", "saved", "(UTC)", "size", "loss"]
    assert lines[5].endswith("0.005  pinned") and lines[6].endswith("newest")


def test_steps_of_every_name_and_unfinished_ones_are_shown(tmp_path: Path) -> None:
    for name in ("iter_0000100", "global_step200", "checkpoint-7"):
        save_training_state(tmp_path / name)
    (tmp_path / "iter_0000300").mkdir()
    (tmp_path / "tmp5dik4of3").mkdir()
    found = document("inspect", tmp_path)
    assert [row["folder"] for row in found["steps"]] == ["checkpoint-7", "iter_0000100", "global_step200"]
    assert found["unfinished"] == ["iter_0000300"]


def test_of_a_run_a_step_must_be_named(tmp_path: Path) -> None:
    saved(str(tmp_path))
    done = run("inspect", tmp_path, "--key", "w")
    assert done.exit_code == 2 and f"Inspect one step, such as {tmp_path}/step_00000300." in done.stderr


def test_layers_that_are_alike_are_one_row() -> None:
    rows = [TensorRow(f"layers.{n}.w", "float32", (2, 3 + (n == 4)), 24, None) for n in range(6)]
    labels = [cells[0] for cells in key_rows(rows)]
    assert labels == ["layers", "  0-3", "    w", "  4.w", "  5.w"]


def test_tensors_that_are_numbered_and_alike_are_one_row() -> None:
    rows = key_rows([TensorRow(f"experts.{n}", "float32", (2,), 8, None) for n in range(3)])
    assert rows == [("experts.0-2", "3", "float32", "2", "?", "24 B")]


def test_a_key_may_be_a_leaf_and_a_branch() -> None:
    rows = key_rows([TensorRow(key, "float32", (), 4, None) for key in ("a", "a.b")])
    assert [cells[:2] for cells in rows] == [("a", ""), ("a", "2"), ("  b", "")]


def test_any_number_of_levels_is_shown() -> None:
    assert len(key_rows([TensorRow("a." * 10_000, "float32", (), 4, None)])) < 100
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    assert len(list(common_rows({"deep": deep}))) < 100


def test_the_common_state_is_shown_whole(folder: Path) -> None:
    assert "  betas  " in run("inspect", folder, "--common").stdout
    assert document("inspect", folder, "--common")["common"]["args"] == {"lr": 0.001, "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("index", "expected"),
    [("", (slice(None),)), ("[0:2]", (slice(0, 2),)), ("[3, 8:10]", (3, slice(8, 10))), ("[:, -1]", (slice(None), -1))],
)
def test_values_are_those_that_are_asked_for(folder: Path, index: str, expected: tuple[object, ...]) -> None:
    found = document("inspect", folder, "--values", f"model.weight{index}")
    whole = st.load_plain_tensors(folder)["model.weight"]
    assert found["values"] == whole[expected].tolist() and found["shape"] == list(whole[expected].shape)
    assert "tensor(" in run("inspect", folder, "--values", f"model.weight{index}").stdout


@pytest.mark.parametrize("name", ["bits8", "uint4", "float4_e2m1fn_x2"])
def test_values_that_torch_has_no_numbers_of_are_shown_by_their_bits(name: str, tmp_path: Path) -> None:
    data = torch.tensor([1, 99], dtype=torch.uint8).view(getattr(torch, name))
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", data)}, tmp_path / "saved")
    found = document("inspect", tmp_path / "saved", "--values", "w")
    assert (found["dtype"], found["values"]) == (name, [1, 99])
    assert "99" in run("inspect", tmp_path / "saved", "--values", "w").stdout


def test_only_the_values_that_are_asked_for_are_read() -> None:
    storage, read = MemoryStorage(), list[int]()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(1 << 16, 64))}, storage)
    options = st.LoadOptions(verify=None, progress=read.append)
    show_values(Output(), st.open_checkpoint(storage, options=options), "w[0:4]", as_json=False)
    assert sum(read) == 4 * 64 * 4


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("model.weigth", "Did you mean 'model.weight'?"),
        ("rng", "no tensor 'rng'"),
        ("step[0]", "at most 0"),
        ("model.weight[0, 0, 0]", "too many indices"),
        ("model.weight[99]", "outside of the tensor"),
        ("model.weight[a]", "found 'a'"),
        ("model.weight[]", "is not an index"),
    ],
)
def test_what_cannot_be_shown_of_a_tensor_is_told(folder: Path, typed: str, message: str) -> None:
    done = run("inspect", folder, "--values", typed)
    assert (done.exit_code, done.stdout) == (2, "") and message in done.stderr


def test_more_values_than_anybody_reads_are_refused(tmp_path: Path) -> None:
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(1 << 14, 1 << 11))}, tmp_path)
    assert "Ask for a part: 'w[0:4]'." in run("inspect", tmp_path, "--values", "w").stderr


def test_pieces_are_shown_with_their_files(folder: Path) -> None:
    found = document("inspect", folder, "--layout", "model.moment")
    assert [piece["flat"] for piece in found["pieces"]] == [[0, 4], [4, 8], [8, 12], [12, 16]]
    assert {piece["bytes"] for piece in found["pieces"]} == {16}
    for piece in found["pieces"]:
        data = (folder / piece["file"]).read_bytes()[piece["byte"] :][: piece["bytes"]]
        first = piece["flat"][0] // 4
        assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [first + one for one in range(4)]
    text = run("inspect", folder, "--layout", "model.weight").stdout
    assert "[4:8, 8:16]" in text and text.splitlines()[0].endswith("/")


def test_only_one_view_is_shown_at_a_time(folder: Path) -> None:
    assert run("inspect", folder, "--tree", "--common").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "CKPT"),
        ("inspect", "CKPT", "--tree"),
        ("inspect", "CKPT", "--common"),
        ("inspect", "CKPT", "--values", HOSTILE),
        ("inspect", "CKPT", "--layout", HOSTILE),
        ("explain", "CKPT", "--ranks", "2"),
        ("plan", "CKPT", "--ranks", "2", "--origins"),
        ("inspect", "CKPT", "--values", HOSTILE + "x"),
    ],
)
def test_hostile_names_steer_no_terminal(words: tuple[str, ...], tmp_path: Path) -> None:
    shard = st.ShardedTensor.from_rank_offsets(HOSTILE, torch.ones(4))
    st.save({"w": shard, "c": {HOSTILE: [HOSTILE]}}, tmp_path)
    done = run(*(str(tmp_path) if word == "CKPT" else word for word in words))
    assert done.exit_code in (0, 2) and done.output
    assert not {"\x1b", "\u202e"} & set(done.output)


def test_metrics_and_folders_steer_no_terminal(tmp_path: Path) -> None:
    series = st.CheckpointSeries(tmp_path, "a\x1b[J\u202e{}")
    series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, 1, metrics={"[red]loss": 1.0})
    shown = run("inspect", tmp_path).output
    assert not {"\x1b", "\u202e"} & set(shown) and "[red]loss" in shown


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
@pytest.mark.parametrize(
    ("command", "doing"),
    [
        ("inspect", ["reading what is stored"]),
        ("explain", ["planning the reads of 4 ranks"]),
        ("verify", ["verify"]),
        ("diff", ["reading what is stored", "compare"]),
    ],
)
def test_a_terminal_is_shown_what_goes_on(command: str, doing: list[str], folder: Path) -> None:
    import pty

    terminal, its = pty.openpty()
    job = [*quick_python(), "-m", "shardtree", command, *[str(folder)] * (2 if command == "diff" else 1)]
    with subprocess.Popen(
        job, stdout=subprocess.PIPE, stderr=its, text=True, env={**os.environ, "TERM": "xterm"}
    ) as one:
        os.close(its)
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # its other end is closed
            pass
        assert one.stdout is not None
        told = one.stdout.read()
        assert all(step in shown.decode() and step not in told for step in doing)
    os.close(terminal)


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    save_training_state(tmp_path / "step-1")
    before = document("inspect", str(tmp_path / "step-1"))["files"]
    for name in ("back", "again"):
        (tmp_path / "step-1" / name).symlink_to(".", target_is_directory=True)
    assert document("inspect", str(tmp_path / "step-1"))["files"] == before
