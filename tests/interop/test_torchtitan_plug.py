"""torchtitan's own parts with our checkpoint manager, on several processes, beside torchtitan's manager."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtitan
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import shardtree as st
from shardtree.live import run_processes
from shardtree.world import World
from tests.interop.titan_run import Adapter, CheckpointManager, Counter, Run, TheirManager, whole

pytestmark = [pytest.mark.peers, pytest.mark.torchrun, pytest.mark.slow]

State = dict[str, Any]


def check_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        alike = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        assert alike, (key, found[key], value)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(st.load_plain_tensors(folder))


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if st.is_checkpoint(path))


# A run that goes on.


def interrupted(world: World, folder: str) -> list[tuple[State, State]]:
    """Return, for each mode, what an uninterrupted run has in the end, and one that was stopped and loaded."""
    results = []
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        options = {"async_mode": mode, "keep_latest_k": 2, "durable": False}
        straight = Run(world, f"{folder}/{mode}/straight", **options).train(7)
        straight.checkpointer.close()
        first = Run(world, f"{folder}/{mode}/stopped", **options)
        assert not first.checkpointer.load()
        first.train(5).checkpointer.close()
        second = Run(world, f"{folder}/{mode}/stopped", seed=1, **options)
        assert second.checkpointer.load() and second.step == 4
        second.train(7).checkpointer.close()
        results.append((straight.state(), second.state()))
    return results


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    for results in run_processes(2, partial(interrupted, folder=str(tmp_path))):
        for straight, resumed in results:
            check_same(resumed, straight)
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        for name in ("straight", "stopped"):
            folder = tmp_path / mode / name / "steps"
            assert steps(folder) == ["step-4", "step-6"]
            assert st.verify(folder / "step-6") == ()
    with pytest.raises(AssertionError, match="step"):  # the planted fault
        check_same({**straight, "step": 6}, straight)


def saves(world: World, folder: str) -> State:
    """Save by both managers in one folder's steps, and by ours in other formats."""
    run = Run(world, folder, TheirManager, counter=True).train(2)
    run.checkpointer.close()
    for backend in ("safetensors", "dcp", "zarr"):
        run = Run(world, f"{folder}/{backend}", counter=True, backend=backend, durable=False).train(2)
    return run.state()


def loads(world: World, folder: str) -> list[tuple[State, State]]:
    """Return what each folder fills a run on this number of ranks with, and what its data loader is given."""
    results = []
    for name in ("", "/safetensors", "/dcp", "/zarr"):
        run = Run(world, folder + name, seed=1, counter=True)
        assert run.checkpointer.load(2)
        results.append((run.state(), run.loader.loaded))
    run.train(4)  # beside torchtitan's own step
    return results


def goes_back(world: World, folder: str) -> State:
    """Return what torchtitan's manager loads of a step that we saved and converted."""
    run = Run(world, folder, TheirManager, seed=2, exclude_from_loading=["dataloader"])
    assert run.checkpointer.load()
    return run.state()


def test_other_ranks_load_what_either_manager_has_saved(tmp_path: Path) -> None:
    expected = run_processes(2, partial(saves, folder=str(tmp_path)))[0]
    stored = {"rank 0": [0, 1.5], "rank 1": [1, 1.5]}
    for rank, results in enumerate(run_processes(3, partial(loads, folder=str(tmp_path)))):
        for state, loader in results:
            check_same(state, expected)
            assert loader["total"] == 7  # and of the others at least this rank's own, where there was one
            assert {**stored, **loader} == {**stored, "total": 7} and (rank == 2 or f"rank {rank}" in loader)
    assert steps(tmp_path / "zarr" / "steps") == ["step-2", "step-4"]
    st.convert(tmp_path / "safetensors" / "steps" / "step-2", tmp_path / "back" / "steps" / "step-2", backend="dcp")
    for name in ("back", "dcp"):
        for state in run_processes(2, partial(goes_back, folder=str(tmp_path / name))):
            check_same(state, expected)


# What torchtitan's policies ask for.


def policies(world: World, folder: str) -> None:
    """Save the last step by both managers, export to Hugging Face and import; load initial and seed checkpoints."""
    for name, manager in (("theirs", TheirManager), ("ours", CheckpointManager)):
        Run(world, f"{folder}/{name}", manager, export_dtype="bfloat16").train(3, last=3).checkpointer.close()
        run = Run(world, f"{folder}/{name}-hf", manager, adapter=Adapter(), last_save_in_hf=True)
        expected = whole(run.train(3, last=3).model.state_dict())
    whole_last = Run(world, f"{folder}/whole", last_save_model_only=False, async_mode="async").train(3, last=3)
    assert whole_last.checkpointer.save_future is None
    first = Run(world, f"{folder}/first", enable_first_step_checkpoint=True).train(1)
    assert first.checkpointer.load(1)
    none = Run(world, f"{folder}/none", load_only=True).train(2)
    assert not none.checkpointer.save(2)

    for path in (f"{folder}/ours-hf/steps/step-3", f"{folder}/theirs-hf/steps/step-3"):
        for assets in (None, path):  # the adapter's own folder is the default
            options = {"initial_load_in_hf": True, "initial_load_path": None if assets else path}
            run = Run(world, f"{folder}/new", seed=1, adapter=Adapter(assets), **options)
            assert run.checkpointer.load() and run.step == 0
            check_same({**whole(run.model.state_dict()), **seen(expected)}, expected)
    quantized = {"initial_load_in_hf": True, "initial_load_in_hf_quantized": True, "initial_load_path": path}
    run = Run(world, f"{folder}/new", seed=1, adapter=Adapter(), **quantized)
    assert run.checkpointer.load()
    check_same({**whole(run.model.state_dict()), **seen(expected)}, expected)

    rounded = {key: value.bfloat16().float() for key, value in expected.items()}
    for name in ("ours", "theirs"):
        run = Run(world, f"{folder}/new", seed=1, initial_load_path=f"{folder}/{name}/steps/step-3")
        assert run.checkpointer.load() and run.step == 0
        check_same(whole(run.model.state_dict()), rounded)
    all_of_it = {"initial_load_path": f"{folder}/whole/steps/step-3", "initial_load_model_only": False}
    run = Run(world, f"{folder}/new", seed=1, exclude_from_loading=["lr_scheduler"], **all_of_it)
    assert run.checkpointer.load() and run.step == 3
    assert run.schedulers.state_dict()["last_epoch"] == 0
    check_same({**run.state(), "last_epoch": 3}, {**whole_last.state(), **lr_of(run)})

    run.checkpointer.save(0, last_step=True)
    seeded = Run(world, f"{folder}/new", seed=2)
    assert seeded.checkpointer.load() and seeded.step == 0
    check_same(whole(seeded.model.state_dict()), expected)


def seen(state: State) -> State:
    return {key: value for key, value in state.items() if key.endswith("seen")}


def lr_of(run: Run) -> State:
    return {key: value for key, value in run.state().items() if key.endswith(".lr")}


def test_policies_are_torchtitans(tmp_path: Path) -> None:
    run_processes(2, partial(policies, folder=str(tmp_path)))
    for name in ("", "-hf"):
        ours, theirs = (tensors(tmp_path / f"{who}{name}" / "steps" / "step-3") for who in ("ours", "theirs"))
        check_same(ours, theirs)
    assert {value.dtype for value in tensors(tmp_path / "ours" / "steps" / "step-3").values()} == {torch.bfloat16}
    assert not (tmp_path / "none").exists()


def refusals(world: World, folder: str) -> list[str]:
    """Return what is said where a manager can't do what is asked."""
    run = Run(world, folder, async_mode="async", exclude_from_loading=["dataset"]).train(2)
    run.checkpointer.maybe_wait_for_saving()
    no_adapter = partial(Run, world, folder, last_save_in_hf=True)
    said = [error_of(call) for call in (partial(run.checkpointer.load, 3), run.checkpointer.load, no_adapter)]
    later = Run(world, folder, seed=1)
    later.checkpointer.states["later"] = Counter(world.rank)
    said.append(error_of(later.checkpointer.load))
    run.step = world.rank  # differs by rank
    said.append(error_of(partial(run.checkpointer.save, 4)))
    run.step = 6
    run.checkpointer.save(6)
    try:
        raise RuntimeError("of one rank")
    except RuntimeError:
        run.checkpointer.close()
    return said


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except st.errors.CheckpointingException as error:
        return str(error)
    raise AssertionError(call)


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    for said in run_processes(2, partial(refusals, folder=str(tmp_path))):
        assert "no step 3" in said[0]
        assert "unknown states in exclude_from_loading" in said[1] and "dataset" in said[1]
        assert "no adapter for Hugging Face's format" in said[2]
        assert "the checkpoint lacks these states\n  later" in said[3]
        assert "train_state" in said[4]
    assert steps(tmp_path / "steps") == ["step-2"]  # the last save was given up, so that nothing waits for its ranks
    with pytest.raises(st.errors.MetadataError, match="async_mode"):
        CheckpointManager.Config(async_mode="later")  # type: ignore[arg-type]


# Pipeline stages, on slices of a mesh that spans them all, as torchtitan's are.


def stage_manager(world: World, folder: str, stages: int) -> tuple[list[Any], Any, Any]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("world",))
    mesh = mesh._unflatten(0, (stages, world.size // stages), ("pp", "fsdp"))
    number, parts = mesh.get_local_rank("pp"), list[Any]()
    for layer in range(2):
        torch.manual_seed(layer)
        part: Any = torch.nn.Module()
        part.add_module(f"layer{layer}", torch.nn.Linear(4, 5))
        part.tied = torch.nn.Linear(2, 3)
        torch.nn.init.constant_(part.tied.weight, 3.0)
        torch.nn.init.constant_(part.tied.bias, 4.0)
        part.tied.requires_grad_(False)
        part.register_buffer("seen", torch.tensor(1.0))
        if layer * stages // 2 == number:
            parts.append(fully_shard(part, mesh=mesh["fsdp"]))
    groups = [ParamGroupConfig(pattern="layer", optimizer_name="Adam", optimizer_kwargs={"lr": 0.1})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=parts)
    manager = CheckpointManager.Config(enable=True, durable=False).build(
        dataloader=None,
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=folder,
    )
    return parts, optimizers, manager


def stages_save(world: World, folder: str) -> State:
    parts, optimizers, manager = stage_manager(world, folder, 2)
    for parameter in parts[0].parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizers.step()
    manager.save(500)
    return whole({**parts[0].state_dict(), **optimizers.state_dict()})


def stages_load(world: World, folder: str, stages: int) -> State:
    parts, optimizers, manager = stage_manager(world, folder, stages)
    for parameter in parts[0].parameters():
        torch.nn.init.zeros_(parameter)
    assert manager.load()
    return whole({key: value for part in parts for key, value in part.state_dict().items()} | optimizers.state_dict())


def test_pipeline_stages_become_fewer(tmp_path: Path) -> None:
    saved = run_processes(4, partial(stages_save, folder=str(tmp_path)))
    for rank, state in enumerate(run_processes(4, partial(stages_load, folder=str(tmp_path), stages=2))):
        check_same(state, saved[rank])
    for state in run_processes(2, partial(stages_load, folder=str(tmp_path), stages=1)):
        check_same(state, saved[0] | saved[2])


# What the plug was written for.

ASKED = {
    "_close": "self",
    "_load": "self step",
    "_maybe_wait_for_staging": "self",
    "_save": "self curr_step last_step",
    "_wait_for_saving": "self",
}
BUILT_WITH = "dataloader model_parts optimizers lr_schedulers states sd_adapter base_folder"


def check_contract(asked: Mapping[str, str], built_with: str) -> None:
    """Raise where torchtitan asks for other methods, or builds managers with other arguments."""
    where = "torchtitan.components.checkpointer.BaseCheckpointManager"
    if torchtitan.__version__:
        where += f" of torchtitan {torchtitan.__version__}"
    adapt = "adapt shardtree/interop/torchtitan.py"
    abstract = sorted(BaseCheckpointManager.__abstractmethods__)
    assert abstract == sorted(asked), f"{where} has the abstract methods {abstract}; {adapt}"
    for name, parameters in asked.items():
        signature = inspect.signature(getattr(BaseCheckpointManager, name))
        assert list(signature.parameters) == parameters.split(), f"{where}: the signature is {name}{signature}; {adapt}"
    built = inspect.signature(TheirManager)
    names = [each.name for each in built.parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert names == built_with.split(), f"CheckpointManager.Config.build: the signature is {built}; {adapt}"
    fields = set(inspect.signature(TheirManager.Config).parameters)
    ours = set(inspect.signature(CheckpointManager.Config).parameters) - {"backend", "durable"}
    assert fields == ours, f"CheckpointManager.Config: other fields are {sorted(fields ^ ours)}; {adapt}"


def test_torchtitan_asks_for_what_the_plug_has() -> None:
    check_contract(ASKED, BUILT_WITH)
    with pytest.raises(AssertionError, match=r"the signature is _save\(self, curr_step: .*adapt shardtree/interop"):
        check_contract({**ASKED, "_save": "self step"}, BUILT_WITH)
    with pytest.raises(AssertionError, match=r"has the abstract methods \['_close', "):
        check_contract({"_load": ASKED["_load"]}, BUILT_WITH)
    with pytest.raises(AssertionError, match=r"Config.build: the signature is \(config: "):
        check_contract(ASKED, BUILT_WITH + " parallel_dims")


def test_the_room_does_not_import_it_and_its_absence_is_told() -> None:
    code = """
import sys, shardtree.interop
assert "torchtitan" not in sys.modules
sys.modules["torchtitan"] = None
import shardtree.interop.torchtitan
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install torchtitan==0.3.0" in ended.stderr.splitlines()[-1]
