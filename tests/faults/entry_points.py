"""Every way to read, compare, convert and change a checkpoint: what is called on checkpoints that somebody made bad."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner

import shardtree as st
from shardtree.cli._app import app
from shardtree.interop.dcp import CheckpointReader

Calls = Iterator[tuple[str, Callable[[], Any]]]


def entry_points(folder: Path, elsewhere: Path, sound: Path | None = None) -> Calls:
    """Yield a name and a call for each way, command lines included; what changes the checkpoint comes last.

    Args:
        folder: of the checkpoint.
        elsewhere: what is written goes there, and beside it under longer names.
        sound: another one, to compare with.
    """
    yield from ways_to_read(folder)
    yield "convert", partial(st.convert, folder, elsewhere, backend="zarr", save_options=QUICK)
    commands = [["inspect"], ["inspect", "--json"], ["verify"], ["diff", str(folder)], ["picture"]]
    commands += [["report", "-o", f"{elsewhere}.html"], ["convert", f"{elsewhere}-2", "--to", "safetensors"]]
    if sound is not None:
        yield "compare with a sound one", partial(st.compare, sound, folder)
        commands += [["diff", str(sound)]]
    for name, *rest in commands:
        yield f"command {name}{' --json' * ('--json' in rest)}", partial(command, name, str(folder), *rest)
    yield "remove_sharded_tensors", partial(st.remove_sharded_tensors, folder, "w")
    yield "remove_sharded_tensors, all", partial(st.remove_sharded_tensors, folder, "")
    yield "save", partial(st.save, {"step": 8}, folder, overwrite=True, options=QUICK)


def ways_to_read(place: Path | st.storage.Storage) -> Calls:
    """Yield a name and a call for each way to read a checkpoint, in a folder or in any storage."""

    def load() -> Any:
        """Load with a target as large as the checkpoint claims to be."""
        return st.load({"leaves": list(st.load_sharded_metadata(place).values())}, place)

    def some_values() -> list[Any]:
        """Read an element of each of the first tensors, whatever the hashes say."""
        tree = st.open_checkpoint(place, options=st.LoadOptions(verify=None))
        shards = [tree[key] for key in list(tree)[:100]]
        tensors = [shard.data for shard in shards if isinstance(shard, st.ShardedTensor)]
        return [data[tuple(slice(0, 1) for _ in data.shape)].read() for data in tensors[:8]]

    def dcp_load() -> None:
        """Load by DCP all plain values and objects, and some tensors."""
        with warnings.catch_warnings(action="ignore"):  # of one process; of values that aren't read
            entries = CheckpointReader(place).read_metadata().state_dict_metadata
            sizes = {name: getattr(entry, "size", None) for name, entry in entries.items()}
            small = [(name, size) for name, size in sizes.items() if size is None or size.numel() < 10**6][:100]
            state = {name: None if size is None else torch.zeros(size) for name, size in small}
            try:
                dcp.load(state, storage_reader=CheckpointReader(place))
            except CheckpointException as error:
                raise next(iter(error.failures.values()))[0] from None

    yield "is_checkpoint", partial(st.is_checkpoint, place)
    yield "load", load
    yield "load of nothing", partial(st.load, {}, place)
    yield "load_sharded_metadata", lambda: repr(list(st.load_sharded_metadata(place).items()))
    yield "load_tensors_metadata", lambda: list(st.load_tensors_metadata(place).items())
    yield "load_common_state_dict", partial(st.load_common_state_dict, place)
    yield "load_content_metadata", partial(st.load_content_metadata, place)
    yield "load_plain_tensors", partial(st.load_plain_tensors, place)
    yield "open_checkpoint", some_values
    yield "common", lambda: st.open_checkpoint(place).common()
    yield "verify", partial(st.verify, place)
    yield "compare", partial(st.compare, place, place)
    yield "fingerprint", partial(st.fingerprint, place)
    yield "explain", lambda: repr(st.explain(dict(st.load_sharded_metadata(place)), place))
    yield "dcp.load", dcp_load
    yield "draw", lambda: repr(st.draw(st.open_checkpoint(place)))


QUICK = st.SaveOptions(durable=False)


def command(*arguments: str) -> None:
    """Run a command; nothing that it prints steers a terminal, and no traceback comes out."""
    output = CliRunner().invoke(app, list(arguments), catch_exceptions=False).output
    assert "\x1b" not in output and "Traceback" not in output
