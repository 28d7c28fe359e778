"""Moments go with their parameters through every transform, wherever they stand in the tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree import transforms
from shardtree.errors import TreeError
from shardtree.testing import check_pure
from shardtree.transforms._state_keys import state_keys
from tests.transforms.flat_trees import Tree, check_same, flat, whole

FORMS = [
    "optimizer.state.exp_avg.{key}",
    "optim.state.{inner}.exp_avg",
    "opt.0.mu.{inner}",
    "opt_state.inner_state.1.nu.{key}",
    "{key}.momentum_buffer",
    "ema.{inner}",
]
"""Places of states, by the parameter's key, and the same without the tree's own name for the model."""

Transform = Callable[[Tree], Tree]

QKV, PARTS = "model.h.*.qkv", ["model.h.*.q", "model.h.*.k"]
CASES: dict[str, Transform] = {
    "keep_layers": lambda tree: transforms.keep_layers(tree, "model.h", [2, 0, 0]),
    "stack_layers": lambda tree: transforms.stack_layers(tree, "model.h"),
    "unstack_layers": lambda tree: transforms.unstack_layers(transforms.stack_layers(tree, "model.h"), "model.h"),
    "split_tensor": lambda tree: transforms.split_tensor(tree, QKV, PARTS, sizes=[4, 2], groups=2),
    "merge_tensors": lambda tree: transforms.merge_tensors(tree, ["model.h.*.up", "model.h.*.gate"], "model.h.*.both"),
    "pad_tensors": lambda tree: transforms.pad_tensors(tree, ["model.embed"], 7),
    "unpad_tensors": lambda tree: transforms.unpad_tensors(tree, ["model.embed", "model.h.*.up"], 1),
    "transpose_tensors": lambda tree: transforms.transpose_tensors(tree, ["model.h.*.qkv"]),
    "partial_rename": lambda tree: transforms.partial_rename(tree, {QKV: "model.layers.*.attn.qkv"}),
    "partial_rename of two at once": lambda tree: transforms.partial_rename(
        tree, {"model.h.0.up": "model.h.0.gate", "model.h.0.gate": "model.h.0.up"}
    ),
}


def model(seed: int) -> Tree:
    torch.manual_seed(seed)
    shapes = {"model.embed": (5, 2), "model.norm": (2,)}
    for n in range(3):
        shapes |= {f"model.h.{n}.qkv": (6, 2), f"model.h.{n}.up": (4, 2), f"model.h.{n}.gate": (4, 2)}
    return flat(*(whole(key, torch.randn(shape)) for key, shape in shapes.items()))


def key_in(form: str, key: str) -> str:
    return form.format(key=key, inner=key.removeprefix("model."))


def states(form: str, tree: Tree) -> Tree:
    return flat(*(replace(leaf, key=key_in(form, leaf.key)) for leaf in tree.values()))


def by_key(tree: Tree) -> Tree:
    return {leaf.key: leaf for leaf in tree.values()}


def moments_follow(transform: Transform, form: str) -> None:
    """A transform of a tree with moments makes of these what it makes of parameters that hold them."""
    parameters, moments = model(0), model(1)
    found = by_key(transform(parameters | states(form, moments)))
    check_same(found, by_key(transform(parameters)) | states(form, by_key(transform(moments))))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_moments_follow_their_parameters(name: str, form: str) -> None:
    moments_follow(CASES[name], form)


def test_every_transform_is_tried() -> None:
    assert {*transforms.__all__} == {name.partition(" ")[0] for name in CASES}


def test_the_law_of_moments_catches_those_that_stay() -> None:
    def parameters_alone(tree: Tree) -> Tree:
        own = {entry: leaf for entry, leaf in tree.items() if leaf.key in model(0)}
        return transforms.keep_layers(own, "model.h", [2, 0, 0]) | {e: leaf for e, leaf in tree.items() if e not in own}

    with pytest.raises(AssertionError):
        moments_follow(parameters_alone, FORMS[2])


def test_no_argument_is_changed() -> None:
    tree = model(0) | states(FORMS[2], model(1)) | states(FORMS[1], model(2))
    for transform in CASES.values():
        check_pure(transform, tree)


def test_all_shapes_of_states_are_renumbered_and_renamed() -> None:
    states = flat(whole("optim.state.h.1.w.step", torch.tensor(3)), whole("opt.v_row.h.1.w", torch.ones(2)))
    group = st.ShardedObject("optim.param_group.h.1.w", 3, (1,), (0,))
    tree = flat(*(whole(f"model.h.{n}.w", torch.ones(2, 3)) for n in range(2))) | states | {group.unique_key: group}
    kept = transforms.keep_layers(tree, "model.h", [1])
    new = ["optim.state.h.0.w.step", "opt.v_row.h.0.w", "optim.param_group.h.0.w/shard_0_1"]
    assert list(kept) == ["model.h.0.w", *new]
    renamed = transforms.partial_rename(tree, {"model.h.*.w": "model.layers.*.w"})
    assert sorted(leaf.key for leaf in renamed.values())[2:] == [
        *("opt.v_row.layers.1.w", "optim.param_group.layers.1.w", "optim.state.layers.1.w.step")
    ]


def test_what_a_parameter_has_once_is_copied_to_its_parts_and_stays_where_nothing_is_cut() -> None:
    step = whole("optim.state.qkv.step", torch.tensor(3))
    group = st.ShardedObject("optim.param_group.qkv", 3, (1,), (0,))
    tree = flat(whole("model.qkv", torch.ones(6, 2)), step) | {group.unique_key: group}
    split = transforms.split_tensor(tree, "model.qkv", ["model.q", "model.k"])
    assert list(split) == [
        *("model.q", "model.k", "optim.state.q.step", "optim.state.k.step"),
        *("optim.param_group.q/shard_0_1", "optim.param_group.k/shard_0_1"),
    ]
    assert transforms.pad_tensors(tree, ["model.qkv"], 8)["optim.state.qkv.step"] is step


def test_new_rows_have_moments_of_zero() -> None:
    tree = flat(whole("model.w", torch.ones(2)), whole("opt.mu.w", torch.ones(2)))
    padded = transforms.pad_tensors(tree, ["model.w"], 3, fill=torch.mean)
    assert [leaf.data.tolist() for leaf in padded.values()] == [[1, 1, 1], [1, 1, 0]]


def test_what_precedes_the_key_in_an_entry_stays() -> None:
    tree = {
        "m/model.h.1.w": whole("model.h.1.w", torch.ones(2)),
        "o/opt.mu.h.1.w": whole("opt.mu.h.1.w", torch.ones(2)),
    }
    assert list(transforms.keep_layers(tree, "model.h", [1])) == ["m/model.h.0.w", "o/opt.mu.h.0.w"]


W, STEP = torch.ones(2, 2), torch.tensor(3)
KEEP: Transform = lambda tree: transforms.keep_layers(tree, "model.h", [1])  # noqa: E731
UNRELATED: dict[str, tuple[dict[str, Any], Transform, str]] = {
    "of two parameters": (
        {"model.h.1.w": W, "decoder.h.1.w": W, "opt.mu.h.1.w": W},
        KEEP,
        r"'opt\.mu\.h\.1\.w': may belong to 'decoder\.h\.1\.w' or 'model\.h\.1\.w'",
    ),
    "of a parameter that is not there": (
        {"model.h.1.w": W, "opt.mu.h.1.v": W},
        KEEP,
        r"'opt\.mu\.h\.1\.v': belongs to no parameter",
    ),
    "by number": (
        {"model.h.1.w": W, "optimizer.state.0.exp_avg": W},
        KEEP,
        r"'optimizer\.state\.0\.exp_avg': belongs to no parameter(.|\n)*parameter_names",
    ),
    "of another shape": (
        {"model.w": W, "opt.v_row.w": torch.ones(2)},
        lambda tree: transforms.split_tensor(tree, "model.w", ["model.a", "model.b"]),
        r"'opt\.v_row\.w' of 'model\.w': another shape",
    ),
    "several steps": (
        {"model.a": W, "model.b": W, "optim.state.a.step": STEP, "optim.state.b.step": STEP},
        lambda tree: transforms.merge_tensors(tree, ["model.a", "model.b"], "model.w"),
        r"'optim\.state\.a\.step' of 'model\.a': a value per parameter",
    ),
    "renamed out of its root": (
        {"model.w": W, "opt.mu.w": W},
        lambda tree: transforms.partial_rename(tree, {"model.w": "other.w"}),
        r"'opt\.mu\.w': its parameter 'other\.w' is not under 'model\.'",
    ),
}


@pytest.mark.parametrize("name", UNRELATED)
def test_states_that_cannot_follow_are_named(name: str) -> None:
    data, transform, text = UNRELATED[name]
    with pytest.raises(TreeError, match=text):
        transform(flat(*(whole(key, tensor) for key, tensor in data.items())))


def test_other_modules_with_the_same_names_are_left_alone() -> None:
    keys = ["encoder.h.1.w", "decoder.h.1.w", "encoder.mu.w", "head.w", "options.h.1.w"]
    tree = flat(*(whole(key, W) for key in keys))
    assert list(transforms.keep_layers(tree, "encoder.h", [1])) == ["encoder.h.0.w", *keys[1:]]
    assert list(transforms.pad_tensors(tree, ["head.w"], 3).items())[:3] == list(tree.items())[:3]


def test_a_merge_of_moments_that_are_missing_names_them() -> None:
    tree = flat(*(whole(key, W) for key in ("model.a", "model.b", "opt.mu.a")))
    with pytest.raises(TreeError, match=r"'model\.b'") as caught:
        transforms.merge_tensors(tree, ["model.a", "model.b"], "model.w")
    assert "in states with keys such as 'opt.mu.a'" in caught.value.__notes__


TOWERS = ["opt", "mu", "trace", "model.opt", "net.step"]


@pytest.mark.parametrize("tower", TOWERS)
def test_a_part_of_the_model_that_is_called_like_a_state_is_none(tower: str) -> None:
    others = flat(*(whole(f"{tower}.layers.{n}.w", torch.full((2,), float(n))) for n in range(4)))
    tree = others | flat(*(whole(f"vision.layers.{n}.w", torch.randn(2)) for n in range(4)))
    for found in (
        transforms.keep_layers(tree, "vision.layers", [0, 3]),
        transforms.stack_layers(tree, "vision.layers"),
        transforms.partial_rename(tree, {"vision.layers.*.w": "vision.h.*.w"}),
        transforms.pad_tensors(tree, ["vision.layers.*.w"], 4),
    ):
        check_same({key: leaf for key, leaf in by_key(found).items() if key in others}, others)


@pytest.mark.parametrize("form", ["optimizer.state.fp32_param.{key}", "ema.{inner}", "opt.0.ema.{inner}"])
def test_values_of_the_parameter_itself_are_filled_as_it_is(form: str) -> None:
    tree = flat(whole("model.embed", torch.ones(2)))
    moments = states("optimizer.state.exp_avg.{key}", tree)
    padded = by_key(transforms.pad_tensors(tree | states(form, tree) | moments, ["model.embed"], 4, fill=-9))
    assert padded[key_in(form, "model.embed")].data.tolist() == [1, 1, -9, -9]
    assert padded["optimizer.state.exp_avg.model.embed"].data.tolist() == [1, 1, 0, 0]


def test_states_without_their_parameters_cost_no_more_than_others() -> None:
    keys = [f"model.layers.{n}.weight" for n in range(4_000)]
    keys += [f"optim.exp_avg.dec.block{n}.weight" for n in range(4_000)]
    known, unclear = state_keys(keys)
    assert not known and len(unclear) == 4_000 and not any(unclear.values())
