"""A live trainer's weights go into an engine's parameters through the engine's own loader, and come back."""

from __future__ import annotations

from typing import Any

import torch

import shardtree as st
from shardtree.live import run_processes
from tests.traces.loaders import LOADERS, Loader
from tests.traces.test_loaders import QKV, given

RANKS = 2
NAMES = (QKV, "gate and up", "row parallel", "transposed")
WEIGHTS = {f"{place}.{key}": tensor for place, name in enumerate(NAMES) for key, tensor in given(LOADERS[name]).items()}


def filled(rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Return a rank's parameters, by place and name, and the loader that fills all of them."""
    loaders: list[Loader] = [LOADERS[name] for name in NAMES]
    made = [loader.make(rank, ranks) for loader in loaders]
    parameters = {f"{place}.{name}": each for place, (own, _) in enumerate(made) for name, each in own.items()}

    def load(tensors: dict[str, torch.Tensor]) -> None:
        for place, (_, own_load) in enumerate(made):
            mine = {key: each for key, each in tensors.items() if key.startswith(f"{place}.")}
            own_load((key.partition(".")[2], each) for key, each in mine.items())

    return parameters, load


def all_engines() -> st.Trace:
    """Return the trace of all ranks' loaders: rank 1's parameters are under "1/"."""
    engines = [filled(rank, RANKS) for rank in range(RANKS)]

    def load(tensors: dict[str, torch.Tensor]) -> None:
        for _, own_load in engines:
            own_load(tensors)

    return st.trace(
        load,
        WEIGHTS,
        into=lambda: {f"{rank}/{name}": each for rank, (own, _) in enumerate(engines) for name, each in own.items()},
    )


def columns(weights: dict[str, torch.Tensor], rank: int) -> dict[str, st.ShardedTensor]:
    """Return a trainer's tree, cut along the second axis, which no engine does with all of them."""
    return {
        key: st.ShardedTensor.from_rank_offsets(key, tensor.chunk(RANKS, 1)[rank].clone(), (1, rank, RANKS))
        for key, tensor in weights.items()
    }


def there_and_back(world: Any) -> bool:
    trainer, whole = columns(WEIGHTS, world.rank), all_engines()
    parameters = {f"{world.rank}/{name}": each for name, each in filled(world.rank, RANKS)[0].items()}
    places = {name: each.data_ptr() for name, each in parameters.items()}
    served = st.redistribute(trainer, parameters, transform=whole, donate=True, world=world)
    expected, load = filled(world.rank, RANKS)
    load(WEIGHTS)
    for name, tensor in expected.items():
        mine = f"{world.rank}/{name}"
        assert torch.equal(parameters[mine].data, tensor.data)
        assert served[mine].data_ptr() == places[mine]
    for parameter in parameters.values():
        parameter.data.neg_()
    held = {name: st.ShardedTensor.from_rank_offsets(name, each.data) for name, each in parameters.items()}
    again = st.redistribute(held, trainer, transform=whole.inverse(), world=world)
    return all(torch.equal(again[key].data, -shard.data) for key, shard in trainer.items())


def test_an_engine_is_fed_by_its_own_loader_and_gives_back() -> None:
    assert all(st.simulate(RANKS, there_and_back))


def test_so_it_is_between_processes() -> None:
    assert all(run_processes(RANKS, there_and_back, timeout=300))
