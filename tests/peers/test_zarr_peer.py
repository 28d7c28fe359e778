"""zarr-python and xarray read what we save, and what they write loads here in any layout."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.codec import dtype_name, row_major_bits
from shardtree.errors import CheckpointingException
from shardtree.formats.zarr._layout import array_name
from shardtree.testing import (
    GlobalState,
    even_layout,
    first_difference,
    global_states,
    layouts,
    rank_tree,
    state_layouts,
)
from tests.formats.zarr_nodes import load_cut

zarr = pytest.importorskip("zarr")
xarray = pytest.importorskip("xarray")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

EXAMPLES = settings.default.max_examples if settings.default else 100
save = partial(st.save, sharded_strategy=("zarr", 3), options=st.SaveOptions(durable=False))
per_example = settings(max_examples=EXAMPLES // 3, suppress_health_check=[HealthCheck.function_scoped_fixture])


def saved(state: GlobalState, layout: Any, folder: Path) -> Path:
    ranks = next(iter(layout.values())).ranks
    st.simulate(ranks, lambda world: save(rank_tree(state, layout, world.rank), folder, world=world))
    return folder


def same_bits(found: np.ndarray[Any, Any], whole: torch.Tensor) -> bool:
    bits = row_major_bits(whole).numpy().tobytes()
    return found.shape == tuple(whole.shape) and np.ascontiguousarray(found).tobytes() == bits


# What we write.


@per_example
@given(data=some.data())
def test_zarr_python_reads_what_we_save(data: some.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    state = data.draw(global_states(), label="state")
    layout = data.draw(state_layouts(state, data.draw(some.integers(1, 4))))
    folder = saved(state, layout, tmp_path_factory.mktemp("checkpoint"))
    for consolidated in (True, False):
        group = zarr.open_group(folder, mode="r", use_consolidated=consolidated)
        names = {array_name(key): key for key in state.tensors}
        assert set(group.array_keys()) == set(names)
        for name, key in names.items():
            assert same_bits(group[name][...], state.tensors[key]), key
            words = {"key": key, "dtype": dtype_name(state.tensors[key].dtype)}
            assert group[name].attrs["shardtree"] == words


LAYERS = {
    "w": even_layout((8, 6), 2, 0),
    "norm": even_layout((6,), 2),
    "step": even_layout((), 2),
    "square": even_layout((6, 6), 2, 1),
    "none": even_layout((0, 6), 2),
}
STATE = GlobalState(
    {
        "w": torch.arange(48.0).reshape(8, 6),
        "norm": torch.zeros(6, dtype=torch.int32),
        "step": torch.tensor(0),
        "square": torch.arange(36, dtype=torch.bfloat16).reshape(6, 6),
        "none": torch.zeros(0, 6),
    },
    {"rng": [1, 2]},
    {"iteration": 7},
)


@pytest.mark.parametrize("consolidated", [True, False])
def test_xarray_opens_what_we_save(consolidated: bool, tmp_path: Path) -> None:
    saved(STATE, LAYERS, tmp_path)
    found = xarray.open_zarr(tmp_path, consolidated=consolidated)
    assert set(found.data_vars) == set(STATE.tensors)
    assert all(same_bits(found[key].values, whole) for key, whole in STATE.tensors.items())
    assert found["w"].dims == ("size_8", "size_6")
    assert found["square"].dims == ("size_6", "size_6_1")
    assert found["w"].isel(size_8=3).values.tolist() == list(range(18, 24))


def test_everything_else_is_there_as_bytes(tmp_path: Path) -> None:
    saved(STATE, LAYERS, tmp_path)
    group = zarr.open_group(tmp_path, mode="r")["_shardtree"]
    assert st.core.codec.decode_tree(memoryview(group["common"][:].tobytes()))["common"] == {"iteration": 7}
    found = {}
    for _, array in group["objects"].arrays():
        for unique_key, begin, length in array.attrs["shardtree"]["objects"]:
            found[unique_key] = st.core.codec.decode_tree(memoryview(array[begin : begin + length].tobytes()))
    assert found == {"rng/shard_0_2": 1, "rng/shard_1_2": 2}


# What others write.

OPTIONS: dict[str, dict[str, Any]] = {
    "zstd": {},
    "plain": {"compressors": None},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
    "blosc": {"compressors": zarr.codecs.BloscCodec()},
    "big-endian": {"serializer": zarr.codecs.BytesCodec(endian="big")},
    "transposed": {"filters": zarr.codecs.TransposeCodec(order=(1, 0)), "compressors": None},
    "sharded": {"shards": (4, 6), "compressors": None},
    "sharded and compressed": {"shards": (4, 6)},
    "index first": {
        "shards": {"shape": (4, 6), "index_location": "start"},
        "compressors": None,
    },
    "plain names": {"chunk_key_encoding": {"name": "v2", "separator": "/"}, "compressors": None},
    "a fill value": {"fill_value": 3, "compressors": None},
    "a fill value, compressed": {"fill_value": 3},
    "a fill value, sharded": {"fill_value": 3, "shards": (4, 6), "compressors": None},
}
WHOLE = torch.arange(63, dtype=torch.int32).reshape(7, 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_zarr_python_wrote_loads(name: str, ranks: int, tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path, mode="w", zarr_format=3)
    array = group.create_array("a/w", shape=(7, 9), chunks=(2, 3), dtype="int32", **OPTIONS[name])
    whole = WHOLE.clone()
    if "fill" in name:
        array[4:, 3:] = WHOLE[4:, 3:].numpy()
        whole[:4], whole[:, :3] = 3, 3
    else:
        array[:] = WHOLE.numpy()
    assert torch.equal(load_cut(tmp_path, "a/w", whole, even_layout((7, 9), ranks, None if ranks == 1 else 1)), whole)


@per_example
@given(data=some.data())
def test_any_array_of_zarr_python_loads_in_any_layout(
    data: some.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = data.draw(some.lists(some.integers(1, 9), max_size=3).map(tuple))
    chunk = tuple(data.draw(some.integers(1, 5)) for _ in shape)
    factors = data.draw(some.none() | some.tuples(*(some.integers(1, 3) for _ in shape)))
    shards = tuple(size * factor for size, factor in zip(chunk, factors, strict=True)) if factors and shape else None
    compressors = data.draw(some.sampled_from([None, "auto"]))
    numbers = torch.arange(max(1, int(np.prod(shape)))).reshape(shape) % 3
    folder = tmp_path_factory.mktemp("zarr")
    group = zarr.open_group(folder, mode="w", zarr_format=3)
    array = group.create_array(
        "w", shape=shape, chunks=chunk or "auto", shards=shards, dtype="int64", compressors=compressors, fill_value=0
    )
    array[...] = numbers.numpy()
    layout = data.draw(layouts(shape, 2))
    assert not first_difference(load_cut(folder, "w", numbers, layout), numbers)


V2: dict[str, dict[str, Any]] = {
    "blosc": {},
    "plain": {"compressors": None},
    "columns first": {"order": "F", "compressors": None},
    "big-endian": {"dtype": ">i4", "compressors": None},
    "big-endian, columns first, compressed": {"dtype": ">i4", "order": "F"},
    "a filter": {"filters": [{"id": "delta", "dtype": "<i4"}]},
}


@pytest.mark.parametrize("name", V2)
def test_what_zarr_python_wrote_as_v2_loads(name: str, tmp_path: Path) -> None:
    options = {"dtype": "<i4"} | V2[name]
    if "filters" in options:
        numcodecs = pytest.importorskip("numcodecs")
        options["filters"] = [numcodecs.get_codec(config) for config in options["filters"]]
    group = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    group.create_array("w", shape=(7, 9), chunks=(2, 4), **options)[:] = WHOLE.numpy()
    assert torch.equal(load_cut(tmp_path, "w", WHOLE, even_layout((7, 9), 3, 1)), WHOLE)


def test_compressed_bfloat16_of_the_old_format(tmp_path: Path) -> None:
    whole = torch.arange(63, dtype=torch.bfloat16).reshape(7, 9)
    group = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    group.create_array("w", shape=(7, 9), chunks=(2, 4), dtype="<u2")[:] = whole.view(torch.uint16).numpy()
    file = tmp_path / "w" / ".zarray"
    document = json.loads(file.read_text()) | {"dtype": "bfloat16"}
    file.write_text(json.dumps(document))
    assert torch.equal(st.load_plain_tensors(tmp_path)["w"], whole)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_dataset_of_xarray_loads(zarr_format: int, tmp_path: Path) -> None:
    values = np.random.default_rng(1).random((5, 7))
    dataset = xarray.Dataset(
        {
            "x": (("i", "j"), values),
            "day": (("i",), np.arange(5).astype("M8[D]").astype("M8[ns]")),
            "zeros": (("i",), np.zeros(5)),  # zarr-python stores no chunk of it
        },
        coords={"j": np.arange(7), "name": (("i",), list("abcde"))},
    )
    dataset.to_zarr(tmp_path / "data", zarr_format=zarr_format)
    found = st.load_plain_tensors(tmp_path / "data")
    assert np.array_equal(found["x"].numpy(), values)
    assert torch.equal(found["zeros"], torch.zeros(5, dtype=torch.float64))
    assert "name" not in found
    assert st.verify(tmp_path / "data") == ()


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=some.data())
def test_damaged_compressed_chunks_never_crash(data: some.DataObject, tmp_path: Path) -> None:
    compressor = data.draw(some.sampled_from(["zstd", "gzip", "blosc", "sharded and compressed"]))
    folder = tmp_path / compressor.replace(" ", "-")
    if not folder.exists():
        group = zarr.open_group(folder, mode="w", zarr_format=3)
        group.create_array("w", shape=(7, 9), chunks=(2, 3), dtype="int32", **OPTIONS[compressor])[:] = WHOLE.numpy()
    file = folder / "w" / "c" / "0" / "1"
    original = file.read_bytes()
    broken = bytearray(original)
    broken[data.draw(some.integers(0, len(broken) - 1))] ^= 1 << data.draw(some.integers(0, 7))
    file.write_bytes(bytes(broken[: data.draw(some.integers(0, len(broken)))]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            st.load_plain_tensors(folder)
    except CheckpointingException as error:
        assert "w/c/0/1" in str(error)
    finally:
        file.write_bytes(original)
