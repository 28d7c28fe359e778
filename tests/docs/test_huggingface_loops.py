"""The scripts, changes and claims of the sections about transformers' Trainer and Accelerate."""

from __future__ import annotations

import inspect
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

import shardtree as st
from shardtree.errors import NotACheckpoint
from tests.docs.test_blocks import fences
from tests.docs.test_fsdp2 import ROOT, SCRIPTS, finished, killed, resumed, start

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao, which this imports, has invalid escapes, told when it is compiled
    import transformers
    from transformers.trainer import Trainer
    from transformers.trainer_callback import CallbackHandler

pytestmark = [pytest.mark.torchrun, pytest.mark.peers]

PAGE = ROOT / "docs" / "in-your-trainer.md"
FSDP2 = str(Path(__file__).with_name("fsdp2_on_cpu.py"))


@pytest.mark.parametrize("script", ["train_trainer.py", "train_accelerate.py"])
def test_the_change_is_at_most_five_lines_of_the_script(script: str) -> None:
    lines = (SCRIPTS / script).read_text().splitlines()
    changes = [code for _, language, code in fences(PAGE.read_text()) if language == "diff"]
    added = [[line[1:] for line in change.splitlines() if line.startswith("+")] for change in changes]
    assert sum(0 < len(new) <= 5 and {*new} <= {*lines} for new in added) == 1


def test_the_page_names_the_versions_that_are_tested() -> None:
    assert f"transformers {transformers.__version__}, accelerate {accelerate.__version__}" in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_trainer.py", "train_accelerate.py", FSDP2], ids=lambda path: Path(path).stem)
def test_a_killed_run_goes_on_on_three_processes(script: str, tmp_path: Path) -> None:
    before = killed(start(script, 2, tmp_path, 100_000), tmp_path)
    after = resumed(script, 3, tmp_path, before)
    assert after == {step: pytest.approx(before[step], rel=1e-4) for step in after}
    found = [path for path in tmp_path.iterdir() if st.is_checkpoint(path)]
    assert found and all(st.verify(path) == () for path in found)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_trainer.py", "train_accelerate.py"])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(script: str, tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    before, output = finished(start(script, 2, whole, 14, DROPOUT="0.2"))
    assert len(before) == 14, output
    shutil.copytree(whole, again)
    shutil.rmtree(again / "step_00000012")
    after = resumed(script, 2, again, before, DROPOUT="0.2")
    assert after == {step: before[step] for step in range(9, 15)}
    ours, theirs = (st.load_plain_tensors(folder / "step_00000012") for folder in (whole, again))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


# What Trainer and Accelerate themselves have written


@pytest.mark.slow
def test_accelerates_sharded_folders_have_the_keys_of_the_checkpoint(tmp_path: Path) -> None:
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    losses, output = finished(start(FSDP2, 2, run, 4, FOLDER=str(theirs)))
    assert len(losses) == 4, output
    ours = st.load_plain_tensors(run / "step_00000004")
    read = st.load_plain_tensors(theirs / "pytorch_model_fsdp_0") | st.load_plain_tensors(theirs / "optimizer_0")
    assert read.keys() == ours.keys() and all(torch.equal(read[key], ours[key]) for key in ours)
    groups = st.load_common_state_dict(theirs / "optimizer_0")["optimizer"]["param_groups"]
    assert groups == st.load_common_state_dict(run / "step_00000004")["optimizer"]["param_groups"]
    for pickled in ("scheduler.bin", "random_states_0.pkl"):
        with pytest.raises(NotACheckpoint, match=r"read it with torch\.load"):
            st.open_checkpoint(theirs / pickled)


@pytest.mark.slow
def test_trainer_goes_back_to_its_own_folders_and_changes_over_again(tmp_path: Path) -> None:
    path = f"{ROOT}{os.pathsep}{SCRIPTS}"
    run, script = tmp_path / "run", tmp_path / "script.py"
    assert max(finished(start("train_trainer.py", 1, run, 8))[0]) == 8
    text = (SCRIPTS / "train_trainer.py").read_text()
    script.write_text(text.replace('save_strategy="no"', 'save_strategy="steps", save_steps=6'))
    losses, output = finished(start(str(script), 1, run, 12, PYTHONPATH=path))
    assert list(losses) == [9, 10, 11, 12], output
    folder = run / "trainer" / "checkpoint-12"
    state = transformers.TrainerState.load_from_json(folder / "trainer_state.json")
    assert [entry["step"] for entry in state.log_history if "loss" in entry] == [*range(1, 13)]
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    assert {int(entry["step"]) for entry in optimizer["state"].values()} == {12}
    ours, theirs = st.load_plain_tensors(run / "step_00000012"), st.load_plain_tensors(folder)
    assert theirs and all(torch.equal(value, ours[f"model.{key}"]) for key, value in theirs.items())
    for pickled in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        with pytest.raises(NotACheckpoint, match=r"read it with torch\.load"):
            st.open_checkpoint(folder / pickled)
    script.write_text(text.replace("resume_from(trainer)", f"resume_from(trainer) or {str(folder)!r}"))
    losses, output = finished(start(str(script), 1, tmp_path / "other", 16, PYTHONPATH=path))
    assert list(losses) == [13, 14, 15, 16], output
    assert [step.number for step in st.CheckpointSeries(tmp_path / "other").steps()] == [12, 16]


# What the scripts ask of both

CONTRACT = [
    (transformers.TrainerCallback.on_train_begin, "self args state control kwargs"),
    (transformers.TrainerCallback.on_step_begin, "self args state control kwargs"),
    (transformers.TrainerCallback.on_epoch_end, "self args state control kwargs"),
    (Trainer.train, "self resume_from_checkpoint trial ignore_keys_for_eval"),
    (Trainer.save_model, "self output_dir _internal_call"),
    (Trainer.is_world_process_zero, "self"),
    (transformers.TrainerState.save_to_json, "self json_path"),
    (transformers.TrainerState.load_from_json, "json_path"),
    (accelerate.Accelerator.prepare, "self args device_placement"),
    (accelerate.Accelerator.skip_first_batches, "self dataloader num_batches"),
    (accelerate.Accelerator.wait_for_everyone, "self"),
    (AcceleratedOptimizer.__init__, "self optimizer device_placement scaler"),
]


def changed(function: Any, expected: str) -> str | None:
    """Return what to say of a function whose parameters aren't those that the page's scripts were written for."""
    parameters = " ".join(inspect.signature(function).parameters)
    name = f"{function.__module__}.{function.__qualname__}"
    told = f"{name} has changed: its parameters are ({parameters}), docs/in-your-trainer.md expects ({expected})"
    return None if parameters == expected else told


@pytest.mark.parametrize(("function", "expected"), CONTRACT, ids=lambda value: getattr(value, "__qualname__", ""))
def test_signatures_are_those_that_the_scripts_were_written_for(function: Any, expected: str) -> None:
    assert changed(function, expected) is None, changed(function, expected)
    assert function.__qualname__ in str(changed(function, expected + " more"))  # the planted fault


def test_callbacks_get_what_the_callback_saves() -> None:
    told = dict[str, Any]()

    class Recorder(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            told.update(given)

    handler = CallbackHandler([Recorder()], "model", None, "optimizer", "scheduler")
    handler.on_step_begin(None, transformers.TrainerState(), transformers.TrainerControl())
    held = {name: told.get(name) for name in ("model", "optimizer", "lr_scheduler")}
    assert held == {"model": "model", "optimizer": "optimizer", "lr_scheduler": "scheduler"}, (
        f"transformers.TrainerCallback.on_step_begin has changed: it gets {sorted(told)}"
    )


def test_trainer_reads_what_the_callback_writes() -> None:
    names = transformers.trainer.TRAINER_STATE_NAME, inspect.getsource(Trainer._load_rng_state)
    assert names[0] == "trainer_state.json", f"transformers.trainer.TRAINER_STATE_NAME has changed: {names[0]}"
    for name in ('"rng_state.pth"', 'f"rng_state_{process_index}.pth"', '["python"]', '["numpy"]', '["cpu"]'):
        assert name in names[1], f"Trainer._load_rng_state has changed: it does not read {name}"
