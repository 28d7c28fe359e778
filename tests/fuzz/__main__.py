"""Fuzzes one format for some time, coverage-guided: `python -m tests.fuzz zarr --minutes 30`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
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
        say("atheris isn't installed: pip install 'shardtree[fuzz]'")
        return 2
    return run(given.format, given.minutes * 60, given.folder, given.seed)


def run(name: str, seconds: float, folder: Path, seed: int) -> int:
    """Fuzz for a time, starting again where the process died, and print the figures; returns 1 for any finding."""
    corpus, findings, log = folder / "corpus" / name, folder / "findings", folder / f"{name}.log"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in seed_inputs(name):
        (corpus / number).write_bytes(data)
    begin, deaths, figures = time.monotonic(), 0, []
    while (left := seconds - (time.monotonic() - begin)) > 1:
        options = [*OPTIONS, f"-max_total_time={int(left)}", f"-seed={seed}", f"-artifact_prefix={findings / name}-"]
        findings.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.fuzz.worker", name, str(findings), *options, str(corpus)]
        with log.with_suffix(f".{len(figures)}.log").open("wb") as output:
            deaths += subprocess.run(command, stdout=output, stderr=output, check=False).returncode != 0
        figures.append(read_log(log.with_suffix(f".{len(figures)}.log").read_text(errors="replace")))
        if not figures[-1]["inputs"]:
            break  # it can't even begin
    found = sorted(str(path) for path in findings.glob(f"{name}*/*.txt")) + sorted(map(str, findings.glob(f"{name}-*")))
    say(json.dumps(summary(name, figures, time.monotonic() - begin) | {"deaths": deaths, "findings": found}))
    return 1 if found or deaths else 0


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read_log(text: str) -> dict[str, int]:
    """Return libFuzzer's figures: inputs tried, edges and features reached, inputs kept."""
    last = re.findall(r"^#(\d+)\t\w+ +cov: (\d+) ft: (\d+) corp: (\d+)/", text, re.MULTILINE)
    done = re.search(r"stat::number_of_executed_units: *(\d+)", text)
    inputs, edges, features, kept = map(int, last[-1] if last else (0, 0, 0, 0))
    return {"inputs": int(done[1]) if done else inputs, "edges": edges, "features": features, "kept": kept}


def summary(name: str, figures: list[dict[str, int]], seconds: float) -> dict[str, str | float]:
    """Return one line of figures for all runs of a format."""
    times = os.times()
    most = {key: max(figure[key] for figure in figures) for key in ("edges", "features", "kept")}
    spent = {"minutes": round(seconds / 60, 1), "cpu_minutes": round((times[2] + times[3]) / 60, 1)}
    return {"format": name, "inputs": sum(figure["inputs"] for figure in figures), **most, **spent}


if __name__ == "__main__":
    sys.exit(main())
