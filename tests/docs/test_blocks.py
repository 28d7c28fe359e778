"""Every Python block in docs/ runs: a page's blocks in order, in one namespace, in an empty folder.

Those of the README take up where their readers are, and are run by tests/docs/test_readme.py.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL
)
NOT_PYTHON = {"", "{eval-rst}", "{toctree}", "bash", "console", "diff", "json", "text", "toml", "yaml"}
SCRIPTS = {"job.py", "train_dcp.py", "train_shardtree.py"}  # which tests/docs/test_fsdp2.py runs
SCRIPTS |= {
    "train_dcp_plug.py",
    "train_titan_plug.py",
    "uneven_rows.py",
}  # of the page about trainers
SCRIPTS |= {"train_lightning.py"}  # which tests/docs/test_lightning_page.py runs
SCRIPTS |= {  # which tests/docs/test_huggingface_loops.py runs
    "accelerate_checkpoints.py",
    "train_accelerate.py",
    "train_trainer.py",
    "trainer_checkpoints.py",
}
SCRIPTS |= {"train_ray.py", "verl_manager.py"}  # tests/docs/test_ray_page.py runs the first; the second is run by hand
SCRIPTS |= {"train_until_told.py"}  # which tests/docs/test_told_to_stop.py runs
SCRIPTS |= {"train_zero1.py"}  # which docs/optimizer-states.md runs
SCRIPTS |= {"train_pipeline.py"}  # which tests/docs/test_pipeline_stages.py runs
SCRIPTS |= {"check_my_job.py"}  # which tests/docs/test_resume_page.py runs
SCRIPTS |= {"mpi_world.py", "ray_world.py"}  # which tests/docs/test_worlds_page.py runs
SCRIPTS |= {"megatron_gpt.py"}  # which tests/docs/test_megatron_page.py runs


def fences(text: str) -> list[tuple[int, str, str]]:
    """Return the fenced blocks as (line that the code begins on, language, code)."""
    return [
        (text[: found.start("code")].count("\n") + 1, found["language"].strip(), found["code"])
        for found in FENCE.finditer(text)
    ]


def run_block(code: str, line: int, name: str, namespace: dict[str, object]) -> None:
    """Run one block; where it has prompts, what it prints must be what stands there."""
    if not re.search(r"^ *>>> ", code, re.MULTILINE):
        # Empty lines above, so that a traceback shows the page's own line numbers.
        exec(compile("\n" * (line - 1) + code, name, "exec", dont_inherit=True), namespace)
        return
    test = doctest.DocTestParser().get_doctest(code, namespace, name, name, line - 1)
    test.globs = namespace  # get_doctest copies it
    doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)


def run_page(text: str, name: str) -> None:
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, language, code in fences(text):
        if language == "python":
            run_block(code, line, name, namespace)


APART = {"trees.md": ("jax", "equinox", "flax", "optax")}
"""Pages that run in a process of their own, and the modules that they import: JAX warns of every later fork."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`load_state_dict` is deprecated:FutureWarning")  # by Megatron-Core 0.16
@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if page.name not in APART], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    for name in ("synchronize", "current_device"):  # which a page replaces where there is no GPU
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    run_page(page.read_text(), str(page))


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("name", APART)
def test_blocks_beside_other_libraries_run(name: str, tmp_path: Path) -> None:
    for module in APART[name]:
        if find_spec(module) is None:
            raise ImportError(f"No module named {module!r}")
    code = (
        "import sys; from pathlib import Path; from tests.docs.test_blocks import run_page; page = Path(sys.argv[1]); "
    )
    command = [sys.executable, "-c", f"{code} run_page(page.read_text(), str(page))", str(ROOT / "docs" / name)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_block_hides_behind_another_name(page: Path) -> None:
    included = {f"{{literalinclude}} scripts/{name}" for name in SCRIPTS}
    assert {language for _, language, _ in fences(page.read_text())} <= NOT_PYTHON | {"python"} | included


def test_blocks_share_a_namespace_and_keep_their_lines() -> None:
    run_page("```python\nx = 1\n```\ntext\n```python\n>>> x + 1\n2\n```\n", "page")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("one\n\n```python\nx = 0\n1 / x\n```\n", "page")
    assert caught.traceback[-1].lineno == 4  # counted from 0


@pytest.mark.parametrize("block", ["assert False", ">>> 1 + 1\n3"])
def test_a_wrong_block_is_found(block: str) -> None:
    with pytest.raises((AssertionError, doctest.DocTestFailure)):
        run_page(f"```python\n{block}\n```\n", "page")
