"""What a load fills and gives back: new tensors or donated ones, meta targets, padded ones, factories, objects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch, RemoteError
from shardtree.testing import STORABLE_DTYPES, bits, random_bits
from tests.options import load_keywords
from tests.shell.checkpoint.parts import saved, whole

W = torch.arange(12.0).view(3, 4)
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


FOLDER = saved({"w": whole("w", W), "o": st.ShardedObject("o", {"deep": [1, {}]}, (1,), (0,)), "step": 3})


def load(target, folder=FOLDER, **options):
    return st.load(target, folder, **load_keywords(**options))


# New memory.


@pytest.mark.parametrize("data", [torch.zeros(3, 4), torch.empty(3, 4, device="meta"), None, torch.zeros(4, 3).t()])
def test_a_target_that_is_not_donated_gives_new_memory(data):
    shard = replace(whole("w", W), data=data)
    before = None if data is None or data.is_meta else data.clone()
    loaded = load({"w": shard})["w"]
    assert torch.equal(loaded, W) and loaded.device.type == "cpu"
    assert loaded is not data
    assert before is None or torch.equal(data, before)


def test_a_parameter_as_target_gives_a_plain_tensor():
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    loaded = load({"w": whole("w", parameter)})["w"]
    assert torch.equal(loaded, W) and not loaded.requires_grad and not parameter.any()


# Donated memory.


@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
@pytest.mark.parametrize("view", [lambda tensor: tensor, lambda tensor: tensor.t(), lambda tensor: tensor[:, ::2]])
def test_a_donated_tensor_is_filled_in_place_and_given_back(dtype, view):
    source = view(random_bits((4, 4), dtype, seed=5))
    target = view(random_bits((4, 4), dtype, seed=6))
    pointer = target.data_ptr()
    loaded = load({"w": whole("w", target)}, saved({"w": whole("w", source)}), donate=True)["w"]
    assert loaded is target and loaded.data_ptr() == pointer
    assert bits(loaded) == bits(source)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_donated_parameter_still_requires_grad_and_autograd_knows(contiguous):
    parameter = torch.nn.Parameter(torch.zeros(3, 4) if contiguous else torch.zeros(4, 3).t())
    product = (parameter * parameter).sum()
    version = parameter._version
    loaded = load({"w": whole("w", parameter)}, donate=True)["w"]
    assert loaded is parameter and parameter.requires_grad and parameter.is_leaf and torch.equal(parameter, W)
    assert parameter._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# Memory on a device.


CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), CUDA])
@pytest.mark.parametrize("meta", [False, True])
def test_tensors_of_targets_without_data_are_put_on_the_device(device, meta):
    loaded = load({"w": st.without_data(whole("w", W), meta=meta)}, device=device)["w"]
    assert loaded.device.type == torch.device(device or "cpu").type and torch.equal(loaded.cpu(), W)


@pytest.mark.parametrize("options", [{"cast": True}, {"exchange": "always"}, {"donate": True}])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_conversions_and_exchanges_reach_the_device(device, options):
    dtype = torch.float64 if "cast" in options else W.dtype
    loaded = load({"w": replace(whole("w", W), data=None, dtype=dtype)}, device=device, **options)["w"]
    assert loaded.device.type == device and loaded.dtype == dtype and torch.equal(loaded.cpu().float(), W)


@pytest.mark.parametrize("device", [CUDA])
def test_targets_with_tensors_keep_their_own_device(device):
    assert load({"w": whole("w", W)}, device=device)["w"].device.type == "cpu"
    assert load({"w": whole("w", W.to(device))}, device="cpu")["w"].device.type == device


def test_each_rank_says_its_own_device_and_all_fail_where_one_has_none():
    def load_on(world):
        mine = {"w": whole("w", W, replica_id=world.rank).without_data()}
        return load(mine, world=world, device="meta" if world.rank else "cpu")

    with pytest.raises(RemoteError, match="rank 1: MetadataError: load: the meta device has no memory"):
        st.simulate(2, load_on)


# Padded tensors.


@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
def test_padding_works_for_every_dtype(dtype):
    source, target = random_bits((3, 2), dtype, seed=1), random_bits((5, 2), dtype, seed=2)
    folder = saved({"w": whole("w", source)})
    given = whole(
        "w", target.clone() if dtype.itemsize > 8 else random_bits((5, 2), dtype, seed=2), allow_shape_mismatch=True
    )
    loaded = load({"w": given}, folder)["w"]
    assert bits(loaded) == bits(source) + bits(target)[len(bits(source)) :]
    empty = load({"w": given.without_data()}, folder)["w"]
    assert bits(empty) == bits(source) + bytes(2 * 2 * dtype.itemsize)


def test_padding_of_a_conjugated_target_keeps_its_values():
    target = torch.full((3,), 1 + 2j).conj()
    folder = saved({"w": whole("w", torch.tensor([5 + 6j]))})
    for donate in (False, True):
        loaded = load({"w": whole("w", target, allow_shape_mismatch=True)}, folder, donate=donate)["w"]
        assert loaded.tolist() == [5 + 6j, 1 - 2j, 1 - 2j]


# Factories.


def glu(key, data, replica_id, flattened_range):
    gate, value = data.chunk(2)
    return {"gate": whole(f"{key}.gate", gate), "parts": [whole(f"{key}.value", value), "plain"], "n": 5}


def unglu(loaded):
    assert loaded["n"] == 5 and loaded["parts"][1] == "plain"
    return torch.cat([loaded["gate"], loaded["parts"][0]])


def factory(key, data):
    return st.ShardedTensorFactory(key, data, glu, unglu)


def test_a_factory_with_only_unexpected_keys_is_left_out():
    target = {"w": whole("w", torch.zeros(3, 4)), "f": factory("f", torch.zeros(8))}
    tree, missing, unexpected = load(target, strict="return_all")
    assert set(tree) == {"w", "step"}
    assert missing == {"o"} and unexpected == {"f.gate", "f.value"}


@pytest.mark.parametrize("strict", ["log_unexpected", "return_all", "ignore_all"])
def test_a_factory_that_is_stored_in_part_is_named(strict):
    folder = saved({"f.gate": whole("f.gate", torch.zeros(4))})
    with pytest.raises(KeyMismatch, match=r"'f' at tree\['f'\] lacks 'f.value'"):
        load({"f": factory("f", torch.zeros(8))}, folder, strict=strict)


# Objects, plain values, structure (see also tests/core/trees/test_tree_join.py).


def test_an_object_that_is_a_container_is_given_as_it_is():
    target = {"o": st.ShardedObject("o", None, (1,), (0,)), "nested": {"o": st.ShardedObject("o", None, (1,), (0,))}}
    loaded = load(target, validate_access_integrity=False)
    assert loaded["o"] == {"deep": [1, {}]} == loaded["nested"]["o"]
    assert loaded["o"] is not loaded["nested"]["o"]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("make", [lambda shard: [shard], lambda shard: (shard,), lambda shard: {"w": shard}])
def test_a_root_of_nothing_but_shards_may_be_of_any_shape(kind, make):
    folder = saved(kind(whole("w", part, (0, number, 3)) for number, part in enumerate(W.split(1))))
    loaded = load(make(whole("w", torch.zeros(3, 4))), folder)
    assert str(loaded) == str(make(W))
