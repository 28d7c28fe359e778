"""All 1.37 TB of DeepSeek-V3, there and back, killed on the way: ``python -m benchmarks.convert_whole --dir /dev/shm``.

Its files are sparse. It goes from Hugging Face's format to torch_dist, cut for TP 8, PP 16 and EP 64, and back, into
folders that hash what they are given and drop zeros. The first conversion is killed as often as is asked for, when it
has written about as much each time, and goes on; it isn't read back. The second is, and what comes back has to have the
fingerprints of the source, which are computed from its files alone.

On a file system whose holes take no pages of memory to read (tmpfs) that is the speed of processors.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import shardtree as st

from ._bars import Bar, Settings, finish, parser, print_bars, settings_of
from ._deepseek import SMALL, TRAINING, Config, make_folder, nbytes_of, shapes_of
from ._sparse import SparseFolder
from .convert import BACK, BATCH, MOST_MIB, TO

Told = tuple[float, float, str]
"""Of one process: how many seconds it ran, the MiB that were resident at its peak, and what it says of fingerprints."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 0 unless ``--strict`` is given and a bar is missed."""
    asked = parser("benchmarks.convert_whole", __doc__)
    asked.add_argument("--kills", type=int, default=50, help="how often the first conversion is killed")
    options = asked.parse_args(arguments)
    settings = settings_of(options)
    return finish(bars(settings, options.kills), options)


def bars(settings: Settings, kills: int) -> list[Bar]:
    """Return the bars of the whole model."""
    shapes = shapes_of(SMALL if settings.quick else Config())
    size = nbytes_of(shapes)
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-whole-") as where:
        folder = Path(where)
        make_folder(folder / "model", shapes, 3 if settings.quick else 163)
        for name in ("there", "back"):
            (folder / name).mkdir()
        batch = BATCH // 2**15 if settings.quick else BATCH
        there = partial(_through, folder, "model", "there", TO, batch)
        first = [there(until=size // (kills + 2)) for _ in range(kills)] + [there()]
        second = _through(folder, "there", "back", BACK, batch)
        begin = time.perf_counter()
        expected = _digest(st.fingerprint(folder / "model"))
        alone = time.perf_counter() - begin
    if second[-1] != expected:
        raise ValueError("what came back isn't what was sent")
    of = f"{len(shapes):,} tensors, {size / 1e12:.3g} TB"
    memory = max(mib for _, mib, _ in (*first, second))
    found = [
        _bar(f"{of}: to torch_dist, killed {kills} times", sum(seconds for seconds, *_ in first)),
        _bar(f"{of}: back, read back and compared", second[0]),
        _bar(f"{of}: the same fingerprints, of the source alone", alone),
        Bar(f"{of}: memory", "", memory, None, memory, MOST_MIB, "MiB"),
    ]
    print_bars("A whole model", found, settings.console)
    return found


def _bar(operation: str, seconds: float) -> Bar:
    return Bar(operation, "", seconds, None, seconds, None)


def _through(
    folder: Path, source: str, destination: str, backend: tuple[str, int], batch: int, until: int | None = None
) -> Told:
    """Convert in a process of its own, to the end or until it has written so many bytes and is killed."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    arguments = (str(folder / source), str(folder / destination), backend, batch, until, folder / "told")
    process = context.Process(target=_convert, args=arguments)
    begin = time.perf_counter()
    process.start()
    process.join()
    seconds = time.perf_counter() - begin
    if process.exitcode != (0 if until is None else -signal.SIGKILL):
        raise ValueError(f"a conversion ended with {process.exitcode}")
    mib, digest = json.loads((folder / "told").read_text())
    return seconds, mib, digest


def _convert(source: str, sink: str, backend: tuple[str, int], batch: int, until: int | None, told: Path) -> None:
    def tell(digest: str) -> None:
        told.write_text(json.dumps([_peak_mib(), digest]))

    def count(nbytes: int) -> None:
        nonlocal until
        if until is not None:
            until -= nbytes
            if until < 0:
                tell("")
                os.kill(os.getpid(), signal.SIGKILL)

    layout = TRAINING if backend == TO else None
    options = st.SaveOptions(durable=False, progress=count)
    how = {"layout": layout, "leave_out": ["common"] if backend == TO else [], "verify": backend == BACK}
    sizes = {"max_bytes_in_flight": batch, "save_options": options}
    tell(_digest(st.convert(source, SparseFolder(sink), backend=backend, **how, **sizes).fingerprints))


def _digest(fingerprints: Mapping[str, int]) -> str:
    return sha256(repr(sorted(fingerprints.items())).encode()).hexdigest()


def _peak_mib() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
