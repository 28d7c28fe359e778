"""The native format holds every tensor bit for bit, however it lies in memory and whatever its key is."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import MetadataError, UnsupportedValue
from shardtree.storage import MemoryStorage
from shardtree.strategies.index import find_texts, text_columns
from shardtree.strategies.safetensors._layout import parts
from shardtree.testing import STORABLE_DTYPES, bits, first_difference, random_bits

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def whole(key, tensor, *cuts, **fields):
    return st.ShardedTensor.from_rank_offsets(key, tensor, *cuts, **fields)


def stored(tree):
    folder = MemoryStorage()
    st.save(tree, folder)
    return folder


def read_back(tensor):
    return st.load_plain_tensors(stored([whole("w", tensor)]))["w"]


def assert_same_bits(found, expected):
    assert first_difference(found, expected) is None


def data_files(folder):
    (save,) = [name for name in folder.names() if name.startswith("save-")]
    return {name: folder.read(f"{save}/{name}") for name in folder.names(save) if name[0].isdigit()}


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


@pytest.mark.slow
@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (), (0, 4)], ids=str)
def test_save_then_load_keeps_every_bit(dtype, shape):
    tensor = random_bits(shape, dtype, seed=3)
    assert_same_bits(read_back(tensor), tensor)
    loaded = st.load({"w": whole("w", random_bits(shape, dtype, seed=9))}, stored({"w": whole("w", tensor)}))
    assert_same_bits(loaded["w"], tensor)


def test_the_check_of_bits_sees_one_changed_nan_payload():
    tensor = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x7FC00003], dtype=torch.int32).view(torch.float32)
    with pytest.raises(AssertionError):
        assert_same_bits(read_back(other), tensor)
    assert_same_bits(read_back(tensor), tensor)


def transposed(tensor):
    return tensor.transpose(0, 1)


def stepped(tensor):
    return tensor[::2, 1:]


def expanded(tensor):
    return tensor[:1].expand(4, tensor.shape[1])


def in_the_middle(tensor):
    return tensor[1:3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
@pytest.mark.parametrize("view", [transposed, stepped, expanded, in_the_middle])
def test_a_tensor_is_stored_as_it_reads_and_not_as_it_lies(dtype, view):
    tensor = view(random_bits((4, 3), dtype, seed=5))
    assert bits(read_back(tensor)) == bits(tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_lazily_conjugated_and_negated_tensors_are_stored_by_value(dtype):
    tensor = random_bits((3, 4), torch.int8, seed=1).to(torch.complex64).mul(1 + 2j).to(dtype)
    assert bits(read_back(tensor.conj())) == bits(tensor.conj().resolve_conj())
    if dtype is not torch.complex32:
        negated = tensor.conj().imag
        assert negated.is_neg()
        assert bits(read_back(negated)) == bits(negated.resolve_neg())


def test_large_views_are_staged_in_parts():
    tensor = torch.arange(3 * 1100 * 1024, dtype=torch.int32).view(3, -1).t()
    assert torch.equal(read_back(tensor), tensor)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1,) * 9], ids=str)
def test_scalars_and_empty_tensors_keep_their_shape(shape):
    tensor = torch.ones(shape)
    assert read_back(tensor).shape == shape
    assert torch.equal(read_back(tensor), tensor)


def test_empty_tensors_lie_beside_full_ones():
    tree = [
        whole("a", torch.zeros(0)),
        whole("b", torch.arange(3)),
        whole("c", torch.zeros(0, 2)),
        whole("d", torch.ones(())),
    ]
    loaded = st.load_plain_tensors(stored(tree))
    assert {key: tuple(tensor.shape) for key, tensor in loaded.items()} == {"a": (0,), "b": (3,), "c": (0, 2), "d": ()}
    assert loaded["b"].tolist() == [0, 1, 2] and loaded["d"].item() == 1


def test_tensors_that_share_storage_are_stored_each():
    shared = torch.arange(6.0)
    loaded = st.load_plain_tensors(stored([whole("all", shared), whole("tied", shared), whole("some", shared[2:4])]))
    assert {key: tensor.tolist() for key, tensor in loaded.items()} == {
        "all": shared.tolist(),
        "tied": shared.tolist(),
        "some": [2.0, 3.0],
    }


def test_parameters_are_stored_like_tensors():
    parameter = torch.nn.Parameter(torch.arange(3.0))
    assert read_back(parameter).tolist() == [0, 1, 2]
    assert parameter.requires_grad and parameter.grad is None


def test_lazy_data_is_read_while_it_is_written():
    source = st.open_checkpoint(stored([whole("w", torch.arange(12).view(3, 4))]))
    lazy = source["w"].data
    found = st.load_plain_tensors(
        stored([whole("t", lazy.transpose(0, 1)), whole("part", lazy[1:, :2]), whole("half", lazy.to(torch.float16))])
    )
    full = torch.arange(12).view(3, 4)
    assert torch.equal(found["t"], full.t()) and torch.equal(found["part"], full[1:, :2])
    assert torch.equal(found["half"], full.half())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_is_refused_with_the_way_out():
    quantised = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8)
    shard = st.ShardedTensor("w", quantised, torch.qint8, (4,), (4,), (0,), (1,))
    folder = MemoryStorage()
    with pytest.raises(UnsupportedValue, match=r"'w'[\s\S]*qint8[\s\S]*dequantize"):
        st.save([shard], folder)
    assert not st.is_checkpoint(folder)


def test_dtypes_that_the_format_lacks_are_bytes_there():
    folder = stored([whole("c", torch.ones(2, 3, dtype=torch.complex128)), whole("f", torch.ones(2))])
    (data,) = data_files(folder).values()
    header, _ = header_of(data)
    assert header["c"]["dtype"] == "U8" and header["c"]["shape"] == [96]
    assert header["f"]["dtype"] == "F32" and header["f"]["shape"] == [2]


KEYS = [
    "__metadata__",
    "__metadata__#0",
    "a#0",
    "a",
    "../../etc/passwd",
    "/absolute",
    "..",
    "a/b",
    "ключ.é.🌳",
    '"quoted"\\',
    "line\nbreak",
    "\x00",
    " ",
    "index",
    "common",
    "k" * 10_000,
]


def test_keys_are_any_text_and_never_a_path(tmp_path):
    folder = tmp_path / "a" / "b" / "ckpt"
    tree = {key: whole(key, torch.full((2,), number)) for number, key in enumerate(KEYS)}
    st.save(tree, folder)
    loaded = st.load({key: whole(key, torch.zeros(2, dtype=torch.int64)) for key in KEYS}, folder)
    assert [loaded[key].tolist() for key in KEYS] == [[number] * 2 for number in range(len(KEYS))]
    assert sorted(path.name for path in (tmp_path / "a").rglob("*") if path.is_dir())[:2] == ["b", "ckpt"]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4


@given(
    some.lists(some.text(some.characters(codec="utf-8"), min_size=1, max_size=4), unique=True, min_size=1, max_size=6)
)
def test_every_text_is_a_key(keys):
    folder = stored([whole(key, torch.tensor(number)) for number, key in enumerate(keys)])
    assert {key: int(tensor) for key, tensor in st.load_plain_tensors(folder).items()} == {
        key: number for number, key in enumerate(keys)
    }


@given(
    some.sets(some.text("ab./é🌳", min_size=1, max_size=4), min_size=40, max_size=60), some.text("ab./é🌳", max_size=4)
)
@settings(max_examples=15)
def test_one_key_of_many_is_found_and_another_is_not(keys, other):
    text, start = text_columns(sorted(keys))
    for number, key in enumerate(sorted(keys)):
        assert find_texts(text, start, [key]) == [number]
    assert find_texts(text, start, sorted(keys)) == list(range(len(keys)))
    everything = find_texts(text, start, [*sorted(keys), other])
    assert everything[:-1] == list(range(len(keys)))
    assert find_texts(text, start, [other]) == everything[-1:]
    assert (everything[-1] >= 0) == (other in keys)


@pytest.mark.parametrize("key", ["", "\ud800"], ids=ascii)
def test_what_is_no_text_is_no_key(key):
    with pytest.raises(MetadataError):
        whole(key, torch.zeros(1))


def test_a_tensor_named_like_an_object_is_refused():
    tree = {"t": whole("o/shard_0_1", torch.arange(2)), "o": st.ShardedObject("o", {"x": (1, None)}, (1,), (0,))}
    storage = st.storage.MemoryStorage()
    with pytest.raises(st.errors.IntegrityError, match="tensors named like objects"):
        st.save(tree, storage)
    assert not st.is_checkpoint(storage)


def test_many_keys_go_to_several_parts_when_a_header_would_be_too_long():
    keys = [f"{number:02d}" + "k" * 1_000_000 for number in range(12)]
    folder = stored([whole(key, torch.tensor(number)) for number, key in enumerate(keys)])
    assert list(data_files(folder)) == ["00000-of-00001-1.safetensors", "00000-of-00001.safetensors"]
    loaded = st.load_plain_tensors(folder)
    assert [int(loaded[key]) for key in keys] == list(range(12))


KEYS_AND_DTYPES = some.tuples(some.sampled_from(["a", "a#1", "b", "é"]), some.sampled_from([*STORABLE_DTYPES, None]))


def held_of(key, dtype):
    """Return a tensor shard, or an object where there is no dtype, and what the format sorts by."""
    if dtype is None:
        item = st.ShardedObject(key, key, (1,), (0,))
        return item, (-1, item.unique_key)
    return whole(key, random_bits((3,), dtype)), (-dtype.itemsize, key)


@given(some.integers(0, 3000), some.lists(KEYS_AND_DTYPES, min_size=1, max_size=8))
def test_parts_hold_each_item_once_in_order_and_aligned(header_bytes, chosen):
    shards, sorted_by = zip(*(held_of(*each) for each in chosen), strict=True)
    layout = parts(shards, allow_pickle=False, header_bytes=header_bytes)
    order = [number for part in layout for number in part.entries.number.tolist()]
    assert order == sorted(range(len(shards)), key=lambda number: (*sorted_by[number], number))
    for part in layout:
        assert len(part.header) % 64 == 0
        assert len(part.header) <= max(header_bytes, 1000)
        ends = (part.byte + part.entries.length).tolist()
        assert part.byte.tolist() == [len(part.header), *ends[:-1]] and part.length == ends[-1]
        assert not (part.byte % part.entries.item_size).any()


@pytest.mark.peers
def test_the_safetensors_package_reads_every_data_file(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.int8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.complex128,
        torch.uint16,
    ]
    tree = [whole(f"layer.{number}", random_bits((4, 3), dtype, seed=2)) for number, dtype in enumerate(dtypes)]
    st.save([*tree, st.ShardedObject("rng", [1, 2], (1,), (0,)), 5], tmp_path)
    (file,) = tmp_path.glob("save-*/00000-of-00001.safetensors")
    found = safetensors.load_file(file)
    for shard in tree:
        expected = bits(shard.data)
        assert bits(found[shard.key]) == expected
        if shard.dtype is not torch.complex128:
            assert_same_bits(found[shard.key], shard.data)
    assert set(found) == {shard.key for shard in tree} | {"rng/shard_0_1"}
    for other in tmp_path.glob("save-*/*.safetensors"):
        safetensors.load_file(other)


@pytest.mark.peers
def test_pieces_of_one_tensor_in_one_file_read_as_numbered_entries(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    full = torch.arange(8.0)
    st.save([whole("w", full[:4], (0, 0, 2)), whole("w", full[4:], (0, 1, 2))], tmp_path)
    (file,) = tmp_path.glob("save-*/0*.safetensors")
    found = safetensors.load_file(file)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [0, 1, 2, 3], "w#1": [4, 5, 6, 7]}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_with_nothing_to_write_writes_no_file(ranks):
    folder = MemoryStorage()
    tree = {"w": whole("w", torch.arange(2)), "step": 1}
    st.simulate(ranks, lambda world: st.save(tree if world.rank == 0 else {"step": 1}, folder, world=world))
    assert len(data_files(folder)) == 1
    assert math.prod(st.load_plain_tensors(folder)["w"].shape) == 2


def test_a_tree_without_shards_is_a_checkpoint():
    folder = stored({"step": 3})
    assert st.load({}, folder) == {"step": 3}
    assert st.load_plain_tensors(folder) == {} and len(st.open_checkpoint(folder)) == 0
