"""The law of kills for storages: a save that dies at any call leaves the old checkpoint, or the new one, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from ..checkpoint import is_checkpoint, load_common_state_dict, load_plain_tensors, save
from ..errors import StorageError
from ..mapping import ShardedTensor
from ..storage import Storage, can
from ..strategies import METADATA_FILE, LoadOptions, SaveOptions
from ._watched import Call, watched
from .conformance._files import ProcessDied, failing_storage


def said(error: Exception) -> str:
    """Return an error in one line; of what a law found, its text alone."""
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


_MOST_DEATHS = 20
OLD, _NEW = 1.0, 2.0


def _save(storage: Storage, value: float) -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value, device="cpu"))
    save({"w": shard, "step": value}, storage, overwrite=True, options=SaveOptions(stale_after=0.0, durable=False))


def _value_in(storage: Storage) -> float | None:
    """Return which checkpoint is there, having read all of it; None if there is none."""
    if not is_checkpoint(storage):
        return None
    (tensor,) = load_plain_tensors(storage, options=LoadOptions(verify="all")).values()
    value = float(load_common_state_dict(storage)["step"])
    assert tensor.tolist() == [[value] * 3] * 2, "the checkpoint is of two saves"
    return value


def deaths(
    new_storage: Callable[[], Storage], reopen: Callable[[Storage], Storage], before: float | None
) -> Iterator[str]:
    """Yield what is wrong after saves that die at calls of a storage, which has a checkpoint or is new."""

    def begun() -> Storage:
        storage = new_storage()
        if before is not None:
            _save(storage, before)
        return storage

    calls: list[Call] = []
    try:
        _save(watched(begun(), calls.append), _NEW)
    except Exception as error:
        yield f"nothing can be saved: {said(error)}"
    # A sample: each needs a save of its own.
    for call in calls[:: max(1, len(calls) // _MOST_DEATHS)]:
        try:
            _check_death(begun(), reopen, call.number, before)
        except Exception as error:
            yield f"at {call.method} of {call.name.rpartition('/')[2]!r}, {said(error)}"


def _check_death(storage: Storage, reopen: Callable[[Storage], Storage], number: int, before: float | None) -> None:
    with suppress(ProcessDied, StorageError):
        _save(failing_storage(storage, number), _NEW)
    found = _value_in(reopen(storage))
    assert found in (before, _NEW), f"{found} is there, not {before} or {_NEW}"
    _save(reopen(storage), _NEW)
    assert _value_in(reopen(storage)) == _NEW, "the next save isn't there"
    # Where a request of the dead save may still arrive, what it left stays for a while.
    names = [name for name in reopen(storage).names() if name != METADATA_FILE]
    assert len(names) == 1 or can(storage).late_requests, f"the next save leaves {names}"
