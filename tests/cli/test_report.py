"""`shardtree report`: one static page that says of a checkpoint, or of two, what the other commands say."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import shardtree as st
from shardtree.shell.table import base
from shardtree.strategies import StrategyAction
from tests.cli.checkpoints import ROOT, document, run, save_training_state
from tests.cli.test_verify_command import data_file, flip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step-100"
    save_training_state(folder)
    return folder


class Page(HTMLParser):
    """What a page shows: texts, and tables as rows of texts; a tag that isn't closed in its turn is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def report(*arguments: str | Path, status: int = 0) -> Page:
    with TemporaryDirectory() as scratch:
        out = Path(scratch) / "report.html"
        done = run("report", *arguments, "-o", out)
        assert done.exit_code == status, done.output
        assert done.stdout.endswith(f"written: {out}\n")
        html = out.read_text()
    assert "default-src 'none'" in html and not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    return Page(html)


def test_a_report_has_contents_sizes_and_the_verdict(folder: Path) -> None:
    page = report(folder)
    assert any(text.startswith(f"no damage found in {folder}: ") for text in page.texts)
    assert ["model.weight", "float32", "8 × 16", "2 × 2", "512 B"] in page.rows  # noqa: RUF001
    assert ["rng", "2 × 2", "4"] in [row[:3] for row in page.rows]  # noqa: RUF001
    assert ["  lr", "float", "0.001"] in page.rows
    assert ["rank", "bytes", "float32", "bfloat16", "int64"] in page.rows
    assert {"bytes by dtype", "bytes by rank"} <= set(page.texts)


def test_sizes_by_rank_are_those_of_all_tensors(folder: Path) -> None:
    rows = [row for row in report(folder).rows if row[0].startswith("rank ")]
    assert [row[0] for row in rows] == [f"rank {rank}" for rank in range(4)]
    assert sum(int(row[1].removesuffix(" B")) for row in rows) == 644  # as inspect says


def test_damage_has_status_1_and_is_shown(folder: Path) -> None:
    path = data_file(folder)
    flip(path, path.stat().st_size - 1)
    page = report(folder, status=1)
    assert f"{folder} is damaged in 1 file" in page.texts
    (row,) = (row for row in page.rows if row[0] == path.relative_to(folder).as_posix())
    assert row[1] == f"0 to {path.stat().st_size:,}" and "the hash of a block differs" in row[2]


def test_a_damaged_index_leaves_the_damage(folder: Path) -> None:
    flip(next(folder.rglob("index-*")), 200)
    page = report(folder, status=1)
    assert "The contents are not shown, since the checkpoint cannot be opened." in page.texts


def test_two_checkpoints_and_their_differences(folder: Path) -> None:
    other = folder.parent / "other"
    assert run("convert", folder, other, "--to", "zarr", "--cast", "bf16").exit_code == 0
    page = report(folder, other, status=1)
    assert ["model.weight", "float32 (8, 16)", "bfloat16 (8, 16)"] in page.rows
    assert ["model.weight", "float32", "8 × 16", "2 × 2", "whole"] in page.rows  # noqa: RUF001
    assert {"differences", "cut otherwise", "in A", "in B", "A: sizes", "B: sizes"} <= set(page.texts)


def test_equal_checkpoints_have_status_0(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "copy")
    page = report(folder, folder.parent / "copy")
    assert any("are equal, bit for bit" in text for text in page.texts) and "differences" not in page.texts


def test_without_verify_no_tensor_is_read(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "copy")
    for path in folder.rglob("*-of-*"):
        path.write_bytes(bytes(path.stat().st_size))
    page = report(folder, folder.parent / "copy", "--no-verify")
    assert f"{folder} was not checked for damage" in page.texts


def test_damage_keeps_values_from_being_compared(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "copy")
    flip(data_file(folder), data_file(folder).stat().st_size - 1)
    page = report(folder, folder.parent / "copy", status=1)
    assert "The checkpoints cannot be compared." in page.texts


def test_keys_are_text(tmp_path: Path) -> None:
    key = "<script>alert(1)</script>\x1b[2J"
    st.save({"w": st.ShardedTensor.from_rank_offsets(key, torch.ones(4))}, tmp_path / "hostile")
    page = report(tmp_path / "hostile")
    assert any("<script>alert(1)</script>\\x1b[2J" in text for text in page.texts)


def test_a_report_is_html(folder: Path) -> None:
    done = run("report", folder, "-o", "x.svg")
    assert done.exit_code == 2 and "should end in .html" in done.stderr


def test_files_of_torch_dist_are_those_of_ranks() -> None:
    folder = ROOT / "tests" / "fixtures" / "megatron_0161_tp2"
    opened = st.open_checkpoint(folder)
    for key in st.load_tensors_metadata(folder):
        layout = opened.stored_layout(key)
        assert {layout.files[file] for file in layout.columns.rank} <= {"__0_0.distcp", "__1_0.distcp"}
    pieces = document("inspect", folder, "--layout", "uneven.weight")["pieces"]
    for piece in pieces:
        assert (folder / piece["file"]).read_bytes()[piece["byte"] :][:4] == b"PK\x03\x04"
    rows = [row[0] for row in report(folder).rows]
    assert {"rank", "rank 0", "rank 1"} <= set(rows)


def test_a_format_without_a_check_says_what_was_not_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(base._rows, (StrategyAction.VERIFY, "safetensors", 1))
    out = folder.parent / "r.html"
    done = run("report", folder, "-o", out)
    assert done.exit_code == 2
    assert f"shardtree report: {folder} was not checked for damage, since its format cannot be." in done.stderr
    assert "no strategy for verify" in done.stderr and "--no-verify" in done.stderr
    assert done.stdout.endswith(f"written: {out}\n") and "model.weight" in out.read_text()
    assert run("report", folder, "-o", out, "--no-verify").exit_code == 0
