"""Names that people type: other names of formats and dtypes, near misses, and functions of their files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

import shardtree as st
from shardtree.cli._names import ALIASES, float_dtype_named, format_named, function_named
from tests.cli.checkpoints import run

FUNCTIONS = """\
def keep_norms(tree):
    return {key: shard for key, shard in tree.items() if "norm" in key}


def misspelt(tree):
    return tree["nrom.weight"]


def restarted(common):
    return {**common, "step": 0}


RATE = 0.1
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("f.py").write_text(FUNCTIONS)
    tensors = {name: st.ShardedTensor.from_rank_offsets(name, torch.ones(2)) for name in ("norm.weight", "up.weight")}
    st.save({**tensors, "step": 7}, "a")
    return tmp_path


@pytest.mark.parametrize("typed", ["huggingface", "hf", "HF", "hf:1"])
def test_a_format_has_other_names(typed: str) -> None:
    assert format_named(typed) in ("huggingface", ("huggingface", 1))


@pytest.mark.parametrize(("typed", "name"), [("bf16", "bfloat16"), ("torch.float16", "float16"), ("FP32", "float32")])
def test_a_dtype_has_other_names(typed: str, name: str) -> None:
    assert float_dtype_named(typed) == name


def test_every_alias_names_a_format_or_a_dtype() -> None:
    for alias in ALIASES:
        named = format_named if alias in ("hf", "megatron", "transformers") else float_dtype_named
        assert named(alias) == ALIASES[alias]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("huggingfase", "Did you mean 'huggingface'"),
        ("hff", "Did you mean 'hf'"),
        ("xyz", "There is dcp, huggingface, safetensors"),
        ("zarr:9", "but zarr:3 can"),
        ("zarr:", "is not BACKEND"),
        (":1", "is not BACKEND"),
        ("zarr:²", "is not BACKEND"),
    ],
)
def test_what_is_no_format_is_told(typed: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        format_named(typed)


@pytest.mark.parametrize("typed", ["int64", "bfloat61", "Tensor"])
def test_what_is_no_floating_point_dtype_is_told(typed: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"no floating-point dtype .*bfloat16"):
        float_dtype_named(typed)


@pytest.mark.parametrize(
    ("text", "typed", "message"),
    [
        (FUNCTIONS, "f.py:keep_norm", "f.py: 'keep_norm' is not there. Did you mean 'keep_norms'?"),
        (FUNCTIONS, "f.py:RATE", "'RATE' is not a function. There is keep_norms, misspelt, restarted."),
        (FUNCTIONS, "f.py", "is not FILE.py:NAME"),
        (FUNCTIONS, "g.py:f", "there is no file 'g.py'"),
        ("\n\ndef f(:", "f.py:f", "f.py, line 3: SyntaxError"),
        ("\nimport no_such_module", "f.py:f", "f.py, line 2: ModuleNotFoundError"),
    ],
)
def test_a_function_that_is_not_there_is_told(source: Path, text: str, typed: str, message: str) -> None:
    Path("f.py").write_text(text)
    with pytest.raises(typer.BadParameter) as caught:
        function_named(typed)
    assert message in str(caught.value)


def test_a_conversion_by_functions_of_a_file(source: Path) -> None:
    words = ("--transform", "f.py:keep_norms", "--transform-common", "f.py:restarted", "--cast", "bf16", "--prune")
    assert run("convert", "a", "b", "--to", "safetensors", *words).exit_code == 0
    assert st.load_plain_tensors("b")["norm.weight"].dtype == torch.bfloat16
    assert list(st.load_tensors_metadata("b")) == ["norm.weight"]
    assert st.load_common_state_dict("b") == {"step": 0}


def test_without_prune_what_a_function_drops_is_an_error_in_the_shells_words(source: Path) -> None:
    done = run("convert", "a", "b", "--to", "safetensors", "--transform", "f.py:keep_norms")
    assert done.exit_code == 2 and "'up.weight'" in done.stderr
    assert "list them in --leave-out PATTERN, or drop them with --prune." in done.stderr


def test_what_a_function_raises_has_its_line_and_a_near_key(source: Path) -> None:
    done = run("convert", "a", "b", "--to", "safetensors", "--transform", "f.py:misspelt")
    assert done.exit_code == 2
    assert done.stderr == (
        "shardtree convert: misspelt of f.py, line 6: KeyError: 'nrom.weight'\n  Did you mean 'norm.weight'?\n"
    )
