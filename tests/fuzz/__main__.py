"""Fuzzes one format for some time, coverage-guided: `python -m tests.fuzz zarr --minutes 30`."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.slots import FORMATS, seed_inputs, slots
from tests.fuzz.targets import try_input

OPTIONS = ["-max_len=16384", "-timeout=30", "-rss_limit_mb=3000", "-print_final_stats=1", "-verbosity=1"]


def main() -> int:
    """Run what the command line says, and return 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--minutes", type=float, default=30.0, help="wall time; 30 unless given")
    parser.add_argument("--folder", type=Path, default=Path("fuzz"), help="where corpus, findings and log go")
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer; 0: another one each time")
    parser.add_argument("--replay", type=Path, help="only try one input, and show what comes of it")
    given = parser.parse_args()
    if given.replay:
        data = given.replay.read_bytes()
        say(slots(given.format)[data[0] % len(slots(given.format))].name)
        say(f"{try_input(given.format, data)} calls gave a result")
        return 0
    if importlib.util.find_spec("atheris") is None:
        say("atheris is not installed: pip install 'shardtree[fuzz]'")
        return 2
    return run(given.format, given.minutes * 60, given.folder, given.seed)


def run(name: str, seconds: float, folder: Path, seed: int) -> int:
    """Fuzz for a time, starting again where the process died; returns 1 for any finding. Figures are in the logs."""
    corpus, findings = folder / "corpus" / name, folder / "findings"
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(exist_ok=True)
    for number, data in seed_inputs(name):
        (corpus / number).write_bytes(data)
    begin, runs, deaths = time.monotonic(), 0, 0
    while (left := seconds - (time.monotonic() - begin)) > 1:
        options = [*OPTIONS, f"-max_total_time={int(left)}", f"-seed={seed}", f"-artifact_prefix={findings / name}-"]
        command = [sys.executable, "-m", "tests.fuzz.worker", name, str(findings), *options, str(corpus)]
        log = folder / f"{name}.{runs}.log"
        with log.open("wb") as output:
            deaths += subprocess.run(command, stdout=output, stderr=output, check=False).returncode != 0
        runs += 1
        if b"INITED" not in log.read_bytes():
            break  # it can't even begin
    found = sorted(str(path) for path in findings.glob(f"{name}*/*.txt")) + sorted(map(str, findings.glob(f"{name}-*")))
    say("\n".join([f"{runs} runs, of which {deaths} died; libFuzzer's figures are in {folder}/{name}.*.log", *found]))
    return 1 if found or deaths else 0


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
