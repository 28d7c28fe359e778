"""The scripts and changes of docs/in-your-trainer.md, and the script with which docs/fsdp2.md begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardtree as st
from tests.docs.test_blocks import fences
from tests.docs.test_fsdp2 import ROOT, SCRIPTS, finished, killed, resumed, start

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.peers]

PAGE = ROOT / "docs" / "in-your-trainer.md"


@pytest.mark.parametrize(("number", "script"), [(0, "train_dcp_plug.py"), (1, "train_titan_plug.py")])
def test_the_change_is_at_most_five_lines_of_the_script(number: int, script: str) -> None:
    change = [code for _, language, code in fences(PAGE.read_text()) if language == "diff"][number]
    added = [line[1:] for line in change.splitlines() if line.startswith("+")]
    lines = (SCRIPTS / script).read_text().splitlines()
    assert 0 < len(added) <= 5 and set(added) <= set(lines)


def test_dcps_calls_go_on_on_three_processes_with_the_same_losses(tmp_path: Path) -> None:
    before = killed(start("train_dcp_plug.py", 2, tmp_path, 100_000), tmp_path)
    after = resumed("train_dcp_plug.py", 3, tmp_path, before)
    assert after == {step: pytest.approx(before[step], rel=1e-4) for step in after}
    steps = [path for path in tmp_path.iterdir() if st.is_checkpoint(path)]
    assert len(steps) > 1 and all(st.verify(step) == () for step in steps)


def test_uneven_rows_are_stored_where_dcp_refuses_them(tmp_path: Path) -> None:
    job = start("uneven_rows.py", 6, tmp_path, 0)
    output = finished(job)[1]
    (shown,) = re.findall(
        r"^\$ torchrun .* uneven_rows.py run\n(.*?)^```$", (ROOT / "docs" / "fsdp2.md").read_text(), re.M | re.S
    )
    assert [line for line in output.splitlines() if line.startswith(("dcp.", "st."))] == shown.splitlines(), output
