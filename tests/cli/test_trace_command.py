"""`shardtree trace`, and conversions by loading code that is named on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardtree as st
from tests.cli.checkpoints import document, run

WEIGHTS = {name: torch.arange(6.0).view(2, 3) + 10 * place for place, name in enumerate("qkv")}
LOADERS = """
import torch
import shardtree as st

def load(tensors):
    return {"qkv": torch.cat([tensors[name] for name in "qkv"])}

def by_slices(tensors):
    new = torch.empty(6, 3)
    for number, name in enumerate("qkv"):
        new[2 * number : 2 * number + 2].copy_(tensors[name])
    return {"qkv": new}

def swapped(tensors):
    return {"qkv": torch.cat([tensors[name] for name in "qvk"])}

def drops(tensors):
    return {"q": tensors["q"][1:]}

def asks(tensors):
    return {"q": tensors["q"] / tensors["q"].max()}

def misspelt(tensors):
    return {"q": tensors["q."]}

BACK = st.trace(load, {name: torch.empty(2, 3) for name in "qkv"}).inverse()
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.py").write_text(LOADERS)
    st.save({key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in WEIGHTS.items()}, "a")


def test_it_prints_the_trace_and_that_all_is_well() -> None:
    done = run("trace", "f.py:load", "a")
    assert done.exit_code == 0
    assert "  qkv: float32[6,3] =\n    [0:+a, b] = q[a, b]  (a=2 b=3)\n" in done.stdout
    assert done.stdout.endswith("✓ each element is used and made once\n")


def test_problems_are_told() -> None:
    done = run("trace", "f.py:drops", "a")
    assert done.exit_code == 1
    assert "'q': 3 elements reach no output: [0, 0:3]\n" in done.stdout
    assert done.stdout.endswith("✗ 3 problems\n")
    found = document("trace", "f.py:drops", "a", status=1)
    assert found["problems"][0] == {"kind": "unused", "name": "k", "elements": 6, "where": "[0:2, 0:3]"}
    assert found["outputs"] == {"q": "float32[1,3]"} and found["differences"] == []


def test_two_loaders_are_compared_by_what_they_do() -> None:
    same = run("trace", "f.py:load", "a", "--diff", "f.py:by_slices")
    assert same.exit_code == 0 and same.stdout.endswith("✓ the two loaders are equal\n")
    other = run("trace", "f.py:load", "a", "--diff", "f.py:swapped")
    assert other.exit_code == 1 and other.stdout.endswith("✗ the two loaders differ in 1 output\n")
    assert "'qkv': 6 elements are [2:+a, b] = k[a, b]  (a=2 b=3), not [2:+a, b] = v[a, b]  (a=2 b=3)\n" in other.stdout
    found = document("trace", "f.py:load", "a", "--diff", "f.py:swapped", status=1)
    assert [each["elements"] for each in found["differences"]] == [6, 6]


def test_what_asks_for_elements_is_trouble_with_its_line() -> None:
    done = run("trace", "f.py:asks", "a")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("shardtree trace: max needs elements of 'q'")
    assert "raised in asks, f.py, line 21" in done.stderr
    done = run("trace", "f.py:misspelt", "a")
    assert done.exit_code == 2 and "misspelt of f.py, line 24: KeyError: 'q.'\n  Did you mean 'q'?" in done.stderr
    assert run("trace", "f.py:lod", "a").exit_code == 2
    assert run("trace", "f.py:load", "b").exit_code == 2


def test_a_conversion_by_loading_code_and_back_by_its_inverse() -> None:
    assert run("convert", "a", "b", "--to", "hf", "--trace", "f.py:load", "--leave-out", "common").exit_code == 0
    assert torch.equal(st.load_plain_tensors("b")["qkv"], torch.cat([*WEIGHTS.values()]))
    assert run("convert", "b", "c", "--to", "safetensors", "--trace", "f.py:BACK", "--cast", "fp64").exit_code == 0
    found = st.load_plain_tensors("c")
    assert all(torch.equal(found[key], tensor.double()) for key, tensor in WEIGHTS.items())
    dropped = run("convert", "a", "d", "--to", "safetensors", "--trace", "f.py:drops")
    assert dropped.exit_code == 2 and "with --prune" in dropped.stderr
