"""Orbax as a contender: as its documentation begins, and with the settings that were fastest here.

Orbax saves arrays, so tensors are given to it as NumPy arrays of the same memory, and what it loads is shown as tensors
without a copy. It has no load into memory that is given, so that is a load and a copy, as with safetensors.

Nobody here waits for the medium. TensorStore, which writes Orbax's files, syncs each of them (20 times for five
arrays, counted at the system call), and Orbax has no setting for it, so the base of its TensorStore contexts is told
``file_io_sync: false``: for both rows.

Tried for the fastest, with 200 MB in 20 arrays: of version 0's PyTreeCheckpointHandler without compression, OCDBT or a
file for each chunk, Zarr 2 or 3, 1, 2, 4 or 128 files at a time, chunks of 2 MiB, NumPy or JAX arrays; of version 1's
API, OCDBT or not, 1, 2 or 128 files. It is version 1's with its own OCDBT and 128 files, without compression, and
without its copy of every array before it saves: 0.10 s, beside 0.14 to 0.38 s for version 0's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ._contenders import LOAD, LOAD_NEW, Contender
from ._work import Tensors, Work

DEFAULT, BEST = "Orbax", "Orbax, tuned"
NAMES = (DEFAULT, BEST)
TERMS = {
    DEFAULT: "StandardCheckpointer; compresses, so it writes fewer bytes of regular data; told not to sync",
    BEST: "its version 1 API, no compression, no copy before saving; told not to sync",
}
ONE_PROCESS = "Orbax joins processes by jax.distributed alone: measured in one process"


def missing(ranks: int) -> str:
    """Return why there is no row with that many processes; empty where there is one."""
    if not find_spec("orbax"):
        return "not installed: pip install orbax-checkpoint==0.12.8"
    return ONE_PROCESS if ranks > 1 else ""


def contenders(ranks: int) -> tuple[Contender, ...]:
    """Return both rows, or none where `missing` says why."""
    if missing(ranks):
        return ()
    return _contender(DEFAULT, _save, _load), _contender(BEST, _tuned_save, _tuned_load)


def _contender(name: str, save: Callable[[Any, Path], None], load: Callable[[Any, Path], Any]) -> Contender:
    def given(mine: Work, folder: Path) -> Tensors:
        for key, tensor in new(mine, folder).items():
            mine.targets[key].copy_(tensor)
        return mine.targets

    def new(mine: Work, folder: Path) -> Tensors:
        return _tensors(load(_arrays(mine.rows), _path(folder)), mine.rows)

    def saved(mine: Work, folder: Path) -> None:
        save(_arrays(mine.rows), _path(folder))

    return Contender(name, saved, {(LOAD, name): given, (LOAD_NEW, name): new}, _trim)


def _trim() -> None:
    """Give the system back what was freed: a third of what was loaded stays in the heaps of Orbax's threads."""
    ctypes.CDLL(None).malloc_trim(0)


def _path(folder: Path) -> Path:
    return folder / "orbax"  # it must not be there yet


def _save(arrays: Any, path: Path) -> None:
    checkpointer = _checkpointer()
    checkpointer.save(path, arrays)
    checkpointer.wait_until_finished()


def _load(like: Any, path: Path) -> Any:
    return _checkpointer().restore(path, like)


def _tuned_save(arrays: Any, path: Path) -> None:
    with _context():
        _version_one().save(path, arrays)


def _tuned_load(like: Any, path: Path) -> Any:
    with _context():
        return _version_one().load(path, like)


@cache
def _checkpointer() -> Any:
    _told_not_to_sync()
    import orbax.checkpoint

    return orbax.checkpoint.StandardCheckpointer()


@cache
def _version_one() -> Any:
    _told_not_to_sync()
    import orbax.checkpoint.experimental.v1

    return orbax.checkpoint.experimental.v1


def _context() -> Any:
    context = _version_one().Context()
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False
    return context


def _told_not_to_sync() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from orbax.checkpoint._src.serialization import tensorstore_utils

    for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
        context["file_io_sync"] = False


# bfloat16 is known to torch and to ml_dtypes, but not to NumPy: it goes over as its bits.


def _arrays(tensors: Tensors) -> dict[str, Any]:
    import ml_dtypes

    return {
        name: tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in tensors.items()
    }


def _tensors(arrays: dict[str, Any], like: Tensors) -> Tensors:
    return {name: _tensor(array, like[name].dtype) for name, array in arrays.items()}


def _tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.view("int16")).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(array)
