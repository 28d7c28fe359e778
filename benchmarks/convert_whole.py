"""All 1.37 TB of DeepSeek-V3, there and back, killed on the way: ``python -m benchmarks.convert_whole --dir /dev/shm``.

Its files are sparse. It goes from Hugging Face's format to torch_dist, cut for TP 8, PP 16 and EP 64, and back, into
folders that hash what they are given and drop zeros. The first conversion is killed as often as is asked for, when it
has written about as much each time, and goes on. Then the fingerprints of all three have to be equal, each computed
from its files alone.

On a file system whose holes take no pages of memory to read (tmpfs) that is the speed of processors. But pieces of rows
are read through mappings, which fill holes there: each way takes about 18 GB of a tmpfs. With --there only the first
is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import shardtree as st

from ._bars import Bar, Settings, finish, parser, print_bars, settings_of
from ._deepseek import SMALL, TRAINING, Config, make_folder, nbytes_of, shapes_of
from ._sparse import SparseFolder
from .convert import BACK, BATCH, MOST_MIB, TO

Told = tuple[float, float]
"""Of one process: how many seconds it ran, and the MiB that were resident at its peak."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 0 unless ``--strict`` is given and a bar is missed."""
    asked = parser("benchmarks.convert_whole", __doc__)
    asked.add_argument("--kills", type=int, default=50, help="how often the first conversion is killed")
    asked.add_argument("--there", action="store_true", help="leave out the way back")
    options = asked.parse_args(arguments)
    settings = settings_of(options)
    return finish(bars(settings, options.kills, ["there"] if options.there else ["there", "back"]), options)


def bars(settings: Settings, kills: int, ways: list[str]) -> list[Bar]:
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
        ran = {"there": [there(until=size // (kills + 2)) for _ in range(kills)] + [there()]}
        if "back" in ways:
            ran["back"] = [_through(folder, "there", "back", BACK, batch)]
        summed = {name: _fingerprints(folder / name) for name in ("model", *ways)}
    of = f"{len(shapes):,} tensors, {size / 1e12:.3g} TB"
    memory = max(mib for runs in ran.values() for _, mib in runs)
    found = [
        *(
            _bar(f"{of}: {name}, killed {len(runs) - 1} times", sum(now for now, _ in runs))
            for name, runs in ran.items()
        ),
        *(_bar(f"{of}: fingerprints of the files, {name}", seconds) for name, (seconds, _) in summed.items()),
        Bar(f"{of}: memory", "", memory, None, memory, MOST_MIB, "MiB"),
    ]
    print_bars("A whole model", found, settings.console)
    changed = [name for name, (_, numbers) in summed.items() if numbers != summed["model"][1]]
    if changed:
        raise ValueError(f"what is in {changed} isn't what was sent")
    return found


def _fingerprints(folder: Path) -> tuple[float, dict[str, int]]:
    begin = time.perf_counter()
    found = st.fingerprint(folder)
    return time.perf_counter() - begin, found


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
    return seconds, float((folder / "told").read_text())


def _convert(source: str, sink: str, backend: tuple[str, int], batch: int, until: int | None, told: Path) -> None:
    def count(nbytes: int) -> None:
        nonlocal until
        if until is not None:
            until -= nbytes
            if until < 0:
                told.write_text(f"{_peak_mib()}")
                os.kill(os.getpid(), signal.SIGKILL)

    st.convert(
        source,
        SparseFolder(sink),
        backend=backend,
        layout=TRAINING if backend == TO else None,
        leave_out=["common"] if backend == TO else [],
        max_bytes_in_flight=batch,
        verify=False,
        save_options=st.SaveOptions(durable=False, progress=count),
    )
    told.write_text(f"{_peak_mib()}")


def _peak_mib() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
