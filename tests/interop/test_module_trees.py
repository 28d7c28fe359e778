"""Modules as trees of shards and back: nothing is copied, and `functional_call` runs on what tree functions made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.func import functional_call

import shardtree as st
from shardtree.errors import KeyMismatch
from shardtree.interop.dtensor import load_module
from shardtree.live import run_processes
from shardtree.storage import MemoryStorage
from shardtree.world import World
from tests.interop.test_load_module import WIDTH, Model, cut

Back = Callable[[Any, nn.Module], Any]
LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(3, 3),
    lambda: nn.Linear(3, 3, bias=False),
    lambda: nn.BatchNorm1d(3),
    lambda: nn.Sequential(nn.LayerNorm(3), nn.ReLU()),
    lambda: nn.Linear(3, 3, dtype=torch.float32).requires_grad_(False),
]


def module_of(kinds: list[int], tied: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [LAYERS[kind]() for kind in kinds]
    return nn.Sequential(*layers, *layers[:tied], nn.Identity()).eval()


def comes_back(back: Back, kinds: list[int], tied: bool) -> None:
    """The law: the tree and what is made of it are the module's own memory, and a module runs on both alike."""
    module = module_of(kinds, tied)
    own = dict(module.state_dict(keep_vars=True))
    tree = st.from_module(module)
    assert len({id(tensor) for tensor in own.values()}) == len(tree)
    tensors = back(tree, module)
    assert tensors.keys() == tree.keys() <= own.keys()
    for name, shard in tree.items():
        assert shard.data.data_ptr() == tensors[name].data_ptr() == own[name].data_ptr(), name
        assert tensors[name].requires_grad == own[name].requires_grad and tensors[name].shape == own[name].shape
        assert shard.key == name and not shard.data.requires_grad
    inputs = torch.randn(4, 3)
    assert torch.equal(functional_call(module, tensors, inputs), module(inputs))
    halved = st.map_by_pattern({"**": lambda tensor: (tensor / 2).to(tensor.dtype)})(tree)
    with torch.no_grad():
        expected = module_of(kinds, tied)
        for tensor in {id(tensor): tensor for tensor in expected.state_dict(keep_vars=True).values()}.values():
            tensor.copy_((tensor / 2).to(tensor.dtype))
    assert torch.equal(functional_call(module, back(halved, module), inputs), expected(inputs))
    assert all(torch.equal(own[name], tensor) for name, tensor in module_of(kinds, tied).state_dict().items())


KINDS = some.lists(some.integers(0, len(LAYERS) - 1), min_size=1, max_size=3)


@settings(max_examples=30)
@given(KINDS, some.booleans())
def test_a_module_is_a_tree_and_back(kinds: list[int], tied: bool) -> None:
    comes_back(st.module_tensors, kinds, tied)


@pytest.mark.parametrize("fault", ["copies", "no gradients"])
def test_a_module_is_a_tree_catches(fault: str) -> None:
    def back(tree: Any, module: nn.Module) -> Any:
        tensors = st.module_tensors(tree, module)
        return {name: each.clone() if fault == "copies" else each.detach() for name, each in tensors.items()}

    with pytest.raises(AssertionError):
        comes_back(back, [0], tied=False)


def test_gradients_of_a_tree() -> None:
    module, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    tensors = st.module_tensors(st.from_module(module), module)
    functional_call(module, tensors, inputs).sum().backward()
    module(inputs).sum().backward()
    assert torch.equal(tensors["weight"].grad, module.weight.grad)  # type: ignore[arg-type]
    update = torch.ones((), requires_grad=True)
    moved = {name: tensor.detach() * update for name, tensor in module.named_parameters()}
    functional_call(module, st.module_tensors(moved, module), inputs).sum().backward()
    assert update.grad is not None


def test_tied_weights_are_there_once_and_a_save_of_them_loads() -> None:
    model, storage, empty = Model(), MemoryStorage(), Model()
    tree = st.from_module(model, key="model.{}".format)
    assert tree.keys() == model.state_dict().keys() - {"head.weight"}
    assert tree["up.bias"].key == "model.up.bias"
    st.save(tree, storage)
    load_module(empty, storage, key="model.{}".format)
    words = torch.randn(2, WIDTH)
    for made in (empty.head(words), functional_call(model.head, {"weight": tree["embed.weight"].data}, words)):
        assert torch.equal(made, model.head(words))
    loaded = st.module_tensors(st.load(st.without_data(tree), storage), model)
    assert torch.equal(loaded["up.weight"], model.up.weight)


@pytest.mark.parametrize("change", [lambda tree: {**tree, "bias": tree["bias"].without_data()}, lambda tree: {}])
def test_names_without_a_tensor_are_told(change: Callable[[Any], Any]) -> None:
    module = nn.Linear(3, 2)
    with pytest.raises(KeyMismatch, match="module_tensors: no tensor for these names") as caught:
        st.module_tensors(change(st.from_module(module)), module)
    assert "'bias'" in str(caught.value)


# Real processes


def runs(world: World, *, sizes: dict[str, int], folder: str) -> float:
    """Save a module that is cut, load it as a tree, and compare; return the norm of the tree."""
    model, mesh = cut(sizes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    tree = st.from_module(model, within=mesh, strided="fsdp2")
    st.save(tree, folder)
    tensors = st.module_tensors(st.load(st.without_data(tree), folder), model)
    for name, tensor in model.state_dict().items():
        other = tensors["embed.weight" if name == "head.weight" else name]
        assert type(other) is type(tensor.detach()) and getattr(other, "placements", ()) == getattr(
            tensor, "placements", ()
        )
        local, mine = (getattr(each, "to_local", lambda each=each: each)() for each in (other, tensor))
        assert torch.equal(local, mine.detach()), name
    return st.trees.tree_norm(tree) ** 2


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sizes"), [(2, {"dp": 2}), (4, {"dp": 2, "tp": 2})], ids=["fsdp2", "fsdp2-tp"])
def test_modules_that_are_cut(ranks: int, sizes: dict[str, int], tmp_path: Any) -> None:
    parameters = sum(tensor.numel() for tensor in Model().parameters())
    for total in run_processes(ranks, partial(runs, sizes=sizes, folder=str(tmp_path / "c"))):
        assert total == pytest.approx(parameters / 4)
