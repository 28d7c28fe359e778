"""Every entry point on checkpoints whose numbers are absurd, in a process of bounded memory.

    python -m tests.faults.absurd_numbers FORMAT COUNT SEED [PART PARTS]

It prints a line for each call that took too much, or raised an error that isn't shardtree's.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from typer.testing import CliRunner

import shardtree as st
from shardtree.cli._app import app
from shardtree.errors import CheckpointingException
from tests.faults.wrong_values import with_absurd_numbers
from tests.fuzz.seeds import Files
from tests.fuzz.slots import slots

MOST_SECONDS = 30.0
"""Of processor time for a call; nearly all take hundredths, and planning 2**16 pieces a few seconds."""

MOST_BYTES = 1_500_000_000
"""By which the process may grow; that much isn't there for a tensor of 2**31 elements."""


def entry_points(folder: Path, elsewhere: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every way to read a checkpoint, with targets as large as it claims to be."""

    def target() -> dict[str, Any]:
        found = st.load_sharded_metadata(folder)
        return {key: shard for key, shard in found.items() if isinstance(shard, st.ShardedTensor)}

    def lazily() -> None:
        tree = st.open_checkpoint(folder)
        for key in tree:
            value = tree[key]
            if isinstance(value, st.ShardedTensor):
                value.data[tuple(slice(0, 1) for _ in value.data.shape)].read()

    yield "is_checkpoint", lambda: st.is_checkpoint(folder)
    yield "load_sharded_metadata", lambda: repr(st.load_sharded_metadata(folder))
    yield "load_common_state_dict", lambda: st.load_common_state_dict(folder)
    yield "load_plain_tensors", lambda: st.load_plain_tensors(folder)
    yield "load", lambda: st.load(target(), folder)
    yield "explain", lambda: repr(st.explain(target(), folder))
    yield "open_checkpoint", lazily
    yield "draw", lambda: repr(st.draw(st.open_checkpoint(folder)))
    yield "verify", lambda: st.verify(folder)
    yield "compare", lambda: st.compare(folder, folder)
    yield "fingerprint", lambda: st.fingerprint(folder)
    yield "convert", lambda: st.convert(folder, elsewhere, backend="safetensors", save_options=QUICK)
    for name, *rest in (["inspect"], ["picture"], ["diff", str(folder)], ["report", "-o", f"{elsewhere}.html"]):
        yield f"command {name}", lambda name=name, rest=rest: command(name, str(folder), *rest)


QUICK = st.SaveOptions(durable=False)


def command(*arguments: str) -> None:
    """Run a command, which says itself what can't be read."""
    CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def problems(files: Files) -> Iterator[str]:
    """Yield what is wrong with each call on a checkpoint."""
    with TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        for name, call in entry_points(folder, Path(place) / "elsewhere"):
            begin = time.process_time()
            try:
                call()
            except CheckpointingException:
                pass
            except Exception as error:
                frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "shardtree" in frame.filename]
                yield f"{name}: {type(error).__name__} {str(error)[:100]} ({frames[-1].filename}:{frames[-1].lineno})"
            seconds = time.process_time() - begin
            if seconds > MOST_SECONDS:
                yield f"{name}: {seconds:.1f} s"


def main(format_name: str, count: int, seed: int, part: int = 0, parts: int = 1) -> None:
    """Try some changes of a format's checkpoints; all of them, or a part of all, where the count is 0."""
    logging.disable()
    warnings.simplefilter("ignore")
    cases = [(slot, what, data) for slot in slots(format_name) for what, data in with_absurd_numbers(slot)]
    chosen = Random(seed).sample(cases, count) if 0 < count < len(cases) else cases[part::parts]
    for found in problems(slots(format_name)[0].files(slots(format_name)[0].seed)):
        sys.stdout.write(f"sound: {found}\n")
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))
    for slot, what, data in chosen:
        for found in problems(slot.files(data)):
            sys.stdout.write(f"{what}: {found}\n")
            sys.stdout.flush()
    sys.stdout.write(f"tried {len(chosen)} of {len(cases)}\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
