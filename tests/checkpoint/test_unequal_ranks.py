"""Ranks that are called with other arguments: refused on all, before anything is written, saying who has what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, WorldError
from shardtree.storage import MemoryStorage
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


def test_loads_and_removals_are_compared_too() -> None:
    root = MemoryStorage()
    st.simulate(2, lambda world: save(root, world))

    def load(world: World) -> None:
        with pytest.raises(
            WorldError, match=r"rank 0: load: .*, strict=the usual\n  rank 1: load: .*, strict='raise_all'"
        ):
            st.load(tree(world), root, world=world, strict=["assume_ok_unexpected", "raise_all"][world.rank])

    def remove(world: World) -> None:
        with pytest.raises(WorldError, match=r"rank 0: .*, key_prefix='w'\n  rank 1: .*, key_prefix='v'"):
            st.remove_sharded_tensors(root, "wv"[world.rank], world=world)

    st.simulate(2, load)
    st.simulate(2, remove)
    assert list(st.open_checkpoint(root)) == ["w"]


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
