"""Hints of errors in the shell's words: a keyword becomes the command's own option, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardtree.cli._app import app
from shardtree.cli._command import FORMATS, shell_words
from shardtree.shell.table import formats_with
from shardtree.strategies import StrategyAction, default_strategies
from tests.cli.checkpoints import run

OPTIONS = {
    "allow_pickle": "--allow-pickle",
    "backend": "--to BACKEND",
    "cast": "--cast DTYPE",
    "leave_out": "--leave-out PATTERN",
    "max_bytes": "--max-bytes SIZE",
    "no_verify": "--no-verify",
}


@pytest.mark.parametrize(
    ("library", "shell"),
    [
        ("Pass options=LoadOptions(allow_pickle=True) if you do.", "Pass --allow-pickle if you do."),
        ("SaveOptions(allow_pickle=True) stores it.", "--allow-pickle stores it."),
        ("leave_out=['common', 'a b'] does", "--leave-out common --leave-out 'a b' does"),
        ("name them with leave_out=[...], or", "name them with --leave-out PATTERN, or"),
        ("convert: leave_out names", "convert: --leave-out names"),
        ("verify=False skips it", "--no-verify skips it"),
        ("pass backend='zarr'.", "pass --to zarr."),
        ("pass backend=('zarr', 3).", "pass --to zarr:3."),
        ("max_bytes=100 or max_bytes=...", "--max-bytes 100 or --max-bytes SIZE"),
    ],
)
def test_a_keyword_is_the_option_of_its_name(library: str, shell: str) -> None:
    assert shell_words(library, OPTIONS) == shell


@pytest.mark.parametrize(
    "text",
    [
        "with cast=True to convert.",  # the option takes a dtype, and is another thing
        "verify=True checks it",
        "'a.leave_out.b' at tree['leave_out']",
        "leave_out_names",
    ],
)
def test_what_is_no_option_stays(text: str) -> None:
    assert shell_words(text, OPTIONS) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("or pass strategies=.", "strategies"),
        ("in LoadOptions(types=(...)).", "LoadOptions"),
        ("Pass names=, in order.", "names"),
    ],
)
def test_what_the_command_has_no_option_for_is_said(text: str, name: str) -> None:
    said = f"{name} is for a call from Python: this command has no option for it."
    assert shell_words(text, OPTIONS) == f"{text}\n  {said}"


def test_outside_of_a_command_nothing_changes() -> None:
    assert shell_words("verify=False", {}) == "verify=False"


def test_flags_have_no_type_in_the_help() -> None:
    for command in ("--help", "convert", "plan"):
        text = run(*[command, "--help"][command == "--help" :]).stdout
        assert "<bool>" not in text and "--help" in text
    assert app.info.help


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "convert --help",
        "explain --help",
        "punch",
        "inspect",
        "convert a --to",
        "verify --nothing a",
        "series",
        "series prune --help",
        "series prune run",
        "series pin run x",
    ],
)
def test_help_and_wrong_usage_need_not_wait_for_torch(words: str) -> None:
    code = (
        "import sys, shardtree.cli; sys.argv[1:] = sys.argv[1].split()\n"
        "try: shardtree.cli.main()\n"
        "except SystemExit: pass\n"
        "print(*('LOADED' for name in ('torch', 'numpy', 'optree') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, words], capture_output=True, text=True, check=True)
    assert "LOADED" not in done.stdout


def test_help_names_the_formats_that_can_be_written() -> None:
    ours = formats_with(StrategyAction.SAVE_SHARDED, strategies=default_strategies)
    assert ", ".join(name for name, _ in ours) == FORMATS
