"""What a load fills and gives back: new tensors or donated ones, meta targets, padded ones, factories, objects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch
from shardtree.testing import STORABLE_DTYPES, bits, random_bits
from tests.checkpoint.parts import saved, whole
from tests.options import load_keywords

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


# Padded tensors.


def padded(data, rows=5):
    box = data if data is not None else torch.empty(rows, 4, device="meta")
    shard = whole("w", box, allow_shape_mismatch=True)
    return replace(shard, data=data)


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


# Objects, plain values, structure (see also tests/trees/test_tree_join.py).


def test_an_object_that_is_a_container_is_given_as_it_is():
    target = {"o": st.ShardedObject("o", None, (1,), (0,)), "nested": {"o": st.ShardedObject("o", None, (1,), (0,))}}
    loaded = load(target, validate_access_integrity=False)
    assert loaded["o"] == {"deep": [1, {}]} == loaded["nested"]["o"]
    assert loaded["o"] is not loaded["nested"]["o"]


def test_nonpersistent_objects_are_unwrapped_and_plain_values_ignored():
    here = object()
    target = {
        "local": st.LocalNonpersistentObject(here),
        "step": 99,
        "mine": "ignored",
        "w": whole("w", torch.zeros(3, 4)),
    }
    loaded = load(target)
    assert loaded["local"] is here and loaded["step"] == 3 and "mine" not in loaded
    assert list(loaded) == ["w", "step", "local"]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("make", [lambda shard: [shard], lambda shard: (shard,), lambda shard: {"w": shard}])
def test_a_root_of_nothing_but_shards_may_be_of_any_shape(kind, make):
    folder = saved(kind(whole("w", part, (0, number, 3)) for number, part in enumerate(W.split(1))))
    loaded = load(make(whole("w", torch.zeros(3, 4))), folder)
    assert str(loaded) == str(make(W))


def test_a_load_changes_nothing_of_its_target():
    target = {"w": whole("w", torch.zeros(3, 4)), "list": [st.LocalNonpersistentObject(1)], "step": 0}
    before = (list(target), id(target["w"]), list(target["list"]), target["w"].data._version)
    load(target)
    assert (list(target), id(target["w"]), list(target["list"]), target["w"].data._version) == before
    assert not target["w"].data.any()


@pytest.mark.parametrize("donate", [False, True])
def test_of_a_longer_target_the_overlap_is_loaded_and_the_rest_kept(donate):
    target = torch.full((5, 4), 7.0)
    loaded = load({"w": padded(target)}, donate=donate)["w"]
    assert torch.equal(loaded[:3], W) and (loaded[3:] == 7).all()
    assert (loaded is target) == donate
    assert donate or (target == 7).all()
