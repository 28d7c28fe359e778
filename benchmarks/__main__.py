"""Runs every benchmark, one after the other: ``python -m benchmarks``; options go to each of them."""

from __future__ import annotations

import sys

from . import roundtrip

BENCHMARKS = (roundtrip.main,)


def main(arguments: list[str] | None = None) -> int:
    return max(benchmark(arguments) for benchmark in BENCHMARKS)


if __name__ == "__main__":
    sys.exit(main())
