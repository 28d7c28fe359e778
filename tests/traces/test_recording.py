"""What a loader may do while it is traced, and what is refused: by name, with the caller's line, and never a crash."""

from __future__ import annotations

import copy
import pickle
import subprocess
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import shardtree as st
from shardtree.errors import CheckpointingException, TraceError
from tests.quick_python.command import quick_python

Tensors = dict[str, torch.Tensor]
GIVEN = {"w": torch.arange(12.0).reshape(4, 3), "v": torch.arange(4.0)}


def eager_and_traced(function: Callable[[Tensors], Tensors], given: Tensors = GIVEN) -> st.Trace:
    found = st.trace(function, given)
    outputs, eager = found(given), function(given)
    assert outputs.keys() == eager.keys()
    for name, tensor in eager.items():
        assert outputs[name].dtype == tensor.dtype
        assert torch.equal(outputs[name], tensor), name
    return found


def in_threads(*functions: Callable[[], Any]) -> None:
    threads = [Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Trap 1: Python's operators take a TypeError for "ask the other operand".


@pytest.mark.parametrize(
    ("name", "ask"),
    {
        "item, bool, int or float": lambda w: float(w[0, 0]),
        "all": lambda w: (w != 0).all(),
        "sum": lambda w: w.sum(),
        "mm": lambda w: w @ w.T,
        "equal": lambda w: torch.equal(w, w),
        "isnan": lambda w: torch.isnan(w),
        "nonzero": lambda w: w.nonzero(),
        "tolist": lambda w: w.tolist(),
        "array": lambda w: np.asarray(w),
        "data_ptr": lambda w: w.data_ptr(),
        "untyped_storage": lambda w: w.untyped_storage(),
        "set_": lambda w: w.set_(torch.zeros(2)),
        "pickling": lambda w: pickle.dumps(w),
        "an index": lambda w: torch.arange(9)[w[0].long()],
    }.items(),
)
def test_what_needs_elements_is_refused_by_name(name: str, ask: Callable[[Any], Any]) -> None:
    def load(tensors: Tensors) -> Tensors:
        ask(tensors["w"])
        return {}

    with pytest.raises(TraceError, match="which has none while it is traced") as caught:
        st.trace(load, GIVEN)
    assert isinstance(caught.value, CheckpointingException)
    assert isinstance(caught.value, RuntimeError)
    assert not isinstance(caught.value, TypeError)
    text = str(caught.value)
    assert "'w'" in text
    assert "test_recording.py" in text, "the caller's line"


@pytest.mark.parametrize(
    ("reason", "ask"),
    [
        (
            r"as_subclass\(Parameter\) cannot be recorded for 'w': traces record plain",
            lambda w: w.as_subclass(nn.Parameter),
        ),
        ("setting .data to an ordinary tensor cannot be recorded for", lambda w: setattr(w, "data", torch.zeros(3))),
    ],
)
def test_another_refusal_has_its_own_reason(reason: str, ask: Callable[[Any], Any]) -> None:
    def load(tensors: Tensors) -> Tensors:
        ask(tensors["w"])
        return {}

    with pytest.raises(TraceError, match=reason):
        st.trace(load, GIVEN)


def test_the_error_names_the_operation_the_tensor_and_the_line() -> None:
    def load(tensors: Tensors) -> Tensors:
        return {"w": tensors["w"] / torch.cat([tensors["w"], tensors["v"][None, :3]]).max()}

    with pytest.raises(TraceError) as caught:
        st.trace(load, GIVEN)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "trace: max needs elements of 'w', 'v', which has none while it is traced"
    assert second.strip().startswith("found at ")
    assert second.endswith(f"test_recording.py:{load.__code__.co_firstlineno + 1} in load")


def test_comparisons_are_functions_of_each_element_and_their_truth_is_refused() -> None:
    eager_and_traced(lambda tensors: {"w": torch.where(tensors["w"] < tensors["v"][None, :3], 0.0, tensors["w"])})
    for ask in (lambda w: bool(w[0, 0] == 0), lambda w: w[w < 1]):
        with pytest.raises(TraceError, match="which has none while it is traced"):
            st.trace(lambda tensors, ask=ask: {"w": ask(tensors["w"])}, GIVEN)


# Trap 2: `param.data = tracer`.


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.weight.loader = "kept"  # type: ignore[attr-defined]


def test_a_parameter_s_data_can_be_set() -> None:
    model = Linear()

    def load(tensors: Tensors) -> None:
        model.weight.data = tensors["w"].flip(0)
        model.weight.data.mul_(2)
        assert model.weight.loader == "kept"  # type: ignore[attr-defined]
        assert isinstance(model.weight, nn.Parameter)

    found = st.trace(load, GIVEN, into=model.state_dict)
    assert torch.equal(found(GIVEN)["weight"], GIVEN["w"].flip(0) * 2)


def test_data_may_be_set_again_and_in_any_thread_then() -> None:
    model = Linear()

    def load(tensors: Tensors) -> None:
        model.weight.data = tensors["w"]

        def put() -> None:
            model.weight.data = model.weight.data.t().contiguous()

        in_threads(put)

    found = st.trace(load, GIVEN, into=lambda: {"weight": model.weight})
    assert torch.equal(found(GIVEN)["weight"], GIVEN["w"].t())
    with pytest.raises(TraceError, match=r"setting \.data to an ordinary tensor"):
        st.trace(lambda tensors: setattr(tensors["w"], "data", torch.zeros(2)), GIVEN)


# Trap 3: in a handler, ordinary tensors that were written to become tracers first.


def test_an_ordinary_tensor_that_was_written_is_read_as_what_was_written() -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer, other = torch.zeros(4, 3), torch.full((4, 3), 7.0)
        buffer[1:3].copy_(tensors["w"][:2])
        return {"sum": buffer + tensors["w"], "cat": torch.cat([other, buffer, tensors["w"]]), "own": buffer * 2}

    eager_and_traced(load)


def test_a_model_is_not_changed_by_being_traced() -> None:
    model = Linear()

    def load(tensors: Tensors) -> None:
        with torch.no_grad():
            model.weight[:2].copy_(tensors["w"][:2])
            model.weight[2:].fill_(5.0)

    found = st.trace(load, GIVEN, into=model.state_dict)
    assert not model.weight.any()
    assert found(GIVEN)["weight"].tolist() == [[0, 1, 2], [3, 4, 5], [5, 5, 5], [5, 5, 5]]


# Trap 5: `torch.empty` looks like data.


def test_what_is_empty_is_unwritten_and_what_init_functions_fill_counts() -> None:
    def load(tensors: Tensors) -> Tensors:
        empty, init = torch.empty(4), torch.empty(4)
        nn.init.ones_(init)
        empty[:2].copy_(tensors["v"][:2])
        return {"empty": empty, "init": init, "uniform": nn.init.uniform_(torch.empty(2))}

    found = st.trace(load, GIVEN)
    problems = [(each.kind, each.name, each.elements, each.where) for each in found.check() if each.kind != "unused"]
    assert problems == [("unwritten", "empty", 2, "[2:4]")]
    assert found(GIVEN, fill=-1)["init"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_destination_held_before_counts_as_never_written(device: str) -> None:
    model = Linear().to(device)

    def load(tensors: Tensors) -> None:
        with torch.no_grad():
            model.weight[1:].copy_(tensors["w"][1:])

    found = st.trace(load, GIVEN, into=model.state_dict)
    assert [str(each) for each in found.check() if each.kind == "unwritten"] == [
        "'weight': 3 elements are never written: [0, 0:3]"
    ]
    assert found(GIVEN, fill=0)["weight"].tolist() == [[0, 0, 0], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    untouched = st.trace(lambda tensors: None, GIVEN, into=model.state_dict)
    assert [each.elements for each in untouched.check() if each.kind == "unwritten"] == [12]


# Trap 6: modes belong to one thread; more of it is in test_threads.py.


def test_threads_may_load() -> None:
    model = nn.ModuleDict({str(number): Linear() for number in range(8)})
    given = {f"{number}.weight": torch.rand(4, 3) for number in range(8)}

    def load(tensors: Tensors) -> None:
        def put(number: int) -> None:
            with torch.no_grad():
                halves = tensors[f"{number}.weight"].chunk(2)
                model[str(number)].weight.copy_(torch.cat(halves[::-1]))

        in_threads(*(partial(put, number) for number in range(8)))

    found = st.trace(load, given, into=model.state_dict)
    outputs = found(given)
    assert all(torch.equal(outputs[name], torch.cat(each.chunk(2)[::-1])) for name, each in given.items())


# Trap 7: inference mode hands over composite operations whole; `out=`.


def test_inference_mode_and_out_are_recorded() -> None:
    def load(tensors: Tensors) -> Tensors:
        with torch.inference_mode():
            parts = tensors["w"][:].reshape(2, 6).chunk(2, 1)
            first = torch.stack(parts).flatten().contiguous()
            out = torch.empty(8, 3)
            torch.cat([tensors["w"], tensors["w"].flip(1)], out=out)
            half = torch.empty(4)
            torch.mul(tensors["v"], 0.5, out=half)
        return {"first": first, "out": out, "half": half}

    eager_and_traced(load)


def test_what_is_reshaped_in_inference_mode_is_copied_from_what_was_written() -> None:
    def load(tensors: Tensors) -> Tensors:
        with torch.inference_mode():
            buffer = torch.empty(4, 3)
            buffer.copy_(tensors["w"])
            return {"turned": buffer.t().reshape(-1), "same": buffer.reshape(-1)}

    eager_and_traced(load)


# Trap 8 is above: `.item() .tolist() .numpy() data_ptr set_ equal isnan`, pickling and `np.asarray`.


def test_a_tracer_can_be_copied_and_printed() -> None:
    def load(tensors: Tensors) -> Tensors:
        assert repr(tensors["w"]) == f"{tensors['w']}" == "Tracer('w', float32[4,3])"
        assert f"{tensors['v'][0]:.3f}" == "Tracer('v', float32[])"
        return {"w": copy.deepcopy(tensors["w"])}

    st.trace(load, GIVEN)


# Trap 9: safetensors' slices are passed into loaders; DTensors only by their local tensors.


def test_a_tracer_does_for_a_slice_of_safetensors() -> None:
    def load(tensors: Tensors) -> Tensors:
        piece: Any = tensors["w"]
        rows, _ = piece.get_shape()
        assert piece.get_dtype() == "F32"
        return {"w": piece[rows // 2 :, :2], "all": piece[:]}

    found = st.trace(load, GIVEN)
    assert torch.equal(found(GIVEN)["w"], GIVEN["w"][2:, :2])


def test_a_dtype_that_safetensors_has_no_name_for_is_refused() -> None:
    with pytest.raises(TraceError, match="safetensors has no name for complex128"):
        st.trace(lambda tensors: {"w": tensors["w"].get_dtype()}, {"w": torch.empty(2, dtype=torch.complex128)})


class Wrapped(torch.Tensor):
    """A tensor around another, as a DTensor is."""

    local: torch.Tensor

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Wrapped:
        self = torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype)
        self.local = local
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [each.local if isinstance(each, Wrapped) else each for each in args]
        return func(*unwrapped, **(kwargs or {}))


def test_joining_with_a_wrapped_tensor_is_refused() -> None:
    text = r"an operation with a Wrapped cannot be recorded: traces record plain tensors, no subclasses"
    with pytest.raises(TraceError, match=text):
        st.trace(lambda given: {"w": torch.cat([Wrapped(torch.zeros(4, 3)), given["w"]])}, GIVEN)


def test_copying_into_a_wrapped_tensor_is_refused() -> None:
    wrapped = Wrapped(torch.zeros(4, 3))

    def load(tensors: Tensors) -> Tensors:
        wrapped.copy_(tensors["w"])
        return {}

    with pytest.raises(TraceError, match="copy_ into a Wrapped cannot be recorded for 'w': traces record plain"):
        st.trace(load, GIVEN)
    found = st.trace(lambda tensors: {"w": wrapped.local.copy_(tensors["w"])}, GIVEN)
    assert torch.equal(found(GIVEN)["w"], GIVEN["w"])


# Trap 10: a file that the loader opens itself becomes a large constant.


def test_what_the_code_reads_itself_is_a_constant_and_is_said() -> None:
    of_a_file = torch.rand(20, 10)
    found = st.trace(lambda tensors: {"w": torch.cat([tensors["w"], of_a_file[:, :3]])}, {"w": torch.empty(4, 3)})
    [problem] = found.check()
    assert (problem.kind, problem.name, problem.elements) == ("constant", "w", 60)
    assert "read from a file" in str(problem)
    assert torch.equal(found({"w": torch.ones(4, 3)})["w"][4:], of_a_file[:, :3])
    assert found.inverse()(found({"w": torch.ones(4, 3)}))["w"].tolist() == torch.ones(4, 3).tolist()


# Trap 11: tied outputs; a view of another item size.


def test_outputs_of_one_memory_are_tied() -> None:
    def load(tensors: Tensors) -> Tensors:
        table = tensors["w"].clone()
        return {"embed": table, "head": table, "first": table[:1]}

    found = eager_and_traced(load)
    assert dict(found.tied) == {"head": "embed"}
    assert {each.kind for each in found.check()} == {"unused", "repeated"}
    two = st.trace(lambda tensors: {"embed": tensors["w"], "head": tensors["w"]}, {"w": torch.empty(4, 3)})
    assert two.check() == ()
    assert list(two.inverse().sources) == ["embed"]
    outputs = two({"w": GIVEN["w"]})
    assert outputs["embed"] is outputs["head"]


def test_a_view_of_another_item_size_is_refused() -> None:
    with pytest.raises(TraceError, match="view as a dtype of another size cannot be recorded for 'w': the new"):
        st.trace(lambda tensors: {"w": tensors["w"].view(torch.uint8)}, GIVEN)
    with pytest.raises(TraceError, match="of another size"):
        st.trace(lambda tensors: {"w": tensors["w"].to(torch.complex64).real}, GIVEN)
    with pytest.raises(TraceError, match="_conj"):
        st.trace(lambda tensors: {"w": tensors["w"].to(torch.complex64).conj()}, GIVEN)
    eager_and_traced(lambda tensors: {"w": tensors["w"].view(torch.int32) ^ 5})


def test_a_buffer_of_bytes_is_cut_into_tensors_and_isn_t_read_as_bytes_again() -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer = torch.empty(64, dtype=torch.uint8)
        parts = buffer.view(torch.float32)
        parts[:12].view(4, 3).copy_(tensors["w"])
        parts[12:].copy_(tensors["v"])
        return {"w": parts[:12].view(3, 4), "v": parts[12:], **({"bytes": buffer} if as_bytes else {})}

    as_bytes = False
    eager_and_traced(load)
    as_bytes = True
    with pytest.raises(TraceError, match="a view as a dtype of another size"):
        st.trace(load, GIVEN)


# Trap 12, and scale: the cost grows with tensors, not with their elements.


def test_the_cost_does_not_grow_with_elements() -> None:
    given = {"w": st.traces.Kind((129_280, 7168), torch.bfloat16)}

    def load(tensors: Tensors) -> Tensors:
        new = torch.empty(130_000, 7168, dtype=torch.bfloat16, device="meta")
        new[:129_280].copy_(tensors["w"].view(64, 2020, 7168).transpose(0, 1).reshape(129_280, 7168))
        new[129_280:].zero_()
        return {"w": new}

    found = st.trace(load, given)
    assert len(found.moves["w"]) == 2
    assert found.check() == ()


# What else loaders do.


@pytest.mark.parametrize(
    "make",
    [
        lambda w, v: w.T.contiguous(),
        lambda w, v: w.unsqueeze(0).expand(2, 4, 3).reshape(8, 3),
        lambda w, v: w.repeat_interleave(2, 0),
        lambda w, v: torch.roll(w, 1, 0),
        lambda w, v: torch.nn.functional.pad(w, (0, 1, 1, 0), value=2.0),
        lambda w, v: torch.tril(w),
        lambda w, v: w[torch.tensor([True, False, True, False])],
        lambda w, v: w[torch.tensor([0, 1]), torch.tensor([2, 0])],
        lambda w, v: w[torch.tensor([[0, 1], [3, -1]])],
        lambda w, v: torch.gather(w, 1, torch.tensor([[0], [1], [2], [0]])),
        lambda w, v: torch.where(torch.tensor([True, False, True]), w, -w),
        lambda w, v: w.clone().index_copy_(0, torch.tensor([2, 0]), w[:2] * 2),
        lambda w, v: w.new_zeros(2, 2),
        lambda w, v: torch.zeros_like(w).add_(w),
        lambda w, v: (w * v[:, None]).to(torch.float16),
        lambda w, v: w.to(torch.float16) * v[1],
        lambda w, v: v[1] * v[2] + w,
        lambda w, v: (w + torch.tensor(2.0, dtype=torch.float64)).half(),
        lambda w, v: v[2] + torch.tensor(2.0, dtype=torch.float64),
        lambda w, v: torch.exp(-w) / 3,
        lambda w, v: torch.stack([w, w]).mul(0.5).clamp(0, 4),
        lambda w, v: torch.einsum("ij->ji", w),
        lambda w, v: w.movedim(0, 1).unflatten(1, (2, 2)).swapaxes(0, 2),
        lambda w, v: torch.cat(torch.split(w, [1, 3])[::-1]).view(-1)[1:-1:2],
        lambda w, v: nn.Parameter(w).data.squeeze().detach(),
        lambda w, v: w.transpose(0, 1).clone().as_strided((3, 2), (2, 1)),
        lambda w, v: torch.empty_like(w).copy_(w.half()),
        lambda w, v: torch.zeros(2, 4, 3).copy_(w),
        lambda w, v: torch.narrow(w, 0, 1, 0),
    ],
)
def test_an_operation_does_what_it_does(make: Callable[[Any, Any], Any]) -> None:
    eager_and_traced(lambda tensors: {"out": make(tensors["w"], tensors["v"])})


def test_writes_through_views_of_views() -> None:
    def load(tensors: Tensors) -> Tensors:
        fused = torch.zeros(2, 6, 3)
        fused.view(12, 3)[2:6].copy_(tensors["w"])
        fused[1].T[0, 1:5] = tensors["v"]
        fused[:, 5] += 1
        return {"fused": fused}

    eager_and_traced(load)


def test_a_write_to_a_view_with_elements_twice_is_refused() -> None:
    def load(tensors: Tensors) -> Tensors:
        new = torch.empty(6)
        new.as_strided((2, 3), (2, 1)).copy_(tensors["w"][:2])
        return {"new": new}

    with pytest.raises(TraceError, match="torch leaves open which of them stays"):
        st.trace(load, GIVEN)


def overwritten(write: Callable[[torch.Tensor, torch.Tensor], object]) -> dict[str, int]:
    into = torch.empty(4, 3)
    found = st.trace(lambda given: write(into, given["w"]), GIVEN, into=lambda: {"p": into})
    return {each.where: each.elements for each in found.check() if each.kind == "overwritten"}


def _in_chunks(p: torch.Tensor, w: torch.Tensor) -> None:
    new = p.copy_(w).exp()
    for number in range(4):
        p[number].copy_(new[number])


@pytest.mark.parametrize(
    ("write", "lost"),
    [
        (lambda p, w: p.copy_(w).copy_(-torch.exp(p.double())), {}),
        (lambda p, w: p.copy_(w).copy_(p[[1, 0, 3, 2]]), {}),
        (lambda p, w: p.copy_(w).copy_(p * w).copy_(p + 1), {}),
        (_in_chunks, {}),
        (lambda p, w: p.copy_(w).copy_(w + 1), {"[0:4, 0:3]": 12}),
        (lambda p, w: p.copy_(w).copy_(p + 1).copy_(w), {"[0:4, 0:3]": 12}),
        (lambda p, w: p.copy_(w)[0].copy_(p[1]), {"[0, 0:3]": 3}),
        (lambda p, w: p.copy_(w)[:2].copy_(p[1:3].clone()), {"[0, 0:3]": 3}),
        (lambda p, w: p.copy_(w).copy_(p.clone()).copy_(w), {"[0:4, 0:3]": 12}),
    ],
)
def test_a_value_that_the_new_one_is_computed_from_is_not_overwritten(
    write: Callable[[torch.Tensor, torch.Tensor], object], lost: dict[str, int]
) -> None:
    assert overwritten(write) == lost


def test_scalars_and_single_elements_are_told_as_they_are() -> None:
    found = st.trace(lambda given: {"v": given["v"][1:]}, {**GIVEN, "scale": torch.tensor(1.0)})
    assert [str(each) for each in found.check()][1:] == [
        "'v': 1 element reaches no output: [0]",
        "'scale': 1 element reaches no output: the scalar",
    ]


def test_a_number_of_a_source_decides_no_dtype() -> None:
    wide = {"s": torch.tensor(2.5, dtype=torch.float64)}
    with pytest.raises(TraceError, match=r"(?s)mul needs.*Leave item\(\) out"):
        st.trace(lambda given: {"r": torch.tensor([1, 2]) * given["s"].item()}, wide)


def test_functions_name_their_arguments() -> None:
    found = st.trace(lambda given: {"w": -torch.exp(given["w"].double()), "v": 2 ** given["v"]}, GIVEN)
    assert "[a] = pow(2, v[a])  (a=4)" in str(found)
    with pytest.raises(TraceError) as caught:
        found.inverse()
    assert "'w' is computed: exp(w.to(float64))" in str(caught.value)
    assert "'v' is computed: pow(2, v)" in str(caught.value)


def test_pinned_memory_is_a_copy() -> None:
    found = st.trace(lambda given: {"w": given["w"].pin_memory(), "v": given["v"].clone()}, GIVEN)
    assert found == st.trace(dict, GIVEN)


def test_what_was_overwritten_is_said() -> None:
    def load(tensors: Tensors) -> Tensors:
        new = torch.empty(4, 3)
        new.copy_(tensors["w"])
        new[1:3, 0].copy_(tensors["v"][:2])
        return {"new": new}

    found = eager_and_traced(load)
    assert [str(each) for each in found.check() if each.kind == "overwritten"] == [
        "'new': 2 elements were written and later overwritten: [1:3, 0]"
    ]


def test_sources_may_be_shards_checkpoints_and_kinds(tmp_path: Any) -> None:
    st.save(
        {"w": st.ShardedTensor.from_rank_offsets("w", GIVEN["w"]), "rng": st.ShardedObject("rng", 1, (1,), (0,))},
        tmp_path,
    )
    opened = st.open_checkpoint(tmp_path)
    shards = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2))}
    kinds = {"w": st.traces.Kind((4, 3), torch.float32)}
    save_file({"w": GIVEN["w"]}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        slices = {"w": file.get_slice("w")}
        traces = [st.trace(dict, each) for each in (opened, shards, kinds, {"w": GIVEN["w"]}, slices)]
    assert all(each == traces[0] for each in traces) and traces[0].sources.keys() == {"w"}


@pytest.mark.parametrize("result", [None, [1], {"w": 1}])
def test_code_that_gives_no_tensors_is_refused(result: Any) -> None:
    with pytest.raises(TraceError, match="the outputs are not a dict of tensors"):
        st.trace(lambda tensors: result, GIVEN)


def test_an_error_of_the_code_is_its_own() -> None:
    def load(tensors: Tensors) -> Tensors:
        return {"w": tensors["missing"]}

    with pytest.raises(KeyError, match="missing"):
        st.trace(load, GIVEN)
    with pytest.raises(RuntimeError, match="shape"):
        st.trace(lambda tensors: {"w": tensors["w"].view(5, 5)}, GIVEN)


def test_tracing_what_moves_does_not_import_torch_s_compiler() -> None:
    """It would take two seconds, of every job that saves through a lens."""
    code = """
import sys, torch, shardtree as st
st.trace(lambda given: {"w": given["w"].view(2, 2).T}, {"w": torch.empty(4)})
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([*quick_python(), "-c", code], check=True)


def test_what_random_functions_fill_is_never_written_until_it_is_loaded() -> None:
    def load(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        new = torch.empty_like(tensors["w"]).uniform_(1, 16).log_()
        also = torch.expm1(torch.rand_like(tensors["w"]))
        new[:2] = tensors["w"][:2]
        return {"new": new, "also": also}

    found = st.trace(load, {"w": torch.ones(3, 2)})
    assert [(each.kind, each.name, each.elements) for each in found.check()] == [
        ("unused", "w", 2),
        ("unwritten", "new", 2),
        ("unwritten", "also", 6),
    ]
    lost = st.trace(lambda tensors: {"w": tensors["w"].clone().normal_()}, {"w": torch.ones(3, 2)})
    assert {each.kind for each in lost.check()} == {"unused", "overwritten", "unwritten"}


def test_what_a_model_on_meta_computes_for_itself_isn_t_refused() -> None:
    def load(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        index = torch.zeros(4, 4, 2, device="meta")
        index[:, :, 0] += 3
        return {"w": tensors["w"].clone(), "index": index.sum(-1)}

    found = st.trace(load, {"w": torch.ones(3)})
    assert found.check() == ()
    assert torch.equal(found({"w": torch.ones(3)})["index"], torch.full((4, 4), 3.0))
