"""Ranks that are called with other arguments: refused on all, before anything is written, saying who has what."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, WorldError
from shardtree.live import run_processes
from shardtree.shell.storage import folder_in
from shardtree.storage import MemoryStorage
from shardtree.world import World
from tests.options import load_keywords, save_keywords


def tree(world: World) -> dict[str, Any]:
    part = torch.full((2,), float(world.rank))
    return {"w": st.ShardedTensor.from_rank_offsets("w", part, (0, world.rank, world.size))}


Call = Callable[[MemoryStorage, World], Any]


def of_rank(act: Callable[..., Any], *arguments: Sequence[Any], **options: Sequence[Any]) -> Call:
    """Return a call with another argument or option on either of two ranks."""
    return lambda root, world: act(
        root,
        world,
        *(values[world.rank] for values in arguments),
        **{name: values[world.rank] for name, values in options.items()},
    )


def series(root: Any, world: World, **options: Any) -> st.CheckpointSeries:
    return st.CheckpointSeries(root, world=world, **options)


def step(root: MemoryStorage, world: World, number: int = 1, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("names", "queue", "keep") if name in options}
    return series(root, world, **own).save(tree(world), number, **options)


def save(root: MemoryStorage, world: World, *arguments: Any, **options: Any) -> Any:
    return st.save(tree(world), root, *arguments, world=world, **save_keywords(**options))


METRICS = dict.fromkeys(map(str, range(50)), 0.5)
CALLS: dict[str, tuple[Call, list[str]]] = {
    "a step": (of_rank(step, (100, 101)), ["step=100", "step=101"]),
    "names": (of_rank(step, names=("s0_{}", "s1_{}")), ["names='s1"]),
    "pinned": (of_rank(step, pinned=(False, True)), ["pinned=True"]),
    "the last of many metrics": (
        of_rank(step, metrics=[METRICS | {"loss": rank} for rank in range(2)]),
        ["metrics['loss']=0.0", "metrics['loss']=1.0"],
    ),
    "a series' asynchronous save": (of_rank(step, async_sharded_save=(True, False)), ["async_sharded_save=True"]),
    "a queue": (of_rank(step, queue=(None, st.AsyncCallsQueue())), ["queue=False", "queue=True"]),
    "a policy": (of_rank(step, keep=(None, st.retention.keep_last(1))), ["keep=False", "keep=True"]),
    "a backend": (of_rank(save, (None, ("dcp", 1))), ["sharded_strategy=('dcp', 1)"]),
    "asynchronous": (of_rank(save, async_sharded_save=(True, False)), ["async_sharded_save=True"]),
    "an option": (of_rank(save, checksums=(True, False)), ["checksums=False"]),
    "durability": (of_rank(save, durable=(True, False)), ["durable=False"]),
    "overwrite": (of_rank(save, overwrite=(False, True)), ["overwrite=True"]),
}


def test_metrics_are_compared_as_numbers_by_name() -> None:
    root = MemoryStorage()
    metrics: list[dict[str, Any]] = [{"loss": 1, "accuracy": torch.tensor(0.5)}, {"accuracy": 0.5, "loss": 1.0}]
    st.simulate(2, lambda world: series(root, world).save(tree(world), 1, metrics=metrics[world.rank]))
    assert series(root, st.world.one_process()).latest().metrics == {"loss": 1.0, "accuracy": 0.5}  # type: ignore[union-attr]


def load(root: MemoryStorage, world: World, *arguments: Any, **options: Any) -> Any:
    return st.load(tree(world), root, *arguments, world=world, **load_keywords(**options))


def load_all(root: MemoryStorage, world: World, **options: Any) -> Any:
    return st.load_plain_tensors(root, world=world, **load_keywords(**options))


def load_module(root: MemoryStorage, world: World, **options: Any) -> Any:
    module = torch.nn.Linear(2, 1, bias=False)
    return st.interop.dtensor.load_module(module, root, world=world, key=lambda _: "w", cast=True, **options)


def remove(root: MemoryStorage, world: World, key: str) -> None:
    st.remove_sharded_tensors(root, key, world=world)


def convert(root: MemoryStorage, world: World, **options: Any) -> Any:
    return st.convert(root, ELSEWHERE, **{"backend": "dcp", **options}, world=world)


def at_step(method: str, *more: Any) -> Call:
    return lambda root, world: getattr(series(root, world), method)(world.rank, *more)


ELSEWHERE = MemoryStorage()
CHECKS, PICKLES = [{"verify": "all"}, {"verify": None}], [{"allow_pickle": False}, {"allow_pickle": True}]
READS: dict[str, tuple[Call, list[str]]] = {
    "load, keys": (
        of_rank(load, strict=("assume_ok_unexpected", "raise_all")),
        ["strict=the default", "strict='raise_all'"],
    ),
    "load, another dtype": (of_rank(load, cast=(False, True)), ["cast=True"]),
    "load, a strategy": (of_rank(load, (None, ("dcp", 1))), ["sharded_strategy=('dcp', 1)"]),
    "load, checks": (of_rank(load, verify=("all", None)), ["verify='all'", "verify=None"]),
    "load, pickles": (of_rank(load, allow_pickle=(True, False)), ["allow_pickle=True"]),
    "load all": (of_rank(load_all, exchange=("never", "always")), ["exchange='never'", "exchange='always'"]),
    "a module, strict": (of_rank(load_module, strict=(True, False)), ["strict=True", "strict=False"]),
    "a removal": (of_rank(remove, "wv"), ["key_prefix='w'", "key_prefix='v'"]),
    "a conversion's format": (of_rank(convert, backend=("dcp", "zarr")), ["backend='dcp'", "backend='zarr'"]),
    "a conversion's patterns": (of_rank(convert, leave_out=([], ["w"])), ["leave_out=()", "leave_out=('w',)"]),
    "a conversion's comparison": (of_rank(convert, verify=(True, False)), ["verify=True", "verify=False"]),
    "a conversion's batches": (of_rank(convert, max_bytes_in_flight=(2**20, 2**21)), ["max_bytes_in_flight=2097152"]),
    "a conversion's pickles": (
        of_rank(convert, save_options=[st.SaveOptions(**each) for each in PICKLES]),
        ["save_options.allow_pickle=True"],
    ),
    "a conversion's source": (
        of_rank(convert, load_options=[st.LoadOptions(**each) for each in CHECKS]),
        ["load_options.verify='all'", "load_options.verify=None"],
    ),
    "a step to look at": (at_step("at"), ["step=0", "step=1"]),
    "a step to pin": (at_step("pin"), ["step=0", "step=1"]),
    "a step to note": (at_step("note", {}), ["step=0", "step=1"]),
    "where to go back to": (at_step("drop_after"), ["step=0", "step=1"]),
}


@pytest.mark.parametrize("case", CALLS | READS)
def test_ranks_with_other_arguments_are_refused_before_anything_is_written(case: str) -> None:
    call, said = (CALLS | READS)[case]
    root, errors = MemoryStorage(), list[str]()
    if case in READS:
        st.simulate(2, lambda world: save(root, world))
    before = root.all_names()

    def on_rank(world: World) -> None:
        with pytest.raises(WorldError, match="the ranks' calls or options differ") as caught:
            call(root, world)
        errors.append(str(caught.value))

    st.simulate(2, on_rank)
    assert len(errors) == 2 and all(text in error for error in errors for text in said), errors
    assert all(f"rank {rank}: " in errors[0] for rank in range(2))
    assert root.all_names() == before and not ELSEWHERE.names()


def takes_a_world() -> set[str]:
    """Return the names of all public functions that ranks call together."""
    rooms = [st, st.interop.dtensor, st.interop.megatron, st.optim, st.live]
    named = {name: getattr(room, name) for room in rooms for name in dir(room) if not name.startswith("_")}
    found = {name: getattr(each, "__init__", each) if inspect.isclass(each) else each for name, each in named.items()}
    return {name for name, each in found.items() if "world" in getattr(inspect.unwrap(each), "__annotations__", ())}


# Rank 0 reads for all, by its own options: others' count for nothing.
BY_RANK_ZERO = {
    "is_checkpoint",
    "load_common_state_dict",
    "load_content_metadata",
    "load_sharded_metadata",
    "load_tensors_metadata",
}
# A request is made by a save; `fingerprint` and `check_replicas` have no option that changes what ranks do;
# `redistribute` compares its own, as do reductions (tests/live/test_reductions.py).
HERE = {"save", "load", "load_plain_tensors", "load_module", "remove_sharded_tensors", "convert", "CheckpointSeries"}


def test_the_tables_here_have_every_call_that_takes_a_world() -> None:
    reductions = {"reduce_elements", "tree_norm", "tree_sum"}
    apart = {"AsyncRequest", "check_replicas", "fingerprint", "redistribute"} | reductions | BY_RANK_ZERO
    assert takes_a_world() - apart == HERE


def asynchronous_alone(folder: str, world: World) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(WorldError) as caught:
        st.save(tree(world), folder, async_sharded_save=world.rank == 1)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.slow
def test_in_processes_one_asynchronous_rank_is_refused_at_once(tmp_path: Path) -> None:
    # Asynchronous commits have a process group of their own; whether ranks are is heard in the one that all use.
    timeout = 120.0
    found = run_processes(3, partial(asynchronous_alone, f"{tmp_path}/c"), timeout=timeout)
    for text, seconds in found:
        assert "rank 0: " in text and "async_sharded_save=the default" in text and seconds < timeout / 2
        assert "rank 1: " in text and "async_sharded_save=True" in text
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())


OF_A_FOLDER = [st.verify, st.open_checkpoint, st.load_plain_tensors, st.load_common_state_dict]
OF_A_FOLDER += [st.load_tensors_metadata, st.load_sharded_metadata]


@pytest.mark.parametrize(
    "use",
    [
        *(lambda root, options, call=call: call(root, options=options) for call in OF_A_FOLDER),
        lambda root, options: st.save({"a": 1}, root, overwrite=True, options=options),
        lambda root, options: st.load({}, root, options=options),
        lambda root, options: st.CheckpointSeries(root).save({"a": 1}, 1, options=options),
        lambda root, options: st.compare(root, root, options=options),
        lambda root, options: st.explain({}, root, options=options),
        lambda root, options: st.convert(root, MemoryStorage(), backend="zarr", load_options=options),
        lambda root, options: st.convert(root, MemoryStorage(), backend="zarr", save_options=options),
    ],
)
@pytest.mark.parametrize("options", [{}, {"verify": None}])
def test_every_call_refuses_options_of_another_class(use: Any, options: Any) -> None:
    root = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))}, root)
    with pytest.raises(CheckpointingException, match=r"options"):
        use(root, options)


class One(NamedTuple):
    a: int


class Two(NamedTuple):
    a: int


MANY = [f"layers.{number}.weight" for number in range(100)]


def beside(root: MemoryStorage, world: World, leave_out: Any) -> Any:
    return st.convert(root, folder_in(root, "there"), backend="safetensors", leave_out=leave_out, world=world)


ALIKE: dict[str, Call] = {
    "patterns": of_rank(beside, (["w"], ("w",))),
    "no patterns": of_rank(beside, ([], ())),
    "names": of_rank(load, parameter_names=(MANY, tuple(MANY))),
    "classes": of_rank(load, types=([One, Two], (Two, One))),
    "no classes": of_rank(load, types=([], ())),
}


@pytest.mark.parametrize("call", ALIKE.values(), ids=ALIKE)
def test_arguments_that_mean_the_same_are_the_same(call: Call) -> None:
    root = MemoryStorage()
    st.simulate(2, lambda world: save(root, world))
    st.simulate(2, lambda world: call(root, world))


def test_long_arguments_are_compared_to_their_ends() -> None:
    root = MemoryStorage()
    st.simulate(2, lambda world: save(root, world))

    def on_rank(world: World) -> None:
        with pytest.raises(WorldError, match=r"parameter_names=\('layers.0.*\.\.\. \([0-9a-f]{16}\)"):
            load(root, world, parameter_names=[*MANY, f"last {world.rank}"])

    st.simulate(2, on_rank)
