"""A place that holds no finished checkpoint is called what it is, and what can be opened in it is named."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import shardtree as st
from shardtree.errors import NotACheckpoint
from shardtree.shell.storage import folder_in
from tests.cli.checkpoints import run

FIXTURES = Path(__file__).parent.parent / "fixtures"


def saved(folder: Path, *backend: str) -> None:
    """Save a small checkpoint, by default in torch_dist."""
    shard = st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
    st.save([shard], folder, ((backend or ("torch_dist",))[0], 1))


def pickled(folder: Path, *names: str) -> None:
    """Put files of torch.save into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        torch.save({"step": 3}, folder / name)


# The roots that trainers make: each lays out one under a folder, and returns it with what must be named of it.


def accelerate(root: Path) -> tuple[Path, Sequence[str]]:
    """Save as accelerate's `save_state` does with FSDP: a DCP folder each for the model and its optimizer."""
    saved(root / "pytorch_model_fsdp_0", "dcp")
    saved(root / "optimizer_0", "dcp")
    pickled(root, "scheduler.bin", "sampler.bin", "random_states_0.pkl")
    return root, ["but holds", "/optimizer_0' (dcp 1)", "/pytorch_model_fsdp_0' (dcp 1)"]


def trainer(root: Path) -> tuple[Path, Sequence[str]]:
    """Run transformers' Trainer with FSDP, for two steps."""
    for step in (90, 100):
        accelerate(root / f"checkpoint-{step}")
        pickled(root / f"checkpoint-{step}", "scheduler.pt", "rng_state_0.pth", "training_args.bin")
    parts = [f"/checkpoint-100/{name}' (dcp 1)" for name in ("optimizer_0", "pytorch_model_fsdp_0")]
    return root, ["but a run, whose newest finished step is:", *parts]


def verl(root: Path) -> tuple[Path, Sequence[str]]:
    """Run verl with an actor and a critic, on FSDP."""
    for step in (2, 10):
        for model in ("actor", "critic"):
            shutil.copytree(FIXTURES / "dtensor_fsdp2_w4", root / f"global_step_{step}" / model)
            (root / f"global_step_{step}" / model / "truth.safetensors").unlink(missing_ok=True)
        pickled(root / f"global_step_{step}", "data.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root, ["but a run", "global_step_10/actor' (dtensor_files 1)", "global_step_10/critic' (dtensor_files 1)"]


def megatron(root: Path) -> tuple[Path, Sequence[str]]:
    """Run Megatron-LM, which was killed in its last save."""
    for step in (100, 200):
        saved(root / f"iter_{step:07d}")
    pickled(root / "iter_0000300", "common.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("200")
    return root, ["but a run", "/iter_0000200' (torch_dist 1)"]


def unfinished(root: Path) -> tuple[Path, Sequence[str]]:
    """The save that was killed there."""
    pickled(root / "iter_0000300", "common.pt")
    return root / "iter_0000300", ["an unfinished save of Megatron-Core"]


def without_steps(root: Path) -> tuple[Path, Sequence[str]]:
    """A run of which no save was ever finished."""
    pickled(root / "iter_0000300", "common.pt")
    return root, ["a run without a finished step", "'iter_0000300'"]


def own_run(root: Path) -> tuple[Path, Sequence[str]]:
    """A series of our own format, of which the newest step wasn't finished."""
    for step in (9, 10):
        saved(root / f"step_{step}", "safetensors")
    (root / "step_11" / "save-20260102T030405-0123456789abcdef").mkdir(parents=True)
    return root, ["but a run", "/step_10' (safetensors 1)"]


def own_unfinished(root: Path) -> tuple[Path, Sequence[str]]:
    """The step that wasn't."""
    own_run(root)
    return root / "step_11", ["a save that was interrupted, or is still running"]


ROOTS = [accelerate, trainer, verl, megatron, unfinished, without_steps, own_run, own_unfinished]


def entry_points(place: Path, new: Path) -> list[Callable[[], object]]:
    """Return calls of all that opens a checkpoint, at a place; what is converted from it goes to a new one."""
    return [
        lambda: st.load({}, place),
        lambda: st.open_checkpoint(place),
        lambda: st.verify(place),
        lambda: st.explain({}, place),
        lambda: st.convert(place, new, backend="safetensors"),
    ]


@pytest.mark.parametrize("lay_out", ROOTS)
def test_a_root_names_what_can_be_opened_in_it(
    lay_out: Callable[[Path], tuple[Path, Sequence[str]]], tmp_path: Path
) -> None:
    root, named = lay_out(tmp_path / "root")
    for call in entry_points(root, tmp_path / "new"):
        with pytest.raises(NotACheckpoint) as caught:
            call()
        text = str(caught.value)
        assert all(part in text for part in named), text
        # Pickled files beside readable folders aren't what is to be saved anew: that would leave the folders out.
        assert "pickled" not in text
    assert not (tmp_path / "new").exists()
    assert all(len(st.open_checkpoint(path)) for path in re.findall(r"'([^'\n]+)' \(\w+ \d\)", text))


def test_the_parts_of_one_step_are_no_steps_in_the_shell(tmp_path: Path) -> None:
    root, _ = accelerate(tmp_path / "root")
    done = run("inspect", root)
    assert done.exit_code == 2 and "pytorch_model_fsdp_0' (dcp 1)" in done.stderr


def test_an_interrupted_conversion_is_resumed_and_not_opened(tmp_path: Path) -> None:
    saved(tmp_path / "source")
    stopped = tmp_path / "new"
    options = st.SaveOptions(progress=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        st.convert(tmp_path / "source", stopped, backend="safetensors", save_options=options)
    with pytest.raises(NotACheckpoint, match="a conversion that was interrupted, or is still running\n  Run the same"):
        st.open_checkpoint(stopped)
    st.convert(tmp_path / "source", stopped, backend="safetensors")
    assert list(st.open_checkpoint(stopped)) == ["w"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("runs/step_1", "runs/step_10"), ("runs/stpe_10", "runs/step_10"), ("rusn/step_10", "runs/step_10")],
)
def test_a_mistyped_folder_is_asked_for(typed: str, meant: str, tmp_path: Path) -> None:
    saved(tmp_path / "runs" / "step_10")
    with pytest.raises(NotACheckpoint, match="no such folder") as caught:
        st.open_checkpoint(tmp_path / typed)
    assert f"Did you mean '{tmp_path / meant}'?" in str(caught.value)


def test_damage_in_a_folder_of_a_root_is_left_to_its_own_error(tmp_path: Path) -> None:
    saved(tmp_path / "runs" / "step_10")
    saved(tmp_path / "runs" / "step_20")
    (tmp_path / "runs" / "step_20" / "metadata.json").write_text("{")
    with pytest.raises(NotACheckpoint, match="step_10' \\(torch_dist 1\\)"):
        st.open_checkpoint(tmp_path / "runs")


def test_a_folder_of_many_files_is_looked_through_once() -> None:
    inner, asked = st.storage.MemoryStorage(), list[str]()
    for number in range(50):
        inner.replace(f"data/x{number}.txt", b"", durable=False)

    def names(name: str = "") -> tuple[str, ...]:
        asked.append(name)
        return inner.names(name)

    # Without `is_folder`, a name is a folder's if there are names in it.
    storage = st.storage.wrapped(inner, names=names, is_folder=None, entries=None)
    with pytest.raises(NotACheckpoint, match="in no format that is recognised"):
        st.open_checkpoint(folder_in(storage, "data"))
    assert max(Counter(name for name in asked if name != "data").values()) == 1
