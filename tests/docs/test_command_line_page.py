"""docs/command-line.md: each command prints what stands there, but for numbers, and each option is on the page."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shardtree.cli._app import app
from tests.quick_python.command import quick_python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command-line.md").read_text()
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def shape(output: str) -> list[str]:
    """Return lines without what another run prints otherwise: numbers, names of saves, and the room for them."""
    for pattern, sign in ((r"save-\w+-\w+", "save"), (r"\d[\d,.]*", "#"), (r"─+", "─"), (r" +", " ")):
        output = re.sub(pattern, sign, output)
    return [line.strip() for line in output.splitlines()]


def printed(command: str) -> str:
    """Return what a command prints to stdout: in this process, unless it needs a shell."""
    words = shlex.split(command)
    if words[0] == "shardtree" and not set(words) & {"|", ">"}:
        return CliRunner().invoke(app, words[1:], catch_exceptions=False).stdout
    script = f'shardtree() {{ {shlex.join(quick_python())} -m shardtree "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_every_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    for code in PYTHON.findall(PAGE):
        exec(code, namespace)
    steps = [found for block in CONSOLE.findall(PAGE) for found in PROMPT.findall(block)]
    assert len(steps) > 8
    for command, expected in steps:
        assert shape(printed(command)) == shape(expected), command


def test_the_page_names_every_command_and_every_option() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    commands |= {f"series {name}": command for name, command in commands["series"].commands.items()}
    for name, command in commands.items():
        assert f"`shardtree {name} " in PAGE or f"`shardtree {name}`" in PAGE
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert [option for option in options if f"`{option}" not in PAGE] == []


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "convert", "explain", "plan", "series prune"])
def test_help_shows_an_example_and_the_exit_status(command: str) -> None:
    text = CliRunner().invoke(app, [*command.split(), "--help"], catch_exceptions=False).stdout
    assert f"Example: shardtree {command} " in text
    assert "Exit status" in text


def test_another_shape_is_found() -> None:
    assert shape("a  1.5 kB\n──") == shape("a 12 kB\n────") != shape("b 12 kB\n────")
