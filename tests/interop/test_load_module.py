"""A Hugging Face folder goes into a module, plain or cut by FSDP2 and tensor parallelism, tied weights included."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardtree as st
from shardtree.errors import IntegrityError, KeyMismatch, ShapeError, UnsupportedValue
from shardtree.interop.dtensor import ModuleKeys, load_module
from shardtree.storage import MemoryStorage
from shardtree.world import World, run_processes

WIDTH, HIDDEN, WORDS = 6, 10, 13  # 10 rows on 2 x 2 ranks are uneven, and so are 13


class Model(nn.Module):
    """An embedding that is the head too, a layer, a stored buffer and one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)


def values() -> dict[str, torch.Tensor]:
    """Return what is stored: each tensor once, the tied one by its first name."""
    state = {name: tensor for name, tensor in Model().state_dict().items() if name != "head.weight"}
    numbers = torch.Generator().manual_seed(3)
    filled = {name: torch.randn(each.shape, generator=numbers) for name, each in state.items()}
    return filled | {"seen": torch.tensor(7)}


def stored(tensors: dict[str, torch.Tensor], folder: Any) -> Any:
    tree = {name: st.ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    st.save(tree, folder, ("huggingface", 1), options=st.SaveOptions(checksums=False))
    return folder


def check_holds(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    held = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in module.state_dict().items()}
    assert held.pop("head.weight").equal(held["embed.weight"])
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert tensor.equal(expected[name]), name


def test_a_module_is_filled_by_its_own_names() -> None:
    model = Model()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert load_module(model, stored(values() | {"rotary": torch.ones(2)}, MemoryStorage())) == ModuleKeys(
        (), ("rotary",)
    )
    check_holds(model, values())
    assert before == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert model.head.weight is model.embed.weight
    assert model.scale == 2.0


def test_the_check_catches_a_changed_tensor() -> None:
    model = Model()
    load_module(model, stored(values(), MemoryStorage()))
    with torch.no_grad():
        model.up.weight[3, 2] += 1
    with pytest.raises(AssertionError, match=r"up\.weight"):
        check_holds(model, values())


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_needs_one_of_its_names(name: str) -> None:
    tensors = values()
    model = Model()
    load_module(model, stored(tensors | {name: tensors.pop("embed.weight")}, MemoryStorage()))
    check_holds(model, values())


def test_names_of_one_tensor_that_are_stored_twice_have_to_be_equal() -> None:
    twice = values() | {"head.weight": values()["embed.weight"]}
    model = Model()
    assert load_module(model, stored(twice, MemoryStorage())) == ModuleKeys((), ())
    check_holds(model, values())
    with pytest.raises(IntegrityError, match=r"head\.weight"):
        load_module(model, stored(twice | {"head.weight": torch.zeros(WORDS, WIDTH)}, MemoryStorage()))


def test_what_is_not_stored_is_named_and_nothing_is_changed() -> None:
    model = Model()
    lacking = {name: tensor for name, tensor in values().items() if name not in ("up.bias", "embed.weight")}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyMismatch) as caught:
        load_module(model, stored(lacking, MemoryStorage()))
    assert caught.value.unexpected == ("embed.weight = head.weight", "up.bias")
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_what_is_not_stored_may_keep_its_values() -> None:
    model = Model()
    folder = stored({name: tensor for name, tensor in values().items() if name != "seen"}, MemoryStorage())
    assert load_module(model, folder, strict=False) == ModuleKeys(("seen",), ())
    check_holds(model, values() | {"seen": torch.tensor(0)})


def test_other_names_and_dtypes() -> None:
    folder = stored(
        {
            f"model.{name}": tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in values().items()
        },
        MemoryStorage(),
    )
    model = Model()
    with pytest.raises(ShapeError, match="float64"):
        load_module(model, folder, key="model.{}".format)
    assert load_module(model, folder, key="model.{}".format, cast=True) == ModuleKeys((), ())
    check_holds(model, values())


def test_a_module_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = Model()
    folder = stored(values(), MemoryStorage())
    with pytest.raises(UnsupportedValue, match=r"to_empty"):
        load_module(model, folder)
    model.to_empty(device="cpu")  # which gives each name of a tied weight memory of its own
    with pytest.raises(KeyMismatch, match="tie weights"):
        load_module(model, folder)
    model.head.weight = model.embed.weight
    load_module(model, folder)
    check_holds(model, values())


# Real processes


def cut(sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    """Return a module cut over a mesh of these axes, and the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = Model()
    if "tp" in sizes:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "dp" in sizes:
        fully_shard(model, mesh=mesh["dp"])
    return model, mesh


def loads(world: World, *, sizes: dict[str, int], folder: str) -> int:
    """Load on this mesh, check all elements, and return the bytes that this rank has read."""
    nbytes: list[int] = []
    model, mesh = cut(sizes)
    options = st.LoadOptions(progress=nbytes.append, exchange="never")
    assert load_module(model, folder, within=mesh, strided="fsdp2", options=options) == ModuleKeys((), ())
    check_holds(model, values())
    assert model.head.weight is model.embed.weight
    return sum(nbytes)


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes"), [(3, {"dp": 3}), (2, {"tp": 2}), (4, {"dp": 2, "tp": 2})], ids=["fsdp2", "tp", "fsdp2-tp"]
)
def test_processes_fill_their_parts(ranks: int, sizes: dict[str, int], tmp_path: Path) -> None:
    folder = stored(values(), str(tmp_path / "model"))
    whole = sum(tensor.nbytes for tensor in values().values())
    for nbytes in run_processes(ranks, partial(loads, sizes=sizes, folder=folder)):
        assert nbytes < whole
