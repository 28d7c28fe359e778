"""torchsnapshot as a contender: as it comes, and with the settings that were fastest here.

Its last release is 0.1.0, of 2022; it imports and runs beside torch 2.13, and says in warnings what it uses that torch
calls old. It never syncs a file. In several processes shards are torch's older ShardedTensor, which is what it can
load in another sharding.

Tried for the fastest, with 200 MB in 20 tensors: with and without its batching of small tensors into slabs, which
copies each into one buffer (saves took 0.21 and 0.17 s), and chunks of 2 MiB (0.63 s).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

from ._contenders import LOAD, LOAD_COLUMNS, LOAD_NEW, Contender
from ._work import Tensors, Work

DEFAULT, BEST = "torchsnapshot", "torchsnapshot, no batching"
NAMES = (DEFAULT, BEST)
TERMS = {DEFAULT: "0.1.0 of 2022", BEST: "TORCHSNAPSHOT_DISABLE_BATCHING=1"}
_BATCHING = "TORCHSNAPSHOT_DISABLE_BATCHING"


def missing(ranks: int) -> str:
    """Return why there is no row with that many processes; empty where there is one."""
    return "" if find_spec("torchsnapshot") else "not installed: pip install torchsnapshot==0.1.0"


def contenders(ranks: int) -> tuple[Contender, ...]:
    """Return both rows, or none where `missing` says why."""
    if missing(ranks):
        return ()
    return _contender(DEFAULT, ranks, batching=True), _contender(BEST, ranks, batching=False)


def _contender(name: str, ranks: int, *, batching: bool) -> Contender:
    def save(mine: Work, folder: Path) -> None:
        with _settings(batching=batching) as torchsnapshot:
            torchsnapshot.Snapshot.take(str(folder / "snapshot"), _state(torchsnapshot, mine, mine.rows, axis=0))

    def load(mine: Work, folder: Path, *, tensors: Callable[[Work], Tensors], axis: int) -> Tensors:
        given = tensors(mine)
        with _settings(batching=batching) as torchsnapshot:
            state = _state(torchsnapshot, mine, given, axis=axis)
            torchsnapshot.Snapshot(str(folder / "snapshot")).restore(state)
        return {key: _local(value) for key, value in state["tensors"].items()}

    loads = {
        (LOAD, name): partial(load, tensors=lambda mine: mine.targets, axis=0),
        (LOAD_NEW, name): partial(load, tensors=_new, axis=0),
    }
    columns = {(LOAD_COLUMNS, name): partial(load, tensors=lambda mine: mine.columns, axis=1)}
    return Contender(name, save, loads | columns if ranks > 1 else loads)


def _new(mine: Work) -> Tensors:
    return {name: torch.empty_like(tensor) for name, tensor in mine.rows.items()}


@contextmanager
def _settings(*, batching: bool) -> Iterator[Any]:
    """Give the library, imported without its warnings, with batching on or off."""
    before = os.environ.get(_BATCHING)
    os.environ[_BATCHING] = str(not batching)
    with warnings.catch_warnings(action="ignore"):
        import torchsnapshot

        yield torchsnapshot
    if before is None:
        del os.environ[_BATCHING]
    else:
        os.environ[_BATCHING] = before


def _state(torchsnapshot: Any, mine: Work, tensors: Tensors, *, axis: int) -> dict[str, Any]:
    shards = tensors if mine.ranks == 1 else {key: _sharded(mine, one, axis) for key, one in tensors.items()}
    return {"tensors": torchsnapshot.StateDict(**shards)}


def _sharded(mine: Work, tensor: torch.Tensor, axis: int) -> ShardedTensor:
    sizes, offsets = list(tensor.shape), [0, 0]
    offsets[axis] = mine.rank * sizes[axis]
    whole = [size * (mine.ranks if number == axis else 1) for number, size in enumerate(sizes)]
    return init_from_local_shards([Shard.from_tensor_and_offsets(tensor, offsets, mine.rank)], whole)


def _local(value: Any) -> torch.Tensor:
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value
