"""tests/golden/v1: a checkpoint that a version 1 of the format wrote, and that every later version must read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import shardtree as st
from shardtree.core.codec import decode_tree, encode_tree
from shardtree.core.codec._tree import _DECODERS
from shardtree.testing import bits, outline
from tests.golden import make

FOLDER = Path(__file__).parent / "golden" / "v1"
PAGE = Path(__file__).parents[1] / "docs" / "format.md"

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # torch's own


def same(left: Any, right: Any) -> bool:
    """Return whether two values are of one type and equal to the bit, NaN and the sign of zero included."""
    return bool(outline(left) == outline(right))


def seen(common: dict[Any, Any]) -> dict[Any, Any]:
    """Return plain values with a buffer as its content and place."""
    buffer = common["io.BytesIO"]
    return {**common, "io.BytesIO": (buffer.getvalue(), buffer.tell())}


def page_reader() -> tuple[str, Callable[[Path, str], np.ndarray[Any, Any]]]:
    """Return the format page's reader, as text and as a function."""
    found = re.search(r"^```python\n(import itertools.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    namespace: dict[str, Any] = {}
    exec(found[1], namespace)
    return found[1], namespace["read_tensor"]


def test_plain_tensors() -> None:
    found = st.load_plain_tensors(FOLDER, options=st.LoadOptions(verify="all"))
    assert list(found) == sorted(make.tensors())
    for key, tensor in make.tensors().items():
        assert same(found[key], tensor), key


@pytest.mark.parametrize("key", make.tensors())
def test_the_pages_reader_agrees(key: str) -> None:
    found, expected = page_reader()[1](FOLDER, key), make.tensors()[key]
    assert found.shape[: expected.ndim] == expected.shape[: found.ndim]
    assert found.tobytes() == bits(expected)


def test_the_pages_reader_has_thirty_lines_and_needs_numpy_alone() -> None:
    text, _ = page_reader()
    assert len([line for line in text.splitlines() if line.strip()]) <= 30
    assert re.findall(r"^ *(?:import|from) (.+)$", text, re.MULTILINE) == ["itertools, json, pathlib", "numpy as np"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_load_in_another_layout(ranks: int) -> None:
    keys = ("box", "flat", "irregular", "uneven")

    def load(world: st.World) -> Any:
        def part(key: str, axis: int) -> st.ShardedTensor:
            data = make.tensors()[key].tensor_split(world.size, axis)
            offset = [0, 0]
            offset[axis] = sum(piece.shape[axis] for piece in data[: world.rank])
            mine, whole = data[world.rank], make.tensors()[key]
            return st.ShardedTensor(
                key, torch.zeros_like(mine), mine.dtype, mine.shape, whole.shape, tuple(offset), None
            )

        local = st.LocalNonpersistentObject("here")  # holes in lists and tuples want to be filled
        target = {key: part(key, 1) for key in keys} | {"mixed": [local, 0, {"deep": (0, local)}]}
        return st.load(target, FOLDER, world=world)

    parts = st.simulate(ranks, load)
    assert all(part["mixed"] == ["here", 1, {"deep": (2, "here")}] for part in parts)
    for key in keys:
        assert same(torch.cat([part[key] for part in parts], 1), make.tensors()[key]), key


def test_load_what_each_rank_saved() -> None:
    def load(world: st.World) -> Any:
        target = st.without_data(make.tree(world.rank) | {"common": 0})
        return st.load(target, FOLDER, world=world, options=st.LoadOptions(types=make.RECORDS, allow_pickle=True))

    for rank, found in enumerate(st.simulate(make.RANKS, load)):
        saved = make.tree(rank)
        expected = st.unbox(saved)
        assert same(list(found["model"].items()), list(expected["model"].items()))
        assert same(found["objects"], expected["objects"])
        assert same(seen(found["common"]), seen(expected["common"]))
        assert same(found["mixed"], expected["mixed"])


@pytest.mark.parametrize("name", make.common())
def test_common_state(name: str) -> None:
    found = st.load_common_state_dict(FOLDER, options=st.LoadOptions(types=make.RECORDS))
    assert same(seen(found["common"])[name], seen(make.common())[name])


def test_records_without_their_classes() -> None:
    [kind, config, pair] = st.load_common_state_dict(FOLDER)["common"]["records"]
    assert kind == st.trees.Record("golden.Kind", {"name": "LARGE", "value": "two"})
    assert config == st.trees.Record(
        "golden.Config", {"rate": 0.5, "kind": st.trees.Record("golden.Kind", {"name": "SMALL", "value": 1})}
    )
    assert pair == st.trees.Record("golden.Pair", {"left": [1], "right": 2})


def test_content_metadata() -> None:
    assert st.load_content_metadata(FOLDER) == make.CONTENT_METADATA


def test_what_is_in_it() -> None:
    metadata = st.load_sharded_metadata(FOLDER)
    assert list(metadata) == [*sorted(make.tensors()), *sorted(make.objects())]
    for key, tensor in make.tensors().items():
        assert (metadata[key].dtype, metadata[key].global_shape) == (tensor.dtype, tensor.shape)
    with pytest.raises(st.errors.UnsafeFile, match="allow_pickle"):
        st.open_checkpoint(FOLDER)["pickled/shard_0_1"]


def test_every_kind_of_the_codec_is_in_it() -> None:
    text = b"".join(path.read_bytes() for path in FOLDER.rglob("*.safetensors"))
    found = {kind.decode() for kind in re.findall(rb'"\$":"([^"]+)"', text)}
    # A Counter came after these files were written.
    assert found | {"Counter"} == {"record", "pickle", *_DECODERS}


@pytest.mark.peers
def test_safetensors_reads_every_file() -> None:
    whole, seen = make.tensors(), set()
    for path in sorted(FOLDER.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        seen |= {name for name in found if name in whole and same(found[name], whole[name])}
    untagged = {f"dtype.{name}" for name in ("complex32", "complex128", "float4_e2m1fn_x2")}
    assert {key for key in whole if key.startswith("dtype.")} - seen == untagged


def test_the_same_common_state_gives_the_same_bytes() -> None:
    (kept,) = FOLDER.rglob("common.safetensors")
    assert encode_tree(decode_tree(kept.read_bytes(), types=make.RECORDS)) == kept.read_bytes()
