"""A stdout that can't be written, help that is whole at any width, and names near those of commands."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch
import typer

import shardtree as st
from shardtree.cli._app import app
from shardtree.cli._output import Output
from tests.cli.checkpoints import process, run

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WITH_SERIES = {**COMMANDS, **{f"series {name}": command for name, command in COMMANDS["series"].commands.items()}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    st.save([st.ShardedTensor.from_rank_offsets(f"{'key' * 20}{n}", torch.zeros(1)) for n in range(2000)], path)
    return path


DEMO = ["demo", "--ranks", "1", "--load-ranks", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[], ["--help"], ["--version"], ["convert", "-h"], ["inspect"], ["inspect", "--json"], ["verify"], DEMO]
)
def test_a_full_stdout_is_trouble_in_one_line_and_a_closed_one_is_quiet(folder: Path, words: list[str]) -> None:
    """Status 1 would say that a checkpoint is damaged, or differs."""
    takes_folder = words[:1] in (["inspect"], ["verify"])
    words = [*words[:1], *([str(folder)] if takes_folder else []), *words[1:]]
    full = process(*words, shell="> /dev/full")
    assert (full.returncode, full.stderr) == (2, "shardtree: stdout cannot be written: No space left on device\n")
    closed = process(*words, shell="| true")
    assert closed.returncode in (0, 141) and closed.stderr == ""  # 0 where all was written before the reader left


def test_a_closed_pipe_is_the_systems_error() -> None:
    """Without a number it would count as an error of ours, and end in a traceback and status 1."""
    with pytest.raises(BrokenPipeError) as caught:
        Output().on_broken_pipe()
    assert caught.value.errno == errno.EPIPE


@pytest.mark.slow
@pytest.mark.parametrize("width", ["40", "60", "80", "200"])
def test_help_cuts_no_name_of_an_option_and_no_command(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for name, command in WITH_SERIES.items():
        text = run(*name.split(), "--help").stdout
        words = set(re.split(r"[\s,]+", text))
        assert {option for one in command.params for option in one.opts if option.startswith("--")} <= words, name
        assert "…" not in text
    listed = run("--help").stdout
    assert " ".join(COMMANDS["plan"].get_short_help_str(1000).split()) in " ".join(listed.split())


def test_without_a_command_help_is_printed() -> None:
    alone = run()
    assert alone.exit_code == 0 and alone.stdout == run("--help").stdout and alone.stderr == ""


def test_a_name_near_a_command_is_told() -> None:
    done = run("inspct", "x")
    assert done.exit_code == 2 and "No such command 'inspct'. Did you mean 'inspect'?" in done.stderr
