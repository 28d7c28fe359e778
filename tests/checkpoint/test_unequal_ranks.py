"""Ranks that are called with other arguments: refused on all, before anything is written, saying who has what."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, WorldError
from shardtree.storage import MemoryStorage, folder_in
from shardtree.world import World


def tree(world: World) -> dict[str, Any]:
    part = torch.full((2,), float(world.rank))
    return {"w": st.ShardedTensor.from_rank_offsets("w", part, (0, world.rank, world.size))}


def series(root: Any, world: World, **options: Any) -> st.CheckpointSeries:
    return st.CheckpointSeries(root, world=world, **options)


def save(root: MemoryStorage, world: World, *arguments: Any, **options: Any) -> Any:
    return st.save(tree(world), root, *arguments, world=world, **options)


Call = Callable[[MemoryStorage, World], Any]
CALLS: dict[str, tuple[Call, list[str]]] = {
    "a step": (lambda root, world: series(root, world).save(tree(world), 100 + world.rank), ["step=100", "step=101"]),
    "names": (lambda root, world: series(root, world, names=f"s{world.rank}_{{}}").save(tree(world), 1), ["names='s1"]),
    "pinned": (lambda root, world: series(root, world).save(tree(world), 1, pinned=world.rank == 1), ["pinned=True"]),
    "metrics": (
        lambda root, world: series(root, world).save(tree(world), 1, metrics={"loss": 0.5 + world.rank}),
        ["metrics['loss']=0.5", "metrics['loss']=1.5"],
    ),
    "the last of many metrics": (
        lambda root, world: series(root, world).save(
            tree(world), 1, metrics={**dict.fromkeys(map(str, range(50)), 0.5), "loss": world.rank}
        ),
        ["metrics['loss']=0.0", "metrics['loss']=1.0"],
    ),
    "a series' asynchronous save": (
        lambda root, world: series(root, world).save(tree(world), 1, async_sharded_save=world.rank == 0),
        ["async_sharded_save=True", "async_sharded_save=False"],
    ),
    "a queue": (
        lambda root, world: series(root, world, queue=st.AsyncCallsQueue() if world.rank else None).save(
            tree(world), 1
        ),
        ["queue=False", "queue=True"],
    ),
    "a policy": (
        lambda root, world: series(root, world, keep=st.retention.keep_last(1) if world.rank else None).save(
            tree(world), 1
        ),
        ["keep=False", "keep=True"],
    ),
    "a backend": (
        lambda root, world: save(root, world, *([("dcp", 1)] if world.rank else [])),
        ["sharded_strategy=the usual", "sharded_strategy=('dcp', 1)"],
    ),
    "asynchronous": (
        lambda root, world: save(root, world, async_sharded_save=world.rank == 0),
        ["async_sharded_save=True"],
    ),
    "an option": (
        lambda root, world: save(root, world, options=st.SaveOptions(checksums=world.rank == 0)),
        ["checksums=False"],
    ),
    "durability": (
        lambda root, world: save(root, world, options=st.SaveOptions(durable=world.rank == 0)),
        ["durable=False"],
    ),
    "overwrite": (lambda root, world: save(root, world, overwrite=world.rank == 1), ["overwrite=True"]),
}


@pytest.mark.parametrize(("call", "said"), CALLS.values(), ids=CALLS)
def test_ranks_with_other_arguments_are_refused_before_anything_is_written(call: Call, said: list[str]) -> None:
    root, errors = MemoryStorage(), list[str]()

    def on_rank(world: World) -> None:
        with pytest.raises(WorldError, match="the ranks aren't doing the same thing") as caught:
            call(root, world)
        errors.append(str(caught.value))

    st.simulate(2, on_rank)
    assert len(errors) == 2 and all(text in error for error in errors for text in said)
    assert not [name for name in root.names() if not root.is_folder(name) or root.names(name)]


def test_metrics_are_compared_as_numbers_by_name() -> None:
    root = MemoryStorage()
    metrics: list[dict[str, Any]] = [{"loss": 1, "accuracy": torch.tensor(0.5)}, {"accuracy": 0.5, "loss": 1.0}]
    st.simulate(2, lambda world: series(root, world).save(tree(world), 1, metrics=metrics[world.rank]))
    assert series(root, st.world.one_process()).latest().metrics == {"loss": 1.0, "accuracy": 0.5}  # type: ignore[union-attr]


def linear(world: World) -> torch.nn.Module:
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.data = torch.full((1, 2), float(world.rank))
    return module


def load(root: MemoryStorage, world: World, *arguments: Any, **options: Any) -> Any:
    return st.load(tree(world), root, *arguments, world=world, **options)


def convert(root: MemoryStorage, world: World, **options: Any) -> Any:
    return st.convert(root, ELSEWHERE, **{"backend": "dcp", **options}, world=world)


ELSEWHERE = MemoryStorage()
READS: dict[str, tuple[Call, list[str]]] = {
    "load, keys": (
        lambda root, world: load(root, world, strict=["assume_ok_unexpected", "raise_all"][world.rank]),
        ["strict=the usual", "strict='raise_all'"],
    ),
    "load, another dtype": (lambda root, world: load(root, world, cast=world.rank == 1), ["cast=True"]),
    "load, a strategy": (
        lambda root, world: load(root, world, *([("dcp", 1)] if world.rank else [])),
        ["sharded_strategy=('dcp', 1)"],
    ),
    "load, checks": (
        lambda root, world: load(root, world, options=st.LoadOptions(verify=None if world.rank else "all")),
        ["verify='all'", "verify=None"],
    ),
    "load, pickles": (
        lambda root, world: load(root, world, options=st.LoadOptions(allow_pickle=world.rank == 0)),
        ["allow_pickle=True"],
    ),
    "load all": (
        lambda root, world: st.load_plain_tensors(
            root, world=world, options=st.LoadOptions(exchange="always" if world.rank else "never")
        ),
        ["exchange='never'", "exchange='always'"],
    ),
    "a module, strict": (
        lambda root, world: st.interop.dtensor.load_module(
            linear(world), root, world=world, key=lambda _: "w", strict=world.rank == 0, cast=True
        ),
        ["strict=True", "strict=False"],
    ),
    "a removal": (
        lambda root, world: st.remove_sharded_tensors(root, "wv"[world.rank], world=world),
        ["key_prefix='w'", "key_prefix='v'"],
    ),
    "a conversion's format": (
        lambda root, world: convert(root, world, backend=["dcp", "zarr"][world.rank]),
        ["backend='dcp'", "backend='zarr'"],
    ),
    "a conversion's patterns": (
        lambda root, world: convert(root, world, leave_out=["w"] if world.rank else []),
        ["leave_out=()", "leave_out=('w',)"],
    ),
    "a conversion's comparison": (
        lambda root, world: convert(root, world, verify=world.rank == 0),
        ["verify=True", "verify=False"],
    ),
    "a conversion's batches": (
        lambda root, world: convert(root, world, max_bytes_in_flight=2**20 + world.rank),
        ["max_bytes_in_flight=1048576", "max_bytes_in_flight=1048577"],
    ),
    "a conversion's pickles": (
        lambda root, world: convert(root, world, save_options=st.SaveOptions(allow_pickle=world.rank == 1)),
        ["save_options.allow_pickle=True"],
    ),
    "a conversion's source": (
        lambda root, world: convert(root, world, load_options=st.LoadOptions(verify=None if world.rank else "all")),
        ["load_options.verify='all'", "load_options.verify=None"],
    ),
    "a step to look at": (lambda root, world: series(root, world).at(world.rank), ["step=0", "step=1"]),
    "a step to pin": (lambda root, world: series(root, world).pin(world.rank), ["step=0", "step=1"]),
    "a step to note": (lambda root, world: series(root, world).note(world.rank, {}), ["step=0", "step=1"]),
    "where to go back to": (lambda root, world: series(root, world).drop_after(world.rank), ["step=0", "step=1"]),
}


@pytest.mark.parametrize(("call", "said"), READS.values(), ids=READS)
def test_ranks_that_read_or_change_what_is_stored_differently_are_refused(call: Call, said: list[str]) -> None:
    root, errors = MemoryStorage(), list[str]()
    st.simulate(2, lambda world: save(root, world))

    def on_rank(world: World) -> None:
        with pytest.raises(WorldError, match="the ranks aren't doing the same thing") as caught:
            call(root, world)
        errors.append(str(caught.value))

    st.simulate(2, on_rank)
    assert len(errors) == 2 and all(text in error for error in errors for text in said), errors
    assert all(f"rank {rank}: " in errors[0] for rank in range(2))
    assert list(st.open_checkpoint(root)) == ["w"] and not ELSEWHERE.names()


def takes_a_world() -> set[str]:
    """Return the names of all public functions that ranks call together."""
    rooms = [st, st.interop.dtensor, st.interop.megatron, st.optim, st.live]
    named = {name: getattr(room, name) for room in rooms for name in dir(room) if not name.startswith("_")}
    found = {name: getattr(each, "__init__", each) if inspect.isclass(each) else each for name, each in named.items()}
    return {name for name, each in found.items() if "world" in getattr(inspect.unwrap(each), "__annotations__", ())}


# A request is made by a save; `fingerprint` and `check_replicas` have no option that changes what ranks do;
# `redistribute` compares its own.
HERE = {"save", "load", "load_plain_tensors", "load_module", "remove_sharded_tensors", "convert", "CheckpointSeries"}


def test_the_tables_here_have_every_call_that_takes_a_world() -> None:
    assert takes_a_world() - {"AsyncRequest", "check_replicas", "fingerprint", "redistribute"} == HERE


def asynchronous_alone(folder: str, world: World) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(WorldError) as caught:
        st.save(tree(world), folder, async_sharded_save=world.rank == 1)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.slow
def test_in_processes_one_asynchronous_rank_is_refused_at_once(tmp_path: Path) -> None:
    # Asynchronous commits have a process group of their own; whether ranks are is heard in the one that all use.
    timeout = 120.0
    found = st.world.run_processes(3, partial(asynchronous_alone, f"{tmp_path}/c"), timeout=timeout)
    for text, seconds in found:
        assert "rank 0: " in text and "async_sharded_save=the usual" in text and seconds < timeout / 2
        assert "rank 1: " in text and "async_sharded_save=True" in text
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())


@pytest.mark.parametrize("options", [{}, {"durable": False}, st.LoadOptions()])
def test_options_of_another_class_are_refused_on_all_ranks(options: Any) -> None:
    root = MemoryStorage()

    def on_rank(world: World) -> None:
        with pytest.raises(CheckpointingException, match="options"):
            save(root, world, options=options if world.rank else None)
        with pytest.raises(CheckpointingException, match="options"):
            series(root, world).save(tree(world), 1, options=options if world.rank else None)

    st.simulate(2, on_rank)
    st.save({"a": 1}, root)
    with pytest.raises(CheckpointingException, match="options"):
        st.load({}, root, options={"verify": None})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "use",
    [
        lambda root, options: st.verify(root, options=options),
        lambda root, options: st.compare(root, root, options=options),
        lambda root, options: st.explain({}, root, options=options),
        lambda root, options: st.open_checkpoint(root, options=options),
        lambda root, options: st.load_plain_tensors(root, options=options),
        lambda root, options: st.load_common_state_dict(root, options=options),
        lambda root, options: st.load_tensors_metadata(root, options=options),
        lambda root, options: st.load_sharded_metadata(root, options=options),
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
ALIKE: dict[str, Call] = {
    "patterns": lambda root, world: beside(root, world, (["w"], ("w",))[world.rank]),
    "no patterns": lambda root, world: beside(root, world, ([], ())[world.rank]),
    "names": lambda root, world: reading(root, world, parameter_names=(MANY, tuple(MANY))[world.rank]),
    "classes": lambda root, world: reading(root, world, types=([One, Two], (Two, One))[world.rank]),
    "no classes": lambda root, world: reading(root, world, types=([], ())[world.rank]),
}


def beside(root: MemoryStorage, world: World, leave_out: Any) -> Any:
    return st.convert(root, folder_in(root, "there"), backend="safetensors", leave_out=leave_out, world=world)


def reading(root: MemoryStorage, world: World, **options: Any) -> Any:
    return load(root, world, options=st.LoadOptions(**options))


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
            reading(root, world, parameter_names=[*MANY, f"last {world.rank}"])

    st.simulate(2, on_rank)
