"""README.md: its snippets run, and what it says of formats, versions and set-up is what the tree has."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.interop.deepspeed import save_universal
from shardtree.interop.dtensor import from_dtensors
from shardtree.live import run_processes
from shardtree.strategies import StrategyAction
from shardtree.world import World
from tests.docs.test_blocks import fences, run_block

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
INSTALLING = (ROOT / "docs" / "installing.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SNIPPETS = {
    README[: README.index(code)].rpartition("\n**")[2].partition("**")[0]: (line, code)
    for line, language, code in fences(README)
    if language == "python"
}


def run_snippet(reader: str, **given: Any) -> dict[str, Any]:
    """Return the names that a reader's snippet leaves, run with the names that the reader has."""
    line, code = SNIPPETS[reader]
    namespace: dict[str, Any] = {"__name__": "__page__", **given}
    run_block(code, line, "README.md", namespace)
    return namespace


def test_each_reader_finds_five_lines_within_a_screen() -> None:
    assert [*SNIPPETS] == ["FSDP2", "Megatron-Core", "Hugging Face files", "JAX habits"]
    for line, code in SNIPPETS.values():
        assert len(code.split("\n\n")) == 2 and len([each for each in code.splitlines() if each]) == 5
        assert line < 55
    assert README.index("\n| format |") > README.index("\n## Try it")


def train_under_fsdp2(world: World, folder: str) -> bool:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    fully_shard(model)
    code = SNIPPETS["FSDP2"][1]
    assert code.count('"step-100"') == 2
    namespace: dict[str, Any] = {"model": model}
    exec(code.replace('"step-100"', repr(folder)), namespace)
    state = namespace["state"]
    assert all(isinstance(tensor, DTensor) for tensor in state["model"].values()) and state["step"] == 100
    return not st.diff(from_dtensors(state["model"]), from_dtensors(model.state_dict()))


@pytest.mark.slow
@pytest.mark.torchrun
def test_fsdp2(tmp_path: Path) -> None:
    assert run_processes(2, partial(train_under_fsdp2, folder=str(tmp_path / "step-100"))) == [True, True]
    saved = st.load_plain_tensors(tmp_path / "step-100")
    assert saved["model.0.weight"].shape == (6, 8) and len(saved) == 4


class Module(torch.nn.Module):
    """A module with the weights of a language model's beginning."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding.from_pretrained(torch.full((16, 4), value))


class Megatron(Module):
    """The same, as a model of Megatron-Core describes itself."""

    def sharded_state_dict(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        return {key: ShardedTensor.from_rank_offsets(key, each) for key, each in self.state_dict().items()}


def test_megatron_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    monkeypatch.chdir(tmp_path)
    model = Megatron(1.0)
    run_snippet("Megatron-Core", model=model)
    assert json.loads(Path("iter_0000100", "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    # Its last line alone, with a model whose weights are others by now.
    other, lines = Megatron(0.0), SNIPPETS["Megatron-Core"][1].splitlines()
    names = {"st": st, "model": other, "tree": st.interop.megatron.from_megatron(other.sharded_state_dict())}
    exec(lines[-1], names)
    assert torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_hugging_face_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights, model = Module(3.0).state_dict(), Module(0.0)
    tree = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in weights.items()}
    st.save(tree, "hub-folder", "huggingface")
    st.save({**tree, "step": 100}, "step-100")
    rows = run_snippet("Hugging Face files", model=model)["rows"]
    assert model.model.embed_tokens.weight.eq(3).all() and rows.shape == (8, 4)
    written = Path("for-transformers", "model.safetensors")
    assert written.read_bytes() == Path("hub-folder", "model.safetensors").read_bytes()


def test_jax_habits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    params = {"w": torch.arange(48.0).reshape(8, 6), "v": torch.arange(12.0).reshape(2, 6)}
    names = run_snippet("JAX habits", params=params)
    both = names["left"], names["right"]
    assert not st.diff({key: torch.cat([each[key] for each in both], dim=1) for key in params}, params)
    assert len(names["rows"]) == 4 and names["rows"][3]["w"].data.shape == (4, 6)


def marks(backend: tuple[str, int]) -> tuple[str, str]:
    """Return the marks that the dispatch table gives a format: read, written."""
    actions = {action for action, *row in st.default_strategies if tuple(row) == backend}
    reads = actions & {StrategyAction.LOAD_SHARDED, StrategyAction.LOAD_COMMON}
    writes = actions & {StrategyAction.SAVE_SHARDED, StrategyAction.SAVE_COMMON}
    return "✓" if reads else "", "✓" if writes else ""


def test_the_table_of_formats_is_the_dispatch_table() -> None:
    rows = re.findall(r"\| `(\w+)` (\d+) \| (\S*) ?\| (\S*) ?\|$", README, re.MULTILINE)
    shown = {(name, int(version)): (read, written) for name, version, read, written in rows}
    expected = {backend: marks(backend) for backend in {(name, version) for _, name, version in st.default_strategies}}
    assert expected["universal", 1] == ("✓", "") and callable(save_universal)  # a function of its own writes it
    assert shown == expected | {("universal", 1): ("✓", "(✓)")}


def test_what_it_needs_is_what_the_package_asks_for() -> None:
    python, torch_ = re.search(r"It needs Linux, Python (\S+) and PyTorch (\S+), or newer\.", README).groups()  # type: ignore[union-attr]
    assert PROJECT["requires-python"] == f">={python}"
    needs = [re.split(r"[>=]+", each) for each in PROJECT["dependencies"]]
    assert ["torch", torch_] in needs
    brought = re.search(r"brings (\w+), (\w+), (\w+) and (\w+), and no more", README)
    assert brought is not None and [*brought.groups()] == [name for name, *_ in needs]


def commands(text: str) -> list[str]:
    return [code.strip() for _, language, code in fences(text) if language == "bash" and "venv" in code]


def test_both_pages_have_the_same_two_commands_and_times() -> None:
    assert len(commands(README)) == 2
    assert commands(INSTALLING)[:2] == commands(README)
    assert times(README) == times(INSTALLING) and len(times(README)) == 2


def times(text: str) -> list[str]:
    return re.findall(r"about \d+ (?:s|minutes) on 2 idle cores", text)


def test_installing_lists_each_dependency_and_each_extra() -> None:
    found = re.findall(r"^\| (\w+) \| (>=\S+) \| (\S+) \|", INSTALLING, re.MULTILINE)
    assert [f"{name}{range_}" for name, range_, _ in found] == PROJECT["dependencies"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert [pin for name, _, version in found if (pin := f"{name}=={version}") not in pins] == []
    table = INSTALLING.partition("| `pip install '.[…]'` |")[2].partition("\n\n")[0]
    rows = {
        name: libraries
        for names, libraries in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"\w+", names)
    }
    extras = PROJECT["optional-dependencies"]
    assert sorted(rows) == sorted(extras)
    own = {
        name: {re.split(r"[>=\[]", each)[0] for each in extras[name]} - {"shardtree"}
        for name in extras
        if name != "dev"
    }
    assert {name: missing for name in own if (missing := own[name] - {*re.findall(r"[\w-]+", rows[name])})} == {}


def in_commands(take: Callable[[list[str]], list[str]]) -> list[str]:
    return [found for command in commands(README) for found in take(shlex.split(command))]


def test_the_commands_name_what_is_there() -> None:
    extras = in_commands(lambda words: [word[2:-1] for word in words if word.startswith(".[")])
    assert extras == ["try", "test"] and {*extras} <= {*PROJECT["optional-dependencies"]}
    for file in in_commands(lambda words: [words[n + 1] for n, word in enumerate(words) if word == "-c"]):
        assert (ROOT / file).is_file()
    modules = in_commands(lambda words: [words[n + 1] for n, word in enumerate(words) if word == "-m"])
    assert {*modules} == {"venv", "pip", "shardtree", "tests"}
    assert find_spec("shardtree.__main__") and find_spec("tests.__main__")


def test_no_bullet_has_three_links() -> None:
    bullets = re.findall(r"^- .*(?:\n  .*)*", README, re.MULTILINE)
    assert len(bullets) > 8
    assert [bullet for bullet in bullets if bullet.count("](") > 2] == []


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_a_relative_link_leads_to_a_file_and_its_heading() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", README)
    assert len(targets) > 20
    assert [target for target in targets if target[1] and target[1] not in anchors(target[0])] == []
    assert [page for page, _ in targets if not (ROOT / page).is_file()] == []
