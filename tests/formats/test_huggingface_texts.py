"""Strings beside the tensors of safetensors files: read, written, converted, and refused where files differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import save_file

import shardtree as st
from shardtree.errors import IntegrityError, MetadataError, UnsupportedValue
from shardtree.formats.huggingface._layout import model_files
from shardtree.shell.table import formats_with
from shardtree.storage import MemoryStorage
from shardtree.strategies import StrategyAction
from shardtree.testing import Call, watched
from tests.core.trees.samples import assert_caught
from tests.formats.test_huggingface import HF, folder_of, table, two_files, whole
from tests.shell.checkpoint.parts import Killed

LORA = {"lora_alpha": "16", "rank": "8", "": "", "note": 'é"\\\n\x00\u2028'}
WEIGHTS = {"a": torch.arange(4.0), "b": torch.arange(6).view(2, 3)}
BACKENDS = sorted(formats_with(StrategyAction.SAVE_SHARDED))


def texts_of(path: Path) -> dict[str, str]:
    """Return what the safetensors library reads of a file."""
    with safetensors.safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
        return dict(file.metadata())


def tree_of(texts: Any, **more: Any) -> dict[str, Any]:
    return {**{key: whole(key, tensor) for key, tensor in WEIGHTS.items()}, "__metadata__": texts, **more}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "lora").mkdir()
    save_file(WEIGHTS, tmp_path / "lora" / "adapter_model.safetensors", {"format": "pt", **LORA})
    return tmp_path / "lora"


@pytest.mark.parametrize("name", ["new", "new.safetensors"])
def test_a_conversion_carries_the_strings_of_an_adapter(adapter: Path, tmp_path: Path, name: str) -> None:
    st.convert(adapter, tmp_path / name, backend="huggingface")
    file = tmp_path / name if name.endswith("s") else tmp_path / name / "model.safetensors"
    assert texts_of(file) == {"format": "pt", **LORA}
    assert st.load_common_state_dict(tmp_path / name) == {"__metadata__": LORA}


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_every_format_carries_the_strings_there_and_back(adapter: Path, tmp_path: Path, backend: Any) -> None:
    st.convert(adapter, tmp_path / "there", backend=backend)
    st.convert(tmp_path / "there", tmp_path / "back", backend="huggingface")
    assert texts_of(tmp_path / "back" / "model.safetensors") == {"format": "pt", **LORA}


@pytest.mark.parametrize("most", [1, 10**9])
def test_ranks_write_the_strings_to_every_file_of_a_model(tmp_path: Path, most: int) -> None:
    def write(world: st.World) -> None:
        rows = {"b": whole("b", WEIGHTS["b"][world.rank : world.rank + 1], (0, world.rank, 2))}
        own = {**rows, "a": whole("a", WEIGHTS["a"], replica_id=world.rank)}
        st.save({**own, "__metadata__": LORA}, tmp_path, HF, world=world, strategies=table(most))

    st.simulate(2, write)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == (2 if most == 1 else 1)
    assert all(texts_of(file) == {"format": "pt", **LORA} for file in files)
    loaded = st.load(tree_of({}), tmp_path)
    assert loaded["__metadata__"] == LORA and all(torch.equal(loaded[key], WEIGHTS[key]) for key in WEIGHTS)


@settings(max_examples=25, deadline=None)
@given(some.dictionaries(some.text(max_size=4), some.text(max_size=9), max_size=4), some.sampled_from([1, 10**9]))
def test_the_strings_that_are_saved_are_those_that_load(texts: dict[str, str], most: int) -> None:
    check_texts(texts, most)


def check_texts(texts: dict[str, str], most: int, save: Any = st.save) -> None:
    texts.pop("format", None)
    folder = MemoryStorage()
    save(tree_of(texts), folder, HF, strategies=table(most))
    assert st.load_common_state_dict(folder).get("__metadata__", {}) == texts
    assert all(torch.equal(tensor, WEIGHTS[key]) for key, tensor in st.load_plain_tensors(folder).items())


def test_the_law_of_strings_catches_one_that_is_cut_at_a_zero() -> None:
    def cutting(tree: Any, *rest: Any, strategies: Any) -> None:
        cut = {name: text.partition("\0")[0] for name, text in tree["__metadata__"].items()}
        st.save({**tree, "__metadata__": cut}, *rest, strategies=strategies)

    texts = some.dictionaries(some.text(max_size=4), some.text("ab\0", max_size=9), max_size=4)
    assert_caught(lambda save, case: check_texts(case, 10**9, save), cutting, texts)


# The name of the framework, which every file has, is no string of a user's


@pytest.mark.parametrize("given_texts", [{}, {"format": "pt"}, {"format": "pt", "x": "1"}])
def test_torchs_own_name_is_added_once_and_is_nobodys(tmp_path: Path, given_texts: dict[str, str]) -> None:
    st.save(tree_of(given_texts), tmp_path / "native")
    st.convert(tmp_path / "native", tmp_path / "model", backend="huggingface")
    raw = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert raw.count(b'"format"') == 1 and texts_of(tmp_path / "model" / "model.safetensors")["format"] == "pt"
    rest = {name: text for name, text in given_texts.items() if name != "format"}
    assert st.load_common_state_dict(tmp_path / "model") == ({"__metadata__": rest} if rest else {})


@pytest.mark.parametrize("framework", ["pt", "mlx", "np"])
def test_the_framework_is_no_value_and_the_new_file_has_torchs(framework: str, tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors", {"format": framework})
    target = {"a": st.ShardedTensor.from_rank_offsets("a", torch.empty_like(WEIGHTS["a"]))}
    assert st.load(target, tmp_path / "x.safetensors").keys() == {"a"}
    st.convert(tmp_path / "x.safetensors", tmp_path / "new.safetensors", backend="huggingface")
    assert texts_of(tmp_path / "new.safetensors") == {"format": "pt"}


# What isn't a string, and files that differ


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"__metadata__": {"lora_alpha": 16}}, r"tree\['__metadata__'\]\['lora_alpha'\]"),
        ({"__metadata__": {"a": {"b": "c"}}}, r"tree\['__metadata__'\]\['a'\]\['b'\]"),
        ({"__metadata__": {3: "c"}}, r"tree\['__metadata__'\]\[3\]"),
        ({"__metadata__": ["c"]}, r"tree\['__metadata__'\]\[0\]"),
        ({"__metadata__": "c"}, r"tree\['__metadata__'\]"),
        ({"step": "7"}, r"tree\['step'\]"),
        ({"model": {"__metadata__": {"a": "b"}}}, r"tree\['model'\]\['__metadata__'\]\['a'\]"),
    ],
)
def test_values_that_no_header_holds_are_refused_by_their_paths(more: dict[str, Any], named: str) -> None:
    folder = MemoryStorage()
    with pytest.raises(UnsupportedValue, match=rf"strings in tree\['__metadata__'\], not these values\n  {named}"):
        st.save(tree_of({"x": "1"}) | more, folder, HF)
    assert folder.names() == ()


def differing(tmp_path: Path) -> Path:
    for number, texts in enumerate([{"format": "pt", "hash": "1", "of a": "x"}, {"format": "pt", "hash": "2"}]):
        key = "ab"[number]
        save_file({key: WEIGHTS[key]}, tmp_path / f"model-0000{number + 1}-of-00002.safetensors", texts)
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    return tmp_path


def test_strings_that_files_have_alone_are_the_models_and_those_that_differ_stand_by_file(tmp_path: Path) -> None:
    by_file = {"model-00001-of-00002.safetensors": "1", "model-00002-of-00002.safetensors": "2"}
    folder, native, back = differing(tmp_path), MemoryStorage(), tmp_path / "back"
    assert st.load_common_state_dict(folder) == {"__metadata__": {"hash": by_file, "of a": "x"}}
    with pytest.raises(UnsupportedValue, match=r"\['hash'\]\['model-00001-of-00002.safetensors'\]") as caught:
        st.convert(folder, back, backend="huggingface")
    assert "transform_common= changes it" in caught.value.__notes__[0]
    st.convert(folder, native, backend="safetensors")
    assert st.load_common_state_dict(native) == st.load_common_state_dict(folder)

    def first(common: dict[str, Any]) -> dict[str, Any]:
        return {"__metadata__": {**common["__metadata__"], "hash": "1"}}

    st.convert(folder, back, backend="huggingface", transform_common=first)
    assert texts_of(back / "model.safetensors") == {"format": "pt", "hash": "1", "of a": "x"}


def test_files_without_strings_agree_with_any() -> None:
    assert st.load_common_state_dict(folder_of(two_files())) == {}


def test_strings_are_in_the_files_too_where_another_format_keeps_the_common_state(tmp_path: Path) -> None:
    st.save(tree_of({"lora_alpha": "16", "rank": 8}, step=7), tmp_path, HF, "safetensors")
    assert texts_of(tmp_path / "model-00001-of-00001.safetensors") == {"format": "pt", "lora_alpha": "16"}
    assert st.load_common_state_dict(tmp_path) == {"__metadata__": {"lora_alpha": "16", "rank": 8}, "step": 7}


def test_strings_that_fill_a_header_are_an_error() -> None:
    with pytest.raises(MetadataError, match="strings of '__metadata__'"):
        model_files({}, max_file_bytes=9, header_bytes=100, texts={"a": "x" * 17})
    with pytest.raises(MetadataError, match="Unicode"):
        st.save(tree_of({"a": "\ud800"}), MemoryStorage(), HF)


def test_ranks_that_hide_other_strings_from_the_comparison_are_an_error(tmp_path: Path) -> None:
    def write(world: st.World) -> None:
        own = {"b": whole("b", WEIGHTS["b"][world.rank : world.rank + 1], (0, world.rank, 2))}
        texts = {"__metadata__": {"rank": "0" * (1 + world.rank)}}
        hides = {"preprocess_common_before_consistancy_check": lambda common: {}}
        st.save({**own, **texts}, tmp_path, HF, world=world, **hides)  # type: ignore[arg-type]

    with pytest.raises(IntegrityError, match="disagree with rank 0 about the strings of '__metadata__'"):
        st.simulate(2, write)
    assert not st.is_checkpoint(tmp_path) and not list(tmp_path.glob("*.safetensors"))


def test_a_conversion_with_other_strings_isnt_gone_on_with(adapter: Path) -> None:
    folder = MemoryStorage()

    def convert(to: Any, alpha: str) -> Any:
        def change(common: dict[str, Any]) -> dict[str, Any]:
            return {"__metadata__": {**common["__metadata__"], "lora_alpha": alpha}}

        return st.convert(adapter, to, backend="huggingface", transform_common=change, max_bytes_in_flight=16)

    def before(call: Call) -> None:
        if call.method == "move":
            raise Killed

    with pytest.raises(Killed):
        convert(watched(folder, before=before), "16")
    report = convert(folder, "a longer one")
    assert report.resumed == 0
    assert st.load_common_state_dict(folder)["__metadata__"] == {**LORA, "lora_alpha": "a longer one"}
    assert torch.equal(st.load_plain_tensors(folder)["b"], WEIGHTS["b"])
