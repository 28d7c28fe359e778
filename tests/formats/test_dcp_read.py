"""Folders that torch.distributed.checkpoint wrote open as they are: tensors, nested values, several ranks, DTensors."""

from __future__ import annotations

import argparse
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as some
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

import shardtree as st
from shardtree.errors import UnsafeFile
from shardtree.formats.torch_dist._common import nested
from shardtree.live import run_processes
from shardtree.testing import first_difference
from shardtree.trees import HOLE
from tests.formats.dcp_ranks import rows, save_what_differs
from tests.formats.test_torch_dist_read import SAVED


def save_alone(state, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it runs in one process
        dcp.save(state, checkpoint_id=str(folder), no_dist=True, **options)
    return folder


# One process: what kinds of tensors there are


def check_loads(folder, tensors):
    """Each tensor whole, its columns, and its elements lazily."""
    assert st.load_tensors_metadata(folder).keys() == tensors.keys()
    loaded = st.load_plain_tensors(folder)
    opened = st.open_checkpoint(folder)
    for key, tensor in tensors.items():
        assert first_difference(loaded[key], tensor) is None, key
        if tensor.ndim == 2:
            assert first_difference(opened[key].data[:, 1:].read(), tensor[:, 1:]) is None, key


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    tensors = {str(dtype): rows(5, 3, dtype=dtype) for dtype in SAVED}
    check_loads(save_alone(tensors, tmp_path), tensors)


def test_tensors_of_every_make_come_back(tmp_path):
    base = rows(6, 4)
    tensors = {
        "transposed": base.t(),
        "permuted": rows(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.arange(3.0).expand(4, 3),
        "slice": base[1:4, 1:3],
        "row": base[2],
        "column": base[:, 1],
        "tied": base,
        "tied too": base,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        "no rows": torch.empty(0, 3, dtype=torch.int32),
        "no columns": torch.empty(3, 0),
        "one": torch.ones(1, 1, 1),
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "conjugated": torch.tensor([[1 + 2j, 3 - 4j]]).conj(),
        "imaginary": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    }
    folder = save_alone(tensors, tmp_path)
    check_loads(folder, {key: tensor.detach() for key, tensor in tensors.items()})
    assert st.verify(folder) == ()


# Nested state


def nested_state():
    return {
        "model": {"w": rows(4, 3), "layers": [{"b": rows(2)}, {"b": rows(3), "scale": 0.5}]},
        "optimizer": {
            "state": {"w": {"step": torch.tensor(3.0), "exp_avg": rows(4, 3)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": ["w"]}],
        },
        "step": 7,
        "name": "run",
        "plain": [1, [2, 3]],
        "pair": (1, "two"),
        "nothing": None,
        "dotted.name": {"a.b": 1},
        "args": argparse.Namespace(lr=0.1),
        "ordered": OrderedDict(z=1, a=2),
        "tensors in a tuple": (torch.ones(2), 5),
    }


def test_the_common_state_is_the_nested_state_without_tensors(tmp_path):
    folder = save_alone(nested_state(), tmp_path)
    common, expected = st.load_common_state_dict(folder), nested_state()
    ones, five = common.pop("tensors in a tuple")
    assert torch.equal(ones, torch.ones(2)) and five == 5
    del expected["tensors in a tuple"], expected["optimizer"]["state"]
    expected |= {"model": {"layers": [HOLE, {"scale": 0.5}]}, "ordered": {"z": 1, "a": 2}}
    assert common == expected
    assert st.open_checkpoint(folder).common()["name"] == "run"


def test_a_name_like_an_objects_is_an_object(tmp_path):
    state = {"rng/shard_0_2": [{"seed": 1}], "rng/shard_1_2": {"bare": 2}, "step": 7, "a.b": [1]}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    folder = save_alone(state, tmp_path, planner=planner)
    assert st.load_common_state_dict(folder) == {"step": 7, "a.b": [1]}
    target = [st.ShardedObject("rng", None, (2,), (n,)) for n in range(2)]
    assert st.load({"rng": target}, folder)["rng"] == [{"seed": 1}, {"bare": 2}]
    assert st.open_checkpoint(folder)["rng/shard_0_2"].data == {"seed": 1}


LEAVES = some.integers() | some.none() | some.text(max_size=2) | some.tuples(some.integers())
TREES = some.dictionaries(
    some.text("ab.", max_size=2),
    some.recursive(
        LEAVES,
        lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text("ab", max_size=1), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=3,
)


def check_nested_alike(nest, tree):
    """Raise unless a flattened state gets the structure that torch gives it back."""
    try:
        flat, paths = flatten_state_dict(tree)
    except ValueError:  # two names that are one: it refuses to save these
        return
    assert nest({paths[name]: value for name, value in flat.items()}) == unflatten_state_dict(flat, paths)


@given(TREES)
def test_nested_values_get_the_structure_that_torch_gives_them(tree):
    check_nested_alike(nested, tree)


def test_the_law_sees_positions_that_close_up():
    """The planted fault: an empty dict that wasn't stored leaves no gap in its list."""

    def dense(leaves):
        built = nested(leaves)
        return {key: [one for one in node if one is not None] for key, node in built.items()}

    with pytest.raises(AssertionError):
        check_nested_alike(dense, {"a": [{}, {"b": 1}]})


@pytest.mark.parametrize(
    "leaves",
    [
        {("a",): 1, ("a", "b"): 2},
        {("a", "b"): 2, ("a",): 1},
        {("a", 0): 1, ("a", "b"): 2},
        {("a", -1): 1},
        {("a", 10**12): 1},
        {("a", 10**5): 1, ("b", 10**5): 1},
    ],
)
def test_paths_that_contradict_each_other_are_refused(leaves):
    with pytest.raises(ValueError, match=r"lies inside|is there twice|both names and positions|without a stored value"):
        nested(leaves)


# What can't be read says why


class Unknown:
    """A class that nobody listed."""

    def __eq__(self, other):
        return isinstance(other, Unknown)

    __hash__ = None


def test_a_value_of_an_unknown_class_needs_leave(tmp_path):
    folder = save_alone({"w": rows(4), "mine": Unknown()}, tmp_path)
    with pytest.raises(UnsafeFile, match="Unknown"):
        st.load_common_state_dict(folder)
    with pytest.raises(UnsafeFile, match="'mine'"):
        st.load({"w": st.ShardedTensor.from_rank_offsets("w", rows(4))}, folder)
    assert torch.equal(st.load_plain_tensors(folder)["w"], rows(4))
    assert st.load_common_state_dict(folder, options=st.LoadOptions(allow_pickle=True)) == {"mine": Unknown()}
    loaded = st.load(
        {"w": st.ShardedTensor.from_rank_offsets("w", rows(4))}, folder, options=st.LoadOptions(allow_pickle=True)
    )
    assert torch.equal(loaded["w"], rows(4)) and loaded["mine"] == Unknown()


# Several ranks


@pytest.mark.torchrun
def test_values_that_differ_between_ranks_are_all_there(tmp_path):
    run_processes(3, partial(save_what_differs, folder=str(tmp_path / "saved")))
    common = st.load_common_state_dict(tmp_path / "saved")
    assert common == {f"of rank {rank}": rank for rank in range(3)}
