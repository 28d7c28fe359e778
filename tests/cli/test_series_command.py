"""`shardtree series`: the library's listing, pins, removals and clean-up, typed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import typer

import shardtree as st
from shardtree.cli._names import seconds_named
from shardtree.cli._prune import Kept, policy_of
from shardtree.retention import SavedStep, keep_best, keep_for, keep_steps
from tests.cli.checkpoints import document, run
from tests.quick_python.command import quick_python
from tests.s3.environment import ROOT, s3


def saved(root: str | Path, *numbers: int, names: str = "step_{:08d}") -> st.CheckpointSeries:
    series = st.CheckpointSeries(root, names)
    for number in numbers:
        tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        series.save(tree, number, metrics={"loss": 1 / number, "accuracy": number / 1000})
    return series


def numbers(root: str | Path, names: str = "step_{:08d}") -> list[int]:
    return [step.number for step in st.CheckpointSeries(root, names).steps()]


@pytest.fixture
def root(tmp_path: Path) -> str:
    saved(tmp_path / "run", 100, 200, 300, 400)
    return str(tmp_path / "run")


def test_the_list_is_that_of_inspect(root: str) -> None:
    assert document("series", "list", root) == document("inspect", root)
    assert run("series", "list", root, "--limit", "2").stdout == run("inspect", root, "--limit", "2").stdout


def test_the_newest_is_a_path_that_other_commands_take(root: str) -> None:
    done = run("series", "latest", root)
    assert (done.exit_code, done.stdout) == (0, f"{root}/step_00000400\n")
    assert run("verify", done.stdout.strip()).exit_code == 0
    found = document("series", "latest", f"{root}/")
    assert found["path"] == f"{root}/step_00000400" and found["step"]["metrics"]["loss"] == 1 / 400


def test_a_damaged_step_is_passed_over_if_asked(root: str) -> None:
    (file,) = Path(root, "step_00000400").glob("save-*/00000-of-00001.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert run("series", "latest", root).stdout.endswith("400\n")
    assert run("series", "latest", root, "--verified").stdout.endswith("300\n")


@pytest.mark.parametrize("folder", ["never", "empty"])
def test_no_step_is_an_answer_of_latest_and_trouble_for_others(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    where = tmp_path / folder
    done = run("series", "latest", where)
    assert (done.exit_code, done.stdout) == (1, "") and "no finished step under" in done.stderr
    assert document("series", "latest", where, status=1) == {"root": str(where), "path": None, "step": None}
    for words in (["list"], ["pin", "1"], ["prune", "--keep-last", "1"], ["clean"]):
        done = run("series", words[0], where, *words[1:])
        assert done.exit_code == 2 and f"shardtree series {words[0]}: no finished step under" in done.stderr


def test_pins_are_set_and_taken_back_all_or_none(root: str) -> None:
    assert run("series", "pin", root, "200", "100").stdout == "pinned: step_00000200, step_00000100\n"
    assert [step.pinned for step in st.CheckpointSeries(root).steps()] == [True, True, False, False]
    assert [step["pinned"] for step in document("series", "unpin", root, "200")["steps"]] == [False]
    done = run("series", "pin", root, "300", "500")
    assert done.exit_code == 2 and "shardtree series pin: no step 500 under" in done.stderr
    assert [step.pinned for step in st.CheckpointSeries(root).steps()] == [True, False, False, False]


def test_a_prune_shows_the_librarys_plan_and_changes_nothing(root: str) -> None:
    plan = st.CheckpointSeries(root).plan_removal(st.retention.keep_any(st.retention.keep_last(2)))
    done = run("series", "prune", root, "--keep-last", "2")
    assert done.exit_code == 0
    assert done.stdout == f"{plan}\nnothing was removed: --yes removes what goes\n"
    found = document("series", "prune", root, "--keep-last", "2")
    assert found["bytes"] == plan.nbytes and found["removed"] == []
    assert [(row["step"], row["goes"]) for row in found["steps"]] == [
        (100, True),
        (200, True),
        (300, False),
        (400, False),
    ]
    assert found["steps"][3]["kept_by"] == ["the newest", "keep_last(2)"]
    assert numbers(root) == [100, 200, 300, 400]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_prune_that_is_said_yes_to_removes_what_it_showed(root: str, as_json: bool) -> None:
    Path(root, "step_00000200", "notes.txt").write_text("mine")
    run("series", "pin", root, "300")
    if as_json:
        assert document("series", "prune", root, "--keep-last", "1", "--yes")["removed"] == [100, 200]
    else:
        done = run("series", "prune", root, "--keep-last", "1", "--yes")
        assert done.exit_code == 0 and done.stdout.splitlines()[-1].startswith("removed: 2 steps, ")
    assert numbers(root) == [300, 400]
    assert Path(root, "step_00000200", "notes.txt").read_text() == "mine"


def test_a_step_that_should_go_and_stays_has_status_1(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = st.CheckpointSeries.remove

    def pinned_meanwhile(series: st.CheckpointSeries, plan: object) -> tuple[int, ...]:
        series.pin(100)
        return remove(series, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(st.CheckpointSeries, "remove", pinned_meanwhile)
    assert run("series", "prune", root, "--keep-last", "3", "--yes").exit_code == 1
    assert numbers(root) == [100, 200, 300, 400]


def test_a_step_that_is_being_saved_stays_with_status_1(tmp_path: Path) -> None:
    series = st.CheckpointSeries(tmp_path)
    for number in (1, 2, 3):
        series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, number)
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
    request = series.save(tree, 1, overwrite=True, async_sharded_save=True)
    done = run("series", "prune", str(tmp_path), "--keep-last", "1", "--yes")
    assert done.exit_code == 1 and "cannot be removed: a save to it is in progress" in done.stdout
    assert numbers(str(tmp_path)) == [1, 3]
    request.abandon()


def test_a_policy_that_returns_no_numbers_is_told(root: str, tmp_path: Path) -> None:
    file = tmp_path / "policies.py"
    file.write_text("def steps(steps):\n    return steps[-1:]\ndef nothing(steps):\n    return None\n")
    for name in ("steps", "nothing"):
        done = run("series", "prune", root, "--policy", f"{file}:{name}", "--yes")
        assert done.exit_code == 2 and "invalid policy" in done.stderr
    assert numbers(root) == [100, 200, 300, 400]


def test_names_without_a_finished_step_are_no_success(root: str) -> None:
    for names in ("bogus_{}", "step_x{}"):
        assert run("series", "prune", root, "--names", names, "--keep-last", "1", "--yes").exit_code == 2


def test_folders_named_like_steps_without_one_are_an_empty_run(tmp_path: Path) -> None:
    (tmp_path / "log_1").mkdir()
    (tmp_path / "step_1").mkdir()
    done = run("series", "latest", str(tmp_path))
    assert done.exit_code == 1 and "no finished step" in done.stderr


def test_two_folders_of_one_number_are_refused_unless_named(tmp_path: Path) -> None:
    series = st.CheckpointSeries(tmp_path)
    series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_1")
    done = run("series", "pin", str(tmp_path), "1")
    assert done.exit_code == 2 and "step_00000001, step_1" in done.stderr
    assert run("series", "pin", str(tmp_path), "1", "--names", "step_{:08d}").exit_code == 0
    assert series.steps()[0].pinned


def test_every_policy_of_the_library_can_be_typed(root: str, tmp_path: Path) -> None:
    file = tmp_path / "policies.py"
    file.write_text("def second(steps):\n    return [steps[1].number]\n")
    typed = {
        "--keep-last": ("0", [400]),
        "--keep-every": ("300", [300, 400]),
        "--keep-for": ("1w", [100, 200, 300, 400]),
        "--keep-every-seconds": ("1h", [100, 400]),
        "--keep-best": ("2:loss", [300, 400]),
        "--keep-step": ("100", [100, 400]),
        "--policy": (f"{file}:second", [200, 400]),
    }
    for option, (value, expected) in typed.items():
        rows = document("series", "prune", root, option, value)["steps"]
        assert [row["step"] for row in rows if not row["goes"]] == expected, option
    both = document(
        "series", "prune", root, "--keep-step", "100", "--keep-step", "200", "--keep-best", "1:accuracy:max"
    )
    assert [row["kept_by"] for row in both["steps"]] == [
        ["keep_steps([100, 200])"],
        ["keep_steps([100, 200])"],
        [],
        ["the newest", "keep_best(1, 'accuracy', mode='max')"],
    ]


def test_options_are_policies_by_their_names() -> None:
    listing = [SavedStep(1, metrics={"a:max": 1.0})]
    kept = Kept(seconds=60.0, best=["2:a:max:max", "1:a:max:max"], steps=[7])
    members = [keep_for(60.0), keep_best(2, "a:max", mode="max"), keep_best(1, "a:max", mode="max"), keep_steps([7])]
    assert list(policy_of(kept, listing).members) == members
    assert [seconds_named(text) for text in ("0", "1.5 h", "2D", "3w", "4m", "5s")] == [
        0,
        5400,
        172800,
        1814400,
        240,
        5,
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say which steps stay"),
        (["--keep-best", "loss"], "'loss' is not N:METRIC"),
        (["--keep-best", "1:"], "'1:' is not N:METRIC"),
        (["--keep-best", "1:lss"], "no step has a metric 'lss'. Did you mean 'loss'?"),
        (["--keep-for", "a week"], "'a week' is not a length of time"),
        (["--policy", "no.py:f"], "there is no file 'no.py'"),
        (["--keep-last", "-1"], "Invalid value for '--keep-last'"),
    ],
)
def test_what_is_no_policy_is_wrong_usage(root: str, words: list[str], message: str) -> None:
    done = run("series", "prune", root, "--yes", *words)
    assert done.exit_code == 2 and message in " ".join(done.stderr.split())
    assert numbers(root) == [100, 200, 300, 400]


def test_what_a_policy_raises_is_text(root: str, tmp_path: Path) -> None:
    file = tmp_path / "policies.py"
    file.write_text("def broken(steps):\n    return 1 / 0\n")
    done = run("series", "prune", root, "--policy", f"{file}:broken", "--yes")
    assert done.exit_code == 2 and "line 2: ZeroDivisionError" in done.stderr
    assert numbers(root) == [100, 200, 300, 400]


def test_steps_of_several_names_are_several_series(root: str) -> None:
    saved(root, 500, 600, names="iter_{:07d}")
    Path(root, "log_1").mkdir()
    assert [row["step"] for row in document("series", "list", root)["steps"]] == [100, 200, 300, 400, 500, 600]
    done = run("series", "prune", root, "--keep-last", "1", "--yes")
    assert done.exit_code == 2 and "several series" in done.stderr and "--names 'iter_{}'" in done.stderr
    only = ("--names", "iter_{:07d}")
    assert run("series", "latest", root, *only).stdout == f"{root}/iter_0000600\n"
    assert document("series", "list", root, *only)["unfinished"] == []
    assert document("series", "prune", root, "--keep-last", "1", "--yes", *only)["removed"] == [500]
    assert numbers(root) == [100, 200, 300, 400]


def test_a_folder_that_is_no_checkpoint_makes_no_other_series(root: str) -> None:
    Path(root, "log_1").mkdir()
    assert document("series", "prune", root, "--keep-last", "1", "--yes")["removed"] == [100, 200, 300]


KILLED = """
import os, sys, torch, shardtree as st
series = st.CheckpointSeries(sys.argv[1])
request = series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, 500, async_sharded_save=True)
request.async_fn()
os._exit(9)
"""


@pytest.mark.slow
def test_what_a_killed_save_left_is_removed(root: str) -> None:
    done = subprocess.run([*quick_python(), "-c", KILLED, root], check=False, timeout=600)
    assert done.returncode == 9 and os.listdir(Path(root, "step_00000500"))
    Path(root, "step_00000600").mkdir()
    Path(root, "step_00000600", "notes.txt").write_text("mine")
    found = document("series", "clean", root, status=1)
    assert found == {"root": root, "removed": ["step_00000500"], "left": ["step_00000600"]}
    assert Path(root, "step_00000600", "notes.txt").exists() and numbers(root) == [100, 200, 300, 400]
    Path(root, "step_00000600", "notes.txt").unlink()
    done2 = run("series", "clean", root)
    assert (done2.exit_code, done2.stdout) == (0, "removed: step_00000600\n")
    assert run("series", "clean", root).stdout == "nothing was left of killed saves\n"


@pytest.mark.parametrize("root", ["memory://series-command/run", f"{ROOT}/pruned"])
def test_behind_urls_too(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3(monkeypatch):
        saved(root, 100, 200, 300)
        assert document("series", "latest", root)["path"] == f"{root}/step_00000300"
        assert run("series", "pin", root, "100").exit_code == 0
        assert document("series", "prune", root, "--keep-last", "1", "--yes")["removed"] == [200]
        assert [row["pinned"] for row in document("series", "list", root)["steps"]] == [True, False]
        assert run("series", "clean", root).exit_code == 0


def test_a_name_of_a_metric_that_nobody_has_measured_yet_is_no_mistake() -> None:
    assert policy_of(Kept(best=["1:loss"]), [SavedStep(1)])([SavedStep(1)]) == {1}
    with pytest.raises(typer.BadParameter, match="no step has a metric"):
        policy_of(Kept(best=["1:loss"]), [SavedStep(1, metrics={"accuracy": 1.0})])
