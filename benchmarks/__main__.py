"""Runs the benchmarks, one after the other: ``python -m benchmarks``; some: ``python -m benchmarks maps opening``."""

from __future__ import annotations

import sys
from importlib import import_module

from ._measuring import finish, parser, print_bars, settings_of

BENCHMARKS = (
    "imports",
    "maps",
    "opening",
    "planning",
    "trace",
    "thousands",
    "small",
    "limit",
    "memory",
    "convert",
    "optimizers",
    "async_save",
    "device",
    "remote",
    "roundtrip",
)
"""Those that have bars, the longest last."""


def main(arguments: list[str] | None = None) -> int:
    """Run them; returns 0, whatever the figures, unless ``--strict`` is given and a bar is missed."""
    asked = parser("benchmarks", __doc__)
    asked.add_argument("names", nargs="*", default=BENCHMARKS, help=f"some of {', '.join(BENCHMARKS)}; all")
    options = asked.parse_args(arguments)
    settings = settings_of(options)
    found = [bar for name in options.names for bar in import_module(f".{name}", __package__).bars(settings)]
    print_bars("All bars", [bar for bar in found if bar.most is not None], settings.console)
    return finish(found, options)


if __name__ == "__main__":
    sys.exit(main())
