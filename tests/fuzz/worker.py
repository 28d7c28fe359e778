"""The process that atheris runs in: `python -m tests.fuzz.worker FORMAT FINDINGS [libFuzzer's options] CORPUS`."""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from random import Random


def fuzz(name: str, findings: Path, options: list[str]) -> None:
    """Feed inputs to a format's target until libFuzzer's options say stop; never returns."""
    atheris = importlib.import_module("atheris")  # has wheels for few platforms, so nothing else needs it
    with atheris.instrument_imports(include=["shardtree"]):
        importlib.import_module("shardtree")
        targets = importlib.import_module("tests.fuzz.targets")
    changed = importlib.import_module("tests.fuzz.mutators").changed
    seen: set[str] = set()

    def one(data: bytes) -> None:
        try:
            targets.try_input(name, data)
        except targets.Finding as finding:
            note(finding, data, findings / name, seen)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        made: bytes = changed(name, data, Random(seed), lambda body, _: bytes(atheris.Mutate(body, most - 1)))
        return made[:most]

    for _, data in importlib.import_module("tests.fuzz.slots").seed_inputs(name):
        with suppress(targets.Finding):  # once: what is imported late or made once is there then
            targets.try_input(name, data)
        targets.try_input(name, data)
    atheris.Setup(["fuzz", *options], one, custom_mutator=mutate)
    atheris.Fuzz()


def note(finding: BaseException, data: bytes, folder: Path, seen: set[str]) -> None:
    """Keep the first input of each kind of finding, and how it came about."""
    cause = finding.__cause__ or finding
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(cause.__traceback__)[-3:]]
    kind = re.sub(r"\d+", "0", str(finding)[:40]) + "".join(frames)
    if kind not in seen:
        seen.add(kind)
        path = folder / hashlib.sha256(kind.encode()).hexdigest()[:12]
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".txt").write_text("".join(traceback.format_exception(finding)))
            path.write_bytes(data)


def main(arguments: list[str]) -> None:
    """Fuzz what the command line says."""
    logging.disable()
    warnings.simplefilter("ignore")
    fuzz(arguments[0], Path(arguments[1]), arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
