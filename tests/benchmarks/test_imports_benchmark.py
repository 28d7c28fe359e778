"""The benchmark of imports runs, times what it says, and refuses a process in which torch is loaded already."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import imports


@pytest.mark.slow
def test_it_tells_each_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert imports.main(["--quick", "--json", str(tmp_path / "numbers.json")]) == 0
    whole, own, rest = json.loads((tmp_path / "numbers.json").read_text())
    assert (whole["operation"], whole["beside"], whole["most"]) == (imports.TOGETHER, imports.ALONE, imports.MOST)
    assert whole["ours"] > own["ours"] > 0 and whole["other"] > 0 and rest["ours"] > 0
    assert whole["figure"] == pytest.approx(whole["ours"] - whole["other"])
    assert "ms more" in capsys.readouterr().out


def test_the_figure_is_the_median_difference() -> None:
    measured = [([1000.0], [1000.0, 40.0, 200.0]), ([2000.0], [2000.0, 80.0, 400.0]), ([1000.0], [1010.0, 50.0, 300.0])]
    whole, own, rest = imports._rows(measured)
    assert (whole.figure, own.figure, rest.figure) == (60.0, 50.0, 300.0)
    assert whole.passed


def test_what_is_loaded_already_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        imports._timed("import no_such_module")
    assert "no_such_module" in caught.value.stderr
    code = "import sys, numpy\n" + imports._CHILD
    done = subprocess.run([imports.sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "already loaded: {'numpy'}" in done.stderr
