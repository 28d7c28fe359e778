"""One target a format: a checkpoint that an input stands for is read in every way, and nothing bad may come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import shardtree as st
from shardtree.errors import CheckpointingException
from tests.shell.table.folders import folder_of

from .slots import checkpoint_of
from .watch import Growth, watched

MOST_SECONDS = 20.0
"""Of processor time, for all calls on one input: far above what sound ones take, so that only wrong growth fails."""

MOST_BYTES = 100_000_000
"""By which the process may grow, at its largest."""

CHARACTERS = 20_000
"""Of an error's message, at most."""

LARGEST = 2**26
"""Bytes. A zarr array may be larger than all its files: what says that it is larger than this isn't loaded."""


class Finding(Exception):
    """Something that must not happen did."""


@cache
def _begin_zarr() -> None:
    """Let the zarr package begin its event loop, whose sockets are no input's doing."""
    import zarr

    zarr.create_array(store=zarr.storage.MemoryStore(), shape=(1,), dtype="i1")


def try_input(name: str, data: bytes) -> int:
    """Read the checkpoint that an input stands for, and return how many of the calls gave a result.

    Raises:
        Finding: an error that isn't ours came out, a file or a program was touched, or it took too much.
    """
    files = checkpoint_of(name, data)
    if name == "zarr":
        _begin_zarr()
    sound = 0
    begin, grown = time.process_time(), Growth()
    with watched() as touched:
        for call in _calls(files, is_bounded=name != "zarr"):
            sound += _ends_well(call)
    seconds, growth = time.process_time() - begin, grown.most()
    if touched:
        raise Finding(f"touched {touched[:3]}")
    if seconds > MOST_SECONDS:
        raise Finding(f"took {seconds:.1f} s")
    if growth > MOST_BYTES:
        raise Finding(f"took {growth / 1e6:.0f} MB")
    return sound


def _ends_well(call: Callable[[], Any]) -> bool:
    try:
        call()
    except CheckpointingException as error:
        if len(str(error)) > CHARACTERS:
            raise Finding(f"a message of {len(str(error))} characters") from error
        return False
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {str(error)[:200]}") from error
    return True


def _calls(files: dict[str, bytes], *, is_bounded: bool) -> Iterator[Callable[[], Any]]:
    """Yield every way to read a checkpoint in memory, what changes it last."""
    storage = folder_of(files)
    yield lambda: st.is_checkpoint(storage)
    yield lambda: repr(list(st.load_sharded_metadata(storage).items()))
    yield lambda: repr(st.load_common_state_dict(storage))
    yield lambda: st.load_content_metadata(storage)
    yield lambda: st.verify(storage)
    if is_bounded or _declared(storage) <= LARGEST:
        yield lambda: st.load_plain_tensors(storage)
        yield lambda: _read_unchecked(storage)
    yield lambda: st.compare(storage, storage)
    yield lambda: st.remove_sharded_tensors(storage, "")


def _declared(storage: st.storage.MemoryStorage) -> int:
    """Return how many bytes a checkpoint's tensors have by what it says; 0 where it says nothing."""
    try:
        leaves = st.load_sharded_metadata(storage).values()
        return sum(_bytes(leaf) for leaf in leaves if isinstance(leaf, st.ShardedTensor))
    except CheckpointingException:
        return 0


def _bytes(shard: st.ShardedTensor) -> int:
    size = shard.dtype.itemsize
    for length in shard.global_shape:
        size *= length
    return size


def _read_unchecked(storage: st.storage.MemoryStorage) -> None:
    """Read the first values as they are, whatever their hashes say."""
    tree = st.open_checkpoint(storage, options=st.LoadOptions(verify=None))
    for key in islice(tree, 8):
        value = tree[key]
        if isinstance(value, st.ShardedTensor):
            value.data.read()
