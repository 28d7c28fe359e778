"""Traced values are in no memory: nothing of torch's reads it in their place, and what others have takes none."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import _memory
from shardtree.traces._storages import LentStorage
from tests.traces.test_recording import Tensors, Wrapped, eager_and_traced

GIVEN = {"a": torch.arange(24.0).view(4, 6)}


def held(tensors: Tensors, before: float = 0.0) -> torch.Tensor:
    """Return an ordinary tensor that holds traced values, and other ones in its memory."""
    buffer = torch.full((4, 6), before)
    buffer.copy_(tensors["a"])
    return buffer


# What reads the memory of a tensor that holds traced values.


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize(
    ("name", "read"),
    {
        "numpy": lambda p: torch.from_numpy(p.numpy().T.copy()),
        "array": lambda p: torch.as_tensor(np.asarray(p) + 1),
        "tolist": lambda p: torch.tensor(p.tolist()),
        "tolist of a view": lambda p: torch.tensor(p[1:].T.tolist()),
        "item": lambda p: torch.zeros(2) + p[1, 1].item(),
        "data": lambda p: torch.from_numpy(p.data.numpy()),
        "a parameter's": lambda p: torch.from_numpy(nn.Parameter(p, requires_grad=False).numpy()),
        "untyped_storage": lambda p: torch.tensor(list(bytes(p.untyped_storage()))),
        "storage": lambda p: torch.FloatTensor(p.storage()),
        "dlpack": lambda p: torch.from_dlpack(p.__dlpack__()),
        "from_dlpack": lambda p: torch.from_dlpack(p).clone(),
        "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p)),
        "numpy's from_dlpack": lambda p: torch.as_tensor(np.from_dlpack(p).copy()),
        "pickle": lambda p: pickle.loads(pickle.dumps(p)),
        "copy": lambda p: copy.copy(p),
        "a file": lambda p: torch.save(p, io.BytesIO()),
        "share_memory_": lambda p: p.share_memory_(),
        "a tensor of numbers": lambda p: torch.tensor([p[0, 0], p[1, 1]]),
        "a tensor of numbers, as it was made once": lambda p: torch.Tensor([p[0, 0], p[1, 1]]),
        "new_tensor": lambda p: torch.zeros(1).new_tensor([[p[0, 0]], [p[1, 1]]]),
        "new": lambda p: torch.zeros(1).new([p[0, 0], p[1, 1]]),
        "lists of indices": lambda p: torch.arange(9)[[[p[0, 0].long(), p[1, 1].long()]]],
        "a sparse tensor of numbers": lambda p: torch.sparse_coo_tensor([[0, 1]], [p[0, 0], p[1, 1]]).to_dense(),
        "apply_": lambda p: p.apply_(lambda value: value + 1),
        "map_": lambda p: torch.zeros(4, 6).map_(p, lambda one, other: other),
    }.items(),
)
def test_memory_that_lacks_traced_values_isn_t_read(name: str, read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(TraceError, match="'a', which has none while it is traced"):
        st.trace(lambda tensors: {"w": read(held(tensors))}, GIVEN)


def test_a_copy_is_recorded_and_pointers_may_be_compared() -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer = torch.zeros(4, 6)
        other = nn.Parameter(buffer[:], requires_grad=False)
        buffer.copy_(tensors["a"])
        assert buffer.data_ptr() == other.data_ptr() != torch.zeros(1).data_ptr()
        _ = f"{buffer}", f"{buffer[0, 0]:.3f}", repr(buffer.T), str(other)
        module = copy.deepcopy(nn.ParameterDict({"p": other}))
        return {"tensor": copy.deepcopy(buffer) + 1, "parameter": module["p"] * 2}

    eager_and_traced(load, GIVEN)


POISON = 12_345.0
NOT_CALLED = {"index", "order", "backward", "register_hook", "__del__", "__new__", "__init__", "__class__"}


def shows(value: Any) -> bool:
    """Return whether what was in memory is in a plain value, or in an ordinary tensor made of it."""
    if isinstance(value, torch.Tensor):
        try:
            return shows(value.detach().tolist())
        except Exception:
            return False  # it holds traced values itself
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fc" and bool((value == POISON).any())
    if isinstance(value, (list, tuple)):
        return any(map(shows, value))
    if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        return not isinstance(value, LentStorage) or shows(list(value))
    return value == POISON if isinstance(value, (int, float, complex)) else isinstance(value, str) and "1234" in value


METHODS = sorted(set(dir(torch.Tensor)) - NOT_CALLED)


def methods_that_show_memory(names: Sequence[str]) -> list[str]:
    """Return those methods and properties of tensors that give what memory has instead of traced values."""
    found = []

    def load(tensors: Tensors) -> Tensors:
        for name in names:
            for shape in ((), (2, 2)):
                tensor = torch.full(shape, POISON)
                tensor.copy_(tensors["a"].view(shape) if shape else tensors["a"][0])
                for args in ((), (lambda value: value,)):
                    try:
                        value = getattr(tensor, name)
                        value = value(*args) if callable(value) else value
                        found.extend([name] * shows(value))
                    except Exception:
                        continue
        return {}

    with contextlib.suppress(TraceError):  # of all the refusals that were caught
        st.trace(load, {"a": torch.zeros(4)})
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_method_of_tensors_shows_memory_that_lacks_traced_values() -> None:
    assert methods_that_show_memory(METHODS) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tolist", "numpy", "untyped_storage"])
def test_the_law_of_memory_catches_a_method_without_a_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_memory._RULES, getattr(torch.Tensor, name))
    assert name in methods_that_show_memory([name])


# Memory that others have takes no traced values.


EXPORTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda p: p.numpy(),
    "array": lambda p: np.asarray(p[1:]),
    "untyped_storage": lambda p: p.untyped_storage().tolist(),
    "storage": lambda p: p.storage()[0],
    "dlpack": torch.from_dlpack,
    "to_dlpack": lambda p: torch.utils.dlpack.to_dlpack(p),
    "share_memory_": lambda p: p.share_memory_(),
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize(("name", "export"), EXPORTS.items())
def test_memory_that_was_given_away_takes_no_traced_values(name: str, export: Callable[[torch.Tensor], Any]) -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer = torch.zeros(4, 6)
        _ = export(buffer)
        buffer[2:].copy_(tensors["a"][2:])
        return {"w": buffer}

    with pytest.raises(TraceError, match=rf"a write of 'a' to memory that the code gave to {name} at .*{__file__}:"):
        st.trace(load, GIVEN)


@pytest.mark.parametrize(
    ("name", "make"),
    {
        "an array": lambda: torch.from_numpy(np.zeros((4, 6), np.float32)),
        "frombuffer": lambda: torch.frombuffer(bytearray(96), dtype=torch.float32).view(4, 6),
        "from_dlpack": lambda: torch.from_dlpack(np.zeros((4, 6), np.float32)),
        "a storage": lambda: torch.empty(0).set_(torch.UntypedStorage(96)).view(4, 6),
    }.items(),
)
def test_memory_that_was_another_s_takes_no_traced_values(name: str, make: Callable[[], torch.Tensor]) -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer = make()
        buffer.copy_(tensors["a"])
        return {"w": buffer}

    with pytest.raises(TraceError, match=f"a write of 'a' to memory that the code gave to {name} at"):
        st.trace(load, GIVEN)


def test_a_storage_from_before_the_call_shows_no_traced_values() -> None:
    weight = torch.zeros(4, 6)
    storage = weight.untyped_storage()

    def load(tensors: Tensors) -> Tensors:
        weight.copy_(tensors["a"])
        return {"w": torch.empty(0).set_(storage).clone()}

    with pytest.raises(TraceError, match="a storage needs elements of 'a'"):
        st.trace(load, GIVEN)


ASKED: dict[str, Callable[[Any], Any]] = {
    "an element": lambda s: s[0],
    "a list": list,
    "bytes": bytes,
    "text": repr,
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "clone": lambda s: s.clone(),
    "pickle": pickle.dumps,
    "a file": lambda s: torch.save(s, io.BytesIO()),
    "set_": lambda s: torch.empty(0).set_(s),
    "a tensor": lambda s: torch.FloatTensor(s),
    "copy_": lambda s: torch.UntypedStorage(96).copy_(s),
    "fill_": lambda s: s.fill_(1),
    "asarray": lambda s: torch.asarray(s),
    "an array": np.asarray,
    "another's view": lambda s: torch.empty(0).set_(s._untyped_storage),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("name", "ask"), ASKED.items())
def test_a_storage_of_traced_values_tells_no_element(
    name: str, ask: Callable[[Any], Any], *, is_late: bool, is_typed: bool
) -> None:
    told = []

    def load(tensors: Tensors) -> Tensors:
        buffer = torch.full((4, 6), POISON)
        storage = buffer.storage() if is_typed else buffer.untyped_storage()
        if is_late:
            buffer.copy_(tensors["a"])
        assert storage.data_ptr() == buffer.data_ptr()
        try:
            told.append(ask(storage))
        except TraceError:
            raise
        except Exception:
            pass  # storages don't have it: but what has been asked counts
        buffer.copy_(tensors["a"])
        return {"w": buffer}

    with pytest.raises(TraceError, match=r"storage"):
        st.trace(load, GIVEN)
    assert not (told and is_late)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_storage_says_which_it_is(*, is_late: bool) -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer, other = torch.zeros(4, 6), torch.zeros(4, 6)
        if is_late:
            buffer.copy_(tensors["a"])
        one, view = buffer.untyped_storage(), buffer[1:].untyped_storage()
        assert one is view is not other.untyped_storage() and one == view
        assert len({one, view, other.untyped_storage()}) == 2
        assert one.data_ptr() == buffer.data_ptr() and one._cdata == view._cdata
        assert one.nbytes() == one.size() == len(one) == 96 and one.device == buffer.device
        assert (buffer.storage().size(), buffer.storage().nbytes(), buffer.storage().dtype) == (24, 96, torch.float32)
        assert buffer.is_shared() is False
        buffer.copy_(tensors["a"])
        return {"w": buffer}

    eager_and_traced(load, GIVEN)


def test_where_memory_is_needs_no_elements() -> None:
    def load(tensors: Tensors) -> Tensors:
        for tensor in (tensors["a"], held(tensors), nn.Parameter(held(tensors))):
            assert not tensor.is_pinned() and not tensor.is_shared()
            assert tensor.__dlpack_device__() == torch.zeros(1).__dlpack_device__() == (1, 0)
            assert not hasattr(tensor, "__cuda_array_interface__")
        return dict(tensors)

    eager_and_traced(load, GIVEN)


def test_safetensors_loads_a_model_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}

    def load(tensors: Tensors) -> Tensors:
        model = nn.Linear(3, 2)
        monkeypatch.setattr(safetensors.torch, "load_file", lambda *args, **kwargs: dict(tensors))
        safetensors.torch.load_model(model, "model.safetensors")
        return model.state_dict()

    assert st.trace(load, given) == st.trace(dict, given)


def test_a_tensor_whose_storage_was_compared_is_pickled() -> None:
    def load(tensors: Tensors) -> Tensors:
        weight = torch.ones(4, 6)
        _ = weight.untyped_storage().data_ptr()
        torch.save(weight, io.BytesIO())
        return {"w": pickle.loads(pickle.dumps(weight)) + tensors["a"]}

    eager_and_traced(load, GIVEN)


def test_memory_that_others_change_is_read_anew() -> None:
    def load(tensors: Tensors) -> Tensors:
        array, given = np.zeros((4, 6), np.float32), torch.zeros(4, 6)
        taken = torch.from_numpy(array)
        before = torch.stack([tensors["a"], taken, given])
        array += 5
        given.numpy()[1:] = 7
        return {"before": before, "after": torch.stack([tensors["a"], taken, given])}

    eager_and_traced(load, GIVEN)


def test_what_torch_changes_other_than_first_is_read_anew() -> None:
    def load(tensors: Tensors) -> Tensors:
        some, other, third = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(4, 6)
        before = torch.stack([tensors["a"], some, other, third])
        torch.add(torch.ones(4, 6), 1, out=some)
        torch._foreach_add_([other, other[1:]], 3.0)
        third.apply_(lambda value: value + 1)
        return {"before": before, "after": torch.stack([tensors["a"], some, other, third])}

    eager_and_traced(load, GIVEN)


def test_the_code_s_own_constants_are_copied_and_read() -> None:
    def load(tensors: Tensors) -> Tensors:
        layer = nn.Linear(6, 4, bias=False).requires_grad_(False)
        layer.weight.fill_(2.0)
        index = torch.tensor([0, 0])
        index.fill_(1)
        weight = copy.deepcopy(layer).weight
        shared = torch.arange(24.0).view(4, 6).share_memory_()
        return {"w": weight + tensors["a"], "rows": tensors["a"][copy.deepcopy(index).tolist()], "s": shared[:1] + 1}

    eager_and_traced(load, GIVEN)


# Tensors around others.


def test_a_wrapped_tensor_does_what_it_does_to_the_one_in_it() -> None:
    def load(tensors: Tensors) -> Tensors:
        local = torch.zeros(4, 6)
        wrapped = Wrapped(local)
        local.copy_(tensors["a"])
        wrapped.mul_(2)
        return {"w": wrapped.clone()}

    eager_and_traced(load, GIVEN)


def test_a_sparse_tensor_of_traced_values_isn_t_read() -> None:
    def load(tensors: Tensors) -> Tensors:
        sparse = torch.eye(4).to_sparse()
        sparse.values().copy_(tensors["a"][0, :4])
        return {"w": sparse.to_dense()}

    with pytest.raises(TraceError, match="_to_dense needs elements"):
        st.trace(load, GIVEN)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_tensor_is_not_split_where_traced_values_say(is_held: bool) -> None:
    def load(tensors: Tensors) -> Tensors:
        places = torch.zeros(2, dtype=torch.int64).copy_(tensors["i"]) if is_held else tensors["i"]
        return {"w": torch.arange(4.0).tensor_split(places)[0]}

    with pytest.raises(TraceError, match="tensor_split needs elements of 'i'"):
        st.trace(load, {"i": torch.tensor([2, 3])})


def test_a_lens_of_code_that_reads_memory_is_refused() -> None:
    def read(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(4, 6)
        buffer.copy_(tensor)
        return torch.from_numpy(buffer.numpy())

    with pytest.raises(TraceError, match="numpy needs elements"):
        st.lenses.from_function(read)(st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6)))
