"""A Hugging Face folder goes into a module, plain or cut by FSDP2 and tensor parallelism, tied weights included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardtree as st
from shardtree.errors import IntegrityError, KeyMismatch, ShapeError, UnsupportedValue
from shardtree.interop.dtensor import ModuleKeys, load_module
from shardtree.live import run_processes
from shardtree.storage import MemoryStorage
from shardtree.world import World
from tests.interop.hooked_modules import check_under_fsdp2, hooked_values

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


def stored(tensors: dict[str, torch.Tensor], common: Any = None, folder: Any = None) -> Any:
    """Save as a model's folder or, with a common state, as a checkpoint of ours; in memory, if nothing else is said."""
    place = MemoryStorage() if folder is None else folder
    tree = {name: st.ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    if common is None:
        st.save(tree, place, ("huggingface", 1), options=st.SaveOptions(checksums=False))
    else:
        st.save(tree | common, place)
    return place


def check_holds(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    held = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in module.state_dict().items()}
    assert held.pop("head.weight").equal(held["embed.weight"])
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert tensor.equal(expected[name]), name


def test_a_module_is_filled_by_its_own_names() -> None:
    model = Model()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert load_module(model, stored(values() | {"rotary": torch.ones(2)})) == ModuleKeys((), ("rotary",))
    check_holds(model, values())
    assert before == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert model.head.weight is model.embed.weight
    assert model.scale == 2.0


def test_the_check_catches_a_changed_tensor() -> None:
    model = Model()
    load_module(model, stored(values()))
    with torch.no_grad():
        model.up.weight[3, 2] += 1
    with pytest.raises(AssertionError, match=r"up\.weight"):
        check_holds(model, values())


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_needs_one_of_its_names(name: str) -> None:
    tensors = values()
    model = Model()
    load_module(model, stored(tensors | {name: tensors.pop("embed.weight")}))
    check_holds(model, values())


def test_names_of_one_tensor_that_are_stored_twice_have_to_be_equal() -> None:
    twice = values() | {"head.weight": values()["embed.weight"]}
    model = Model()
    assert load_module(model, stored(twice)) == ModuleKeys((), ())
    check_holds(model, values())
    with pytest.raises(IntegrityError, match=r"head\.weight"):
        load_module(model, stored(twice | {"head.weight": torch.zeros(WORDS, WIDTH)}))


def test_what_is_not_stored_is_named_and_nothing_is_changed() -> None:
    model = Model()
    lacking = {name: tensor for name, tensor in values().items() if name not in ("up.bias", "embed.weight")}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyMismatch) as caught:
        load_module(model, stored(lacking))
    assert caught.value.unexpected == ("embed.weight = head.weight", "up.bias")
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_what_is_not_stored_may_keep_its_values() -> None:
    model = Model()
    folder = stored({name: tensor for name, tensor in values().items() if name != "seen"})
    assert load_module(model, folder, strict=False) == ModuleKeys(("seen",), ())
    check_holds(model, values() | {"seen": torch.tensor(0)})


def test_other_names_and_dtypes() -> None:
    doubles = {name: each.double() if each.is_floating_point() else each for name, each in values().items()}
    folder = stored({f"model.{name}": each for name, each in doubles.items()})
    model = Model()
    with pytest.raises(ShapeError, match="float64"):
        load_module(model, folder, key="model.{}".format)
    assert load_module(model, folder, key="model.{}".format, cast=True) == ModuleKeys((), ())
    check_holds(model, values())


def test_a_module_that_is_not_initialised_takes_the_stored_shapes_or_names_what_is_missing() -> None:
    storage, shapes = MemoryStorage(), {"0.weight": (3, 2), "0.bias": (3,)}
    st.save({key: st.ShardedTensor.from_rank_offsets(key, torch.ones(shape)) for key, shape in shapes.items()}, storage)
    module = nn.Sequential(nn.LazyLinear(3))
    load_module(module, storage)
    assert {name: tuple(each.shape) for name, each in module.named_parameters()} == shapes
    with pytest.raises(KeyMismatch, match="running_mean"):
        load_module(nn.LazyBatchNorm1d(), storage)


def test_a_module_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = Model()
    folder = stored(values())
    with pytest.raises(UnsupportedValue, match=r"to_empty"):
        load_module(model, folder)
    model.to_empty(device="cpu")  # which gives each name of a tied weight memory of its own
    with pytest.raises(KeyMismatch, match="Tie again the weights that to_empty"):
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


def loads(world: World, *, sizes: dict[str, int], folder: str, hooked: str) -> int:
    """Load on this mesh, check all elements, and return the bytes that this rank has read."""
    if sizes.keys() == {"dp"}:
        check_under_fsdp2(world, hooked)
    nbytes: list[int] = []
    model, mesh = cut(sizes)
    options = st.LoadOptions(progress=nbytes.append, exchange="never")
    assert load_module(model, folder, within=mesh, strided="fsdp2", options=options) == ModuleKeys((), ())
    check_holds(model, values())
    assert model.head.weight is model.embed.weight
    model.head.weight = nn.Parameter(torch.zeros_like(model.embed.weight))
    load_module(model, folder, key=lambda name: name.replace("head", "embed"), within=mesh, strided="fsdp2")
    check_holds(model, values())
    return sum(nbytes)


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes"), [(3, {"dp": 3}), (2, {"tp": 2}), (4, {"dp": 2, "tp": 2})], ids=["fsdp2", "tp", "fsdp2-tp"]
)
def test_processes_fill_their_parts(ranks: int, sizes: dict[str, int], tmp_path: Path) -> None:
    folder = stored(values(), folder=str(tmp_path / "model"))
    hooked = stored(hooked_values(), folder=str(tmp_path / "hooked"))
    whole = sum(tensor.nbytes for tensor in values().values())
    for nbytes in run_processes(ranks, partial(loads, sizes=sizes, folder=folder, hooked=hooked)):
        assert nbytes < whole


# What of a state dict is neither a parameter nor a buffer, and where else tensors lie.


class Scaled(torch.nn.Linear):
    """A layer with an extra state, and a scale of its own beside the weight, as quantised layers have."""

    def __init__(self) -> None:
        super().__init__(3, 2, bias=False)
        self.amax, self.absmax = torch.zeros(2), torch.zeros(1)

    def get_extra_state(self) -> torch.Tensor:
        return self.amax

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amax = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        self.absmax = state_dict.pop(f"{prefix}weight.absmax", self.absmax)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def test_extra_states_and_scales_go_through_the_modules_own_hooks_in_any_size() -> None:
    model = Scaled()
    tree = {"weight": torch.ones(2, 3), "weight.absmax": torch.arange(5.0), "_extra_state": torch.arange(7.0)}
    assert load_module(model, stored(tree)) == ModuleKeys((), ())
    assert torch.equal(model.weight.data, torch.ones(2, 3))
    assert torch.equal(model.absmax, torch.arange(5.0)) and torch.equal(model.amax, torch.arange(7.0))
    bare = stored({"weight": torch.ones(2, 3)})
    with pytest.raises(KeyMismatch) as caught:
        load_module(model, bare)
    assert caught.value.unexpected == ("_extra_state", "weight.absmax")
    assert load_module(model, bare, strict=False) == ModuleKeys(caught.value.unexpected, ())
    model.amax, model.absmax = torch.zeros(0), torch.zeros(0)  # as in a layer that isn't quantised
    assert load_module(model, bare) == ModuleKeys((), (), caught.value.unexpected)


def test_what_a_hook_transposes_comes_back_through_the_other_hook() -> None:
    model = torch.nn.Linear(3, 2, bias=False)

    def transposed(_: Any, state_dict: Any, prefix: str, *__: Any) -> None:
        if f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()

    model._register_state_dict_hook(transposed)
    model.register_load_state_dict_pre_hook(transposed)
    saved = torch.arange(6.0).view(3, 2)
    assert load_module(model, stored({"weight": saved})) == ModuleKeys((), ())
    assert torch.equal(model.weight.data, saved.t())


def test_parameters_of_one_memory_are_filled() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = torch.nn.Parameter(model["a"].weight.data)
    assert load_module(model, stored({"a.weight": torch.ones(2, 2)})) == ModuleKeys((), ())
    assert torch.equal(model["b"].weight.data, torch.ones(2, 2))
    fused = torch.nn.ParameterDict({"whole": torch.zeros(4)})
    fused["part"] = torch.nn.Parameter(fused["whole"].data[:2])
    tree = {"whole": torch.arange(4.0), "part": torch.arange(2.0)}
    assert load_module(fused, stored(tree)) == ModuleKeys((), ())
    assert torch.equal(fused["whole"].data, torch.arange(4.0))
    with pytest.raises(IntegrityError, match="stored with different values"):
        load_module(fused, stored({**tree, "part": torch.ones(2)}))


def test_a_buffer_of_the_common_state_is_loaded() -> None:
    model, folder = torch.nn.BatchNorm1d(2), MemoryStorage()
    shards = {name: st.ShardedTensor.from_rank_offsets(name, torch.ones(2)) for name in ("weight", "bias")}
    rest = {"running_mean": torch.full((2,), 3.0), "running_var": torch.ones(2), "num_batches_tracked": torch.tensor(7)}
    st.save(shards | rest, folder)
    assert load_module(model, folder) == ModuleKeys((), ())
    assert model.running_mean.tolist() == [3.0, 3.0] and int(model.num_batches_tracked) == 7
    st.save(shards | {**rest, "running_mean": torch.ones(5)}, folder, overwrite=True)
    with pytest.raises(ShapeError, match="'running_mean' does not fit"):
        load_module(model, folder)


# What hooks rename, clone and nest, and names that meet.


class Hooked(nn.Module):
    """A module whose hook changes its state, and has no inverse."""

    def __init__(self, hook: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

        def run(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
            hook(state)

        self._register_state_dict_hook(run)


def clones(state: dict[str, Any]) -> None:
    state["weight"] = state["weight"].detach().clone()


def deletes(state: dict[str, Any]) -> None:
    del state["weight"]


def deletes_and_clones(state: dict[str, Any]) -> None:
    del state["weight"]
    state["bias"] = state["bias"].detach().clone()


def renames(state: dict[str, Any]) -> None:
    state["turned"] = state.pop("weight").detach().clone()


def test_weights_that_to_empty_took_apart_are_filled_with_one_stored_tensor() -> None:
    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cpu")
    folder = stored(values())
    assert load_module(model, folder, key=lambda name: name.replace("head", "embed")) == ModuleKeys((), ())
    assert model.head.weight is not model.embed.weight
    check_holds(model, values())
    with pytest.raises(KeyMismatch, match=r"(?s)'norm\.bias' for tensors that differ.*norm\.bias\n.*up\.bias"):
        load_module(model, folder, key=lambda name: name.replace("head", "embed").replace("up.bias", "norm.bias"))


def test_what_a_hook_renames_without_an_inverse_is_refused_or_named() -> None:
    model, folder = Hooked(renames), stored({"turned": torch.ones(2), "bias": torch.ones(2)})
    with pytest.raises(KeyMismatch, match=r"load_state_dict does not take\n  turned\n"):
        load_module(model, folder)
    assert load_module(model, folder, strict=False) == ModuleKeys(("weight",), ("turned",))
    assert model.weight.tolist() == [0, 0] and model.bias.tolist() == [1, 1]

    def back(_: Any, state: dict[str, Any], *__: Any) -> None:
        state["weight"] = state.pop("turned")

    model.register_load_state_dict_pre_hook(back)
    assert load_module(model, folder) == ModuleKeys((), ())
    assert model.weight.tolist() == [1, 1]


@pytest.mark.parametrize("hook", [clones, deletes, deletes_and_clones])
def test_a_parameter_that_a_hook_hides_and_nothing_fills_is_missing(hook: Any) -> None:
    model, folder = Hooked(hook), stored({"bias": torch.ones(2)})
    with pytest.raises(KeyMismatch, match="weight") as caught:
        load_module(model, folder)
    assert caught.value.unexpected == ("weight",)
    assert load_module(model, folder, strict=False) == ModuleKeys(("weight",), ())
    assert model.weight.tolist() == [0, 0] and model.bias.tolist() == [1, 1]


@pytest.mark.parametrize("in_common", [False, True])
def test_through_hooks_another_dtype_is_converted_on_request_alone(in_common: bool) -> None:
    other, bias = {"weight": torch.ones(2, dtype=torch.float64)}, {"bias": torch.ones(2)}
    folder = stored(bias, other) if in_common else stored(bias | other)
    model = Hooked(clones)
    with pytest.raises(ShapeError, match=r"(?s)weight.*float64.*cast=True"):
        load_module(model, folder)
    assert load_module(model, folder, cast=True) == ModuleKeys((), ())
    assert model.weight.tolist() == [1, 1] and model.weight.dtype == torch.float32


class Counted(nn.Module):
    """A module with an extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.zeros(2)), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"amax": [1.5], "step": 3}, {"history": torch.arange(3.0)}, {}])
@pytest.mark.parametrize("kind", ["flat", "nested", "object"])
def test_an_extra_state_that_is_a_dict_is_loaded(extra: Any, kind: str) -> None:
    common: dict[str, Any] = {
        "flat": {"0._extra_state": extra},
        "nested": {"0": {"_extra_state": extra}},
        "object": {"rng": st.ShardedObject("0._extra_state", extra, (1,), (0,))},
    }[kind]
    layer = Counted({"step": 0})
    assert load_module(nn.Sequential(layer), stored({"0.weight": torch.ones(2)}, common)) == ModuleKeys((), ())
    assert repr(layer.extra) == repr(extra)


def test_an_extra_state_whose_tensors_are_stored_by_themselves_is_not_given_in_part() -> None:
    history = st.ShardedTensor.from_rank_offsets("_extra_state.history", torch.ones(3))
    folder = stored({"weight": torch.ones(2)}, {"_extra_state": {"history": history, "step": 3}})
    model = Counted({"history": torch.zeros(3), "step": 0})
    named = ModuleKeys(("_extra_state",), ("_extra_state.history",))
    assert load_module(model, folder, strict=False) == named
    assert model.extra["step"] == 0


def test_a_buffer_of_the_common_state_may_have_a_stored_tensor_below_its_name() -> None:
    model = Scaled()
    tree = {"weight.absmax": torch.arange(5.0), "_extra_state": torch.zeros(1)}
    assert load_module(model, stored(tree, {"weight": torch.ones(2, 3)})) == ModuleKeys((), ())
    assert model.weight.equal(torch.ones(2, 3)) and model.absmax.equal(torch.arange(5.0))
