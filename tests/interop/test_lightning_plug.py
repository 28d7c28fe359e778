"""Lightning's Trainer and Fabric over our checkpoints, beside their own on their own folders."""

from __future__ import annotations

import inspect
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from pickle import UnpicklingError
from threading import Thread
from typing import Any
from uuid import uuid4

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy

import shardtree as st
from shardtree.errors import KeyMismatch, TreeError, UnsafeFile, UnsupportedValue
from shardtree.interop.lightning import ShardtreeFabricStrategy, ShardtreeIO, ShardtreeStrategy
from shardtree.live import run_processes
from shardtree.world import one_process
from tests.interop.lightning_jobs import QUICK, Fit, Loop, fit, fits, loops

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice
]


def close(found: dict[int, float], expected: dict[int, float]) -> bool:
    return found == {step: pytest.approx(expected[step], rel=1e-4) for step in found}


@pytest.mark.slow
def test_saved_on_two_ranks_resumed_on_three_as_by_lightning(tmp_path: Path) -> None:
    ours, theirs, again = tmp_path / "ours", tmp_path / "theirs", tmp_path / "again"
    saved = [Fit(ours, 2), Fit(theirs, 2, strategy="theirs"), Fit(again, 4)]
    first, other, whole = run_processes(2, partial(fits, saved))[0]
    assert first == other == {step: whole[step] for step in first}
    # Of four epochs the best two and the last remain (save_top_k=2, save_last=True); the others' folders are gone.
    kept = sorted(path.name for path in again.iterdir())
    assert len(kept) == 3 and kept[-1] == "last.ckpt"
    assert all(st.verify(path) == () for path in again.iterdir())
    resumed = [
        Fit(tmp_path / "1", 4, ours / "last.ckpt"),
        Fit(tmp_path / "2", 4, theirs / "last.ckpt", "theirs"),
        Fit(tmp_path / "3", 4, theirs / "last.ckpt"),
        Fit(theirs, 4, theirs / "last.ckpt"),  # into the folder of Lightning's run
        Fit(tmp_path / "4", 5, theirs / "last.ckpt"),
    ]
    by_us, by_them, of_theirs, into_theirs, onward = run_processes(3, partial(fits, resumed))[0]
    assert by_us == by_them == of_theirs == into_theirs
    assert list(by_us) == [5, 6, 7, 8] and close(by_us, whole)
    assert list(onward) == [9, 10]


@pytest.mark.slow
def test_shards_of_tensor_parallelism_are_resumed_without_it(tmp_path: Path) -> None:
    first = run_processes(4, partial(fit, Fit(tmp_path / "4", 2, tensor_parallel=2)))[0]
    again = [Fit(tmp_path / "2", 3, tmp_path / "4" / "last.ckpt"), Fit(tmp_path / "whole", 3)]
    resumed, whole = run_processes(2, partial(fits, again))[0]
    assert list(resumed) == [5, 6] and close(first | resumed, whole)


@pytest.mark.slow
def test_fabric_saves_on_two_ranks_and_loads_on_three(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    first = [Loop(ours), Loop(theirs, theirs=True), Loop(tmp_path / "whole", steps=6)]
    by_us, by_them, whole = run_processes(2, partial(loops, first))[0]
    assert by_us == by_them == whole[:3]
    again = [Loop(tmp_path / "1", ours), Loop(tmp_path / "2", theirs, theirs=True), Loop(tmp_path / "3", theirs)]
    by_us, by_them, of_theirs = run_processes(3, partial(loops, again))[0]
    assert by_us == by_them == of_theirs == pytest.approx(whole[3:], rel=1e-4)
    common = st.load_common_state_dict(tmp_path / "1")
    assert (common["step"], common["schedule"]["last_epoch"]) == (6, 6)


@pytest.mark.slow
def test_a_folder_converted_to_dcp_is_lightnings(tmp_path: Path) -> None:
    _, whole = run_processes(2, partial(fits, [Fit(tmp_path / "ours", 2), Fit(tmp_path / "all", 4)]))[0]
    common = st.load_common_state_dict(tmp_path / "ours" / "last.ckpt")
    st.convert(tmp_path / "ours" / "last.ckpt", tmp_path / "back", backend="dcp", save_options=QUICK)
    torch.save({k: v for k, v in common.items() if not k.startswith("optimizer_")}, tmp_path / "back" / "meta.pt")
    by_them = Fit(tmp_path / "theirs", 4, tmp_path / "back", "theirs")
    (resumed,) = run_processes(2, partial(fits, [by_them]))[0]
    assert resumed == {step: whole[step] for step in (5, 6, 7, 8)}


# One process


@pytest.mark.parametrize("backend", [None, "dcp"])
def test_one_process_goes_on_as_with_lightnings_files(backend: str | None, tmp_path: Path) -> None:
    whole = fit(Fit(tmp_path / "whole", 4, strategy="auto", io="theirs"))
    first = fit(Fit(tmp_path / "ours", 2, strategy="auto", backend=backend, link=True))
    folders = sorted(path for path in (tmp_path / "ours").iterdir() if not path.is_symlink())
    assert len(folders) == 2 and all(st.is_checkpoint(path, world=one_process()) for path in folders)
    onward = fit(
        Fit(tmp_path / "ours", 4, tmp_path / "ours" / "last.ckpt", strategy="auto", backend=backend, link=True)
    )
    assert first | onward == whole
    of_theirs = Fit(tmp_path / "3", 5, tmp_path / "whole" / "last.ckpt", strategy="auto")
    assert list(fit(of_theirs)) == [9, 10]


def test_asynchronous_saves_of_lightnings(tmp_path: Path) -> None:
    whole = fit(Fit(tmp_path / "whole", 4, strategy="auto", io="theirs"))
    fit(Fit(tmp_path / "ours", 2, strategy="auto", io="async"))
    assert fit(Fit(tmp_path / "2", 4, tmp_path / "ours" / "last.ckpt", strategy="auto")).items() <= whole.items()


@pytest.mark.slow
def test_ranks_that_hold_the_model_whole_save_on_one(tmp_path: Path) -> None:
    jobs = [
        Fit(tmp_path / "1", 2, strategy="ddp"),
        Fit(tmp_path / "2", 4, tmp_path / "1" / "last.ckpt", strategy="ddp"),
    ]
    first, resumed = run_processes(2, partial(fits, [*jobs]))[0]
    (whole,) = run_processes(2, partial(fits, [Fit(tmp_path / "3", 4, strategy="ddp")]))[0]
    assert first | resumed == whole
    assert {"state_dict.net.first.weight", "state_dict.steps"} <= set(
        st.load_tensors_metadata(tmp_path / "2" / "last.ckpt")
    )


class Unknown:
    """A value that no checkpoint holds but as a pickle."""


def test_what_cant_be_held_is_named_and_nothing_is_unpickled_unasked(tmp_path: Path) -> None:
    checkpoint, folder = (
        {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"made": Unknown()}},
        tmp_path / "a.ckpt",
    )
    with pytest.raises(UnsupportedValue, match=r"\['hyper_parameters'\]\['made'\]"):
        ShardtreeIO(save_options=QUICK).save_checkpoint(checkpoint, folder)
    pickling = ShardtreeIO(save_options=st.SaveOptions(durable=False, allow_pickle=True))
    pickling.save_checkpoint(checkpoint, folder)
    trusting = ShardtreeIO(load_options=st.LoadOptions(allow_pickle=True))
    for reads, weights_only in [(ShardtreeIO(), None), (ShardtreeIO(), True), (trusting, True)]:
        with pytest.raises(UnsafeFile):
            reads.load_checkpoint(folder, weights_only=weights_only)
    for reads, weights_only in [(ShardtreeIO(), False), (trusting, None)]:
        assert isinstance(reads.load_checkpoint(folder, weights_only=weights_only)["hyper_parameters"]["made"], Unknown)


def test_values_of_a_folder_of_lightnings_are_unpickled_only_if_asked(tmp_path: Path) -> None:
    plug = ShardtreeFabricStrategy(lambda module, _: module, backend="dcp", save_options=QUICK)
    model, state = torch.nn.Linear(2, 2), {"model": torch.nn.Linear(2, 2), "made": None}
    plug.save_checkpoint(tmp_path, {"model": model})
    torch.save({"made": Unknown()}, tmp_path / "meta.pt")
    for weights_only in (None, True):
        with pytest.raises(UnsafeFile, match="Unknown"):
            plug.load_checkpoint(tmp_path, state, weights_only=weights_only)
    assert plug.load_checkpoint(tmp_path, state, weights_only=False) == {}
    assert isinstance(state["made"], Unknown) and torch.equal(state["model"].weight, model.weight)
    plug.save_checkpoint(tmp_path, {"model": model})  # what stood beside the old one doesn't belong to this one
    assert plug.load_checkpoint(tmp_path, {"model": state["model"]}) == {}


def test_a_strategy_names_what_cant_be_held(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValue, match=r"\['extra'\]\['made'\]"):
        run_processes(1, partial(fit, Fit(tmp_path, 1, extra={"made": Unknown()})))


def test_state_dicts_come_back_in_their_form(tmp_path: Path) -> None:
    checkpoint = {
        "state_dict": {"a.b": torch.ones(2), "_extra_state": {"n": 1}, "c": torch.nn.Parameter(torch.zeros(()))},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]}],
        "with.dot": {"t": torch.ones(1)},
        "empty": {},
        "epoch": 3,
    }
    plug = ShardtreeIO(save_options=QUICK)
    plug.save_checkpoint(checkpoint, tmp_path / "a")
    plug.save_checkpoint(checkpoint, tmp_path / "a")  # over itself
    loaded = plug.load_checkpoint(tmp_path / "a", map_location="cpu")
    difference = st.diff(loaded, checkpoint)
    assert not (difference.only_left or difference.only_right or difference.mismatch)
    with pytest.raises(st.errors.MetadataError, match="map_location"):
        plug.load_checkpoint(tmp_path / "a", map_location={"cuda:0": "cpu"})


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_removal_takes_first_what_makes_a_folder_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug, folder, link = ShardtreeIO(save_options=QUICK), tmp_path / "a", tmp_path / "link"
    plug.save_checkpoint({"epoch": 1}, folder)
    link.symlink_to(folder)
    plug.remove_checkpoint(link)
    assert st.is_checkpoint(folder, world=one_process()) and not link.is_symlink()

    with monkeypatch.context() as patched:
        patched.setattr("fsspec.implementations.local.LocalFileSystem.rm", killed)
        with pytest.raises(KeyboardInterrupt):
            plug.remove_checkpoint(folder)
    assert not st.is_checkpoint(folder, world=one_process()) and folder.is_dir()
    plug.remove_checkpoint(folder)
    assert not folder.exists()


def test_a_removal_behind_a_url_takes_first_what_makes_it_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    plug, url = ShardtreeIO(save_options=QUICK), f"memory://{uuid4().hex}/a"
    plug.save_checkpoint({"epoch": 1}, url)

    with monkeypatch.context() as patched:
        patched.setattr("fsspec.implementations.memory.MemoryFileSystem.rm", killed)
        with pytest.raises(KeyboardInterrupt):
            plug.remove_checkpoint(url)
    assert not st.is_checkpoint(url, world=one_process())


def test_a_file_of_lightnings_behind_a_url_runs_no_code_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"made": Unknown()}, tmp_path / "a.ckpt")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))  # where torch keeps what it downloaded
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.ckpt"
        try:
            for weights_only in (None, True):
                with pytest.raises(UnpicklingError):
                    ShardtreeIO().load_checkpoint(url, weights_only=weights_only)
            assert isinstance(ShardtreeIO().load_checkpoint(url, weights_only=False)["made"], Unknown)
        finally:
            server.shutdown()


def test_arguments_that_mean_nothing_here_are_refused(tmp_path: Path) -> None:
    for call in (
        partial(ShardtreeIO().save_checkpoint, {}, tmp_path),
        partial(ShardtreeStrategy().save_checkpoint, {}, tmp_path),
        partial(ShardtreeFabricStrategy(lambda module, _: module).save_checkpoint, tmp_path, {}),
    ):
        with pytest.raises(UnsupportedValue, match="storage_options="):
            call(storage_options={})
    two = {"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)}
    with pytest.raises(TreeError, match="one module"):
        ShardtreeFabricStrategy(lambda module, _: module).save_checkpoint(tmp_path, two)
    clash = {"state_dict": {}, "optimizer_0": 1, "optimizer_states": [{}]}
    with pytest.raises(TreeError, match="optimizer_0"):
        ShardtreeStrategy().save_checkpoint(clash, tmp_path)


def test_strict_loads_need_the_same_keys(tmp_path: Path) -> None:
    plug = ShardtreeFabricStrategy(lambda module, _: module, save_options=QUICK)
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    plug.save_checkpoint(tmp_path, {"model": model, "step": 1})
    with pytest.raises(KeyMismatch, match=r"model\.bias"):
        plug.load_checkpoint(tmp_path, {"model": other})
    assert plug.load_checkpoint(tmp_path, {"model": other, "more": 2}, strict=False) == {"step": 1}
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(KeyMismatch, match="more"):
        plug.load_checkpoint(tmp_path, {"model": model, "more": 2})
    plug.save_checkpoint(tmp_path, {"model": other})
    with pytest.raises(KeyMismatch, match=r"model\.bias"):
        plug.load_checkpoint(tmp_path, {"model": model})
    plug.load_checkpoint(tmp_path, {"model": model}, strict=False)


# What Lightning promises


CONTRACT = [
    (CheckpointIO.save_checkpoint, "self checkpoint path storage_options"),
    (CheckpointIO.load_checkpoint, "self path map_location weights_only"),
    (CheckpointIO.remove_checkpoint, "self path"),
    (ModelParallelStrategy.save_checkpoint, "self checkpoint filepath storage_options"),
    (ModelParallelStrategy.load_checkpoint, "self checkpoint_path weights_only"),
    (ModelParallelStrategy.remove_checkpoint, "self filepath"),
    (FabricStrategy.save_checkpoint, "self path state storage_options filter"),
    (FabricStrategy.load_checkpoint, "self path state strict weights_only"),
]
PLUGS = {CheckpointIO: ShardtreeIO, ModelParallelStrategy: ShardtreeStrategy, FabricStrategy: ShardtreeFabricStrategy}


def changed(function: Any, expected: str) -> str | None:
    """Return what to say of a method of Lightning's whose parameters aren't those that the plug was written for."""
    found = " ".join(inspect.signature(function).parameters)
    name = f"{function.__module__}.{function.__qualname__}"
    told = (
        f"Lightning has changed {name}: its parameters are ({found}), shardtree.interop.lightning expects ({expected})"
    )
    return None if found == expected else told


@pytest.mark.parametrize(("function", "expected"), CONTRACT, ids=lambda value: getattr(value, "__qualname__", ""))
def test_signatures_of_lightning_are_those_that_the_plug_was_written_for(function: Any, expected: str) -> None:
    assert changed(function, expected) is None, changed(function, expected)
    assert function.__qualname__ in str(changed(function, expected + " more"))  # the planted fault


def test_each_method_takes_what_lightnings_takes() -> None:
    for theirs, ours in PLUGS.items():
        names = {name for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint") if hasattr(theirs, name)}
        for name in names:
            assert list(inspect.signature(getattr(ours, name)).parameters) == list(
                inspect.signature(getattr(theirs, name)).parameters
            )


def test_lightnings_checkpoints_have_the_entries_that_the_plug_knows(tmp_path: Path) -> None:
    fit(Fit(tmp_path, 1, strategy="auto", io="theirs"))
    entries = torch.load(tmp_path / "last.ckpt")
    assert {"state_dict", "optimizer_states", "loops", "callbacks", "lr_schedulers"} <= entries.keys()
    assert not any(name.startswith("optimizer_0") for name in entries)
