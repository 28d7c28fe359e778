"""Opening large checkpoints, and reading a little out of them: ``python -m benchmarks.opening``.

Names, shapes and dtypes of 100,000 tensors, beside the header of one safetensors file of the same; checkpoints of one
and two million chunks; `.metadata` of torch_dist and DCP of up to a million chunks, beside ``pickle``; a Hugging Face
model of 50,000 tensors; a few rows of a tensor of 1 GiB, beside raw reads of the same rows into new tensors; and a 64th
of its rows, beside DCP, which reads the whole: in one process, for the DTensor of one of 64 ranks of a group that does
nothing. Files are in the page cache. Rows are read at places that no read before was near.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ._bars import Bar, Settings, print_bars, run
from ._opening_formats import metadata_bars, model_bars
from ._opening_keys import chunk_bars, key_bars
from ._opening_rows import large_bars

PARTS = {
    "Names, shapes and dtypes": key_bars,
    "Millions of chunks": chunk_bars,
    "Other formats' metadata": metadata_bars,
    "A Hugging Face model": model_bars,
    "Little of a large tensor": large_bars,
}


def bars(settings: Settings) -> list[Bar]:
    """Return all bars of opening, a table printed for each kind."""
    found = []
    for title, measure in PARTS.items():
        with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-benchmark-") as folder:
            rows = measure(settings, Path(folder))
        print_bars(title, rows, settings.console)
        found += rows
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 0, whatever the figures, unless ``--strict`` is given and a bar is missed."""
    return run(bars, arguments, "benchmarks.opening", __doc__)


if __name__ == "__main__":
    sys.exit(main())
