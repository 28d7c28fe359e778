"""Nothing depends on the state of torch around a call: results are, bit for bit, those without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import shardtree as st
from shardtree.core import fingerprints
from shardtree.core.ambient import shielded
from shardtree.core.lazy import computed, lazy_map
from shardtree.storage import MemoryStorage
from shardtree.testing import bits

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
MATRIX = torch.linspace(-1, 1, 48).view(6, 8)
STATE = {f"w.{dtype}": (MATRIX * 9).to(dtype) for dtype in DTYPES}
OBJECTS = {"rng": st.ShardedObject("rng", {"seed": torch.arange(3)}, (1,), (0,)), "lr": 0.1, "steps": torch.ones(2)}


class Spoiling(TorchFunctionMode):
    """A mode that gives what is made another dtype and device, as tools for meta initialisation do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func in (torch.empty, torch.zeros, torch.tensor, torch.ones, torch.arange)
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if made else {})})


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:  # ranks that are simulated enter at once, so that what was before may be another's
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def several() -> Iterator[None]:
    with Spoiling(), torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        yield


AMBIENT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a default device": default_device,
    "a device's context": lambda: torch.device("meta"),
    "a default dtype": default_dtype,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic algorithms": deterministic,
    "fake tensors": FakeTensorMode,
    "a function mode": Spoiling,
    "several": several,
}


def tree(**fields: Any) -> dict[str, Any]:
    return {key: st.ShardedTensor.from_rank_offsets(key, data, **fields) for key, data in STATE.items()} | OBJECTS


def saved() -> MemoryStorage:
    place = MemoryStorage()
    st.save(tree(), place)
    return place


def rows(number: int) -> dict[str, st.ShardedTensor]:
    offsets = (0, number, 2)
    return {key: st.ShardedTensor.from_rank_offsets(key, data.chunk(2)[number], offsets) for key, data in STATE.items()}


def asked(**fields: Any) -> dict[str, st.ShardedTensor]:
    return st.without_data(tree(**fields))


def saves(state: Any) -> Any:
    place = MemoryStorage()
    with state():
        st.save(tree(), place)
    return st.load(asked(), place)


def saves_later(state: Any) -> Any:
    place = MemoryStorage()
    with state(), st.AsyncCallsQueue() as queue:
        queue.warm_up(tree())
        queue.schedule_async_request(st.save(tree(), place, async_sharded_save=True))
        queue.maybe_finalize_async_calls(blocking=True)
    return st.load(asked(), place)


def loads(state: Any) -> Any:
    place = saved()
    with state():
        return st.load(asked(), place), st.load_plain_tensors(place), st.load_common_state_dict(place)


def loads_in_place(state: Any) -> Any:
    place, target = saved(), st.map_data(lambda data: torch.zeros(data.shape[::-1]).to(data.dtype).t(), tree())
    given = {key: target[key].data for key in STATE}
    with state():
        found = st.load(target, place, donate=True)
    assert all(found[key] is data and not data.is_inference() for key, data in given.items())
    return found


def converts(state: Any) -> Any:
    place, other = saved(), MemoryStorage()
    with state():
        st.convert(place, other, backend="torch_dist")
    return st.load(asked(), other)


def reshards(state: Any) -> Any:
    sources = [rows(0), rows(1)]
    whole = {key: st.ShardedTensor.from_rank_offsets(key, torch.zeros_like(data)) for key, data in STATE.items()}
    with state():
        return st.reshard(sources, [whole])


def redistributes(state: Any) -> Any:
    def of_rank(world: st.World) -> Any:
        source, target = rows(world.rank), st.without_data(rows(1 - world.rank))
        with state():
            return st.redistribute(source, target, world=world)

    return st.simulate(2, of_rank)


def computes(state: Any) -> Any:
    lazy = st.open_checkpoint(saved())[f"w.{torch.float32}"].data
    many = (lazy @ lazy.T, lazy_map(torch.tanh, lazy) * 0.5 + lazy, lazy.to(torch.bfloat16)[1:, ::2], lazy[:0])
    norms = computed(lambda whole: whole @ whole.T, lazy, (6, 6), torch.float32)
    place = MemoryStorage()
    with state():
        read = [one.read() for one in (*many, norms)]
        st.save({"p": st.ShardedTensor.from_rank_offsets("p", many[0])}, place)
    return read, st.load_plain_tensors(place)


def fingerprints_(state: Any) -> Any:
    place = saved()
    with state():
        parts = fingerprints.add_fingerprints([fingerprints.partial_fingerprints(tree())])
        return st.fingerprint(tree()), st.fingerprint(place), parts


def looks(state: Any) -> Any:
    place, other = saved(), MemoryStorage()
    st.save(tree() | {"w": st.ShardedTensor.from_rank_offsets("w", MATRIX)}, other)
    with state():
        st.verify(place)
        return str(st.compare(place, other)), str(st.explain(asked(), place))


DOING = (saves, saves_later, loads, loads_in_place, converts, reshards, redistributes, computes, fingerprints_, looks)


def exactly(value: Any) -> Any:
    """Return a value with its tensors as what tells them apart: bits, dtype, device, nature."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device, value.is_inference(), bits(value)
    if isinstance(value, (st.ShardedTensor, st.ShardedObject)):
        return type(value), value.key, exactly(value.data)
    if isinstance(value, dict):
        return {key: exactly(one) for key, one in value.items()}
    return [exactly(one) for one in value] if isinstance(value, (list, tuple)) else value


@cache
def alone(do: Callable[[Any], Any]) -> Any:
    return exactly(do(nullcontext))


def is_undisturbed(do: Callable[[Any], Any], state: Callable[[], AbstractContextManager[Any]]) -> bool:
    return bool(alone(do) == exactly(do(state)))


@pytest.mark.slow
@pytest.mark.parametrize("state", AMBIENT)
@pytest.mark.parametrize("do", DOING, ids=lambda do: do.__name__)
def test_what_surrounds_a_call_changes_no_bit(do: Callable[[Any], Any], state: str) -> None:
    assert is_undisturbed(do, AMBIENT[state])


FORMATS = [("torch_dist", 1), ("dcp", 1), ("zarr", 3), ("huggingface", 1)]


def uses_format(backend: tuple[str, int], state: Any) -> Any:
    """Return what is saved, loaded and converted in a format, each in a state of torch, and what the files hold."""
    kept = {f"w.{dtype}" for dtype in (torch.float32, torch.bfloat16, torch.int64)}
    held: Any = {key: leaf for key, leaf in tree().items() if key in kept}
    if backend[0] != "huggingface":
        held |= OBJECTS
    place, native, back = MemoryStorage(), MemoryStorage(), MemoryStorage()
    with state():
        st.save(held, place, backend)
        found = st.load(st.without_data(held), place), st.load_plain_tensors(place)
        st.convert(place, native, backend="safetensors")
        st.convert(native, back, backend=backend[0])
    return found, st.load(st.without_data(held), native), st.load(st.without_data(held), back)


IN_FORMAT = {backend: partial(uses_format, backend) for backend in FORMATS}


@pytest.mark.slow
@pytest.mark.parametrize("state", AMBIENT)
@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_what_surrounds_a_call_changes_no_bit_in_any_format(backend: tuple[str, int], state: str) -> None:
    assert is_undisturbed(IN_FORMAT[backend], AMBIENT[state])


def unshielded_product(state: Any) -> Any:
    lazy = st.open_checkpoint(saved())[f"w.{torch.float32}"].data
    with state():
        return st.LazyTensor.read.__wrapped__(lazy @ lazy.T)  # type: ignore[attr-defined]


def unshielded_memory(state: Any) -> Any:
    with state():
        return torch.zeros(2)


@pytest.mark.parametrize("state", sorted({*AMBIENT} - {"no gradients", "deterministic algorithms"}))
def test_the_law_catches_what_is_computed_or_made_as_torch_happens_to_be(state: str) -> None:
    def is_caught(do: Callable[[Any], Any]) -> bool:
        try:
            return not is_undisturbed(do, AMBIENT[state])
        except (AssertionError, RuntimeError):  # of a tensor without elements
            return True

    assert is_caught(unshielded_product) or is_caught(unshielded_memory)


def surroundings() -> Any:
    with torch.no_grad():
        one = torch.ones(2, 2)
        return type(one), one.device, one.dtype, one.is_inference(), (one @ one).dtype


def fails() -> None:
    raise ValueError("planted")


@pytest.mark.parametrize("state", AMBIENT)
def test_what_surrounded_a_shielded_call_is_there_again(state: str) -> None:
    with AMBIENT[state]():
        before = surroundings()
        shielded(torch.zeros)(2)
        with pytest.raises(ValueError, match="planted"):
            shielded(fails)()
        assert surroundings() == before


@pytest.mark.parametrize("state", sorted({*AMBIENT} - {"no gradients", "deterministic algorithms"}))
def test_the_comparison_catches_a_state_that_is_left(state: str) -> None:
    with AMBIENT[state]():
        before = surroundings()
    assert surroundings() != before


@pytest.mark.parametrize("around", [nullcontext, torch.inference_mode])
def test_an_engines_inference_tensors_are_filled_and_stay_what_they_are(around: Any) -> None:
    with torch.inference_mode():
        held = {"whole": torch.zeros(6, 8), "strided": torch.zeros(8, 6).t(), "fused": torch.zeros(6, 8)}
    target: dict[str, Any] = {key: st.ShardedTensor.from_rank_offsets("w", data) for key, data in held.items()}

    def build(key: str, data: torch.Tensor, replica_id: Any, flat: Any) -> Any:
        halves = enumerate(data.clone().chunk(2))
        return [st.ShardedTensor.from_rank_offsets(key, half, (0, part, 2)) for part, half in halves]

    target["fused"] = st.ShardedTensorFactory("w", held["fused"], build, torch.cat)
    place = MemoryStorage()
    source = {"w": st.ShardedTensor.from_rank_offsets("w", MATRIX)}
    st.save(source, place)
    for fill in (
        lambda: st.load(target, place, donate=True, validate_access_integrity=False),
        lambda: st.map_shards(lambda leaf: leaf.data, st.redistribute(source, target, donate=True)),
    ):
        with torch.inference_mode():
            for data in held.values():
                data.zero_()
        with around():
            found = fill()
        assert all(found[key] is data and data.is_inference() for key, data in held.items())
        assert all(torch.equal(data, MATRIX) for data in held.values())
    with pytest.raises(RuntimeError, match="outside InferenceMode"):
        held["whole"].zero_()  # the planted fault: what is written as any tensor is


@pytest.mark.parametrize("dtype", [torch.bits8, torch.uint4])
def test_what_torch_cannot_fill_is_loaded_under_deterministic_algorithms(dtype: torch.dtype) -> None:
    place, data = MemoryStorage(), torch.arange(8, dtype=torch.uint8).view(dtype)
    shard = st.ShardedTensor.from_rank_offsets("w", data)
    st.save({"w": shard}, place)
    with deterministic():
        found = st.load({"w": shard.without_data()}, place)["w"]
    assert bits(found) == bits(data)
