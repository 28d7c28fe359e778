"""An engine on the meta device is traced as one on the CPU: what its loader makes of numbers there is a constant."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import _constants

Tensors = dict[str, torch.Tensor]
Loader = Callable[[torch.Tensor, Tensors], object]
GIVEN = {"w": torch.arange(12.0).reshape(4, 3), "s": torch.tensor(2.0), "one": torch.tensor([3.0])}


def traced(load: Loader, device: str, shape: tuple[int, ...]) -> st.Trace:
    parameter = nn.Parameter(torch.empty(shape, device=device), requires_grad=False)
    return st.trace(lambda given: load(parameter, given), GIVEN, into=lambda: {"p": parameter})


def check_the_same(load: Loader, shape: tuple[int, ...]) -> None:
    """An engine on meta is traced as one on the CPU, which does what the loader does."""
    on_meta, on_cpu = traced(load, "meta", shape), traced(load, "cpu", shape)
    parameter = torch.zeros(shape)
    load(parameter, GIVEN)
    assert on_meta == on_cpu
    assert on_meta.check() == on_cpu.check()
    assert torch.equal(on_meta(GIVEN, fill=0.0)["p"], parameter)


def padded(pad: Callable[[torch.Tensor], object]) -> Loader:
    def load(p: torch.Tensor, given: Tensors) -> None:
        p.data[:4].copy_(given["w"])
        pad(p.data)

    return load


def rows(index: Callable[[torch.Tensor], torch.Tensor]) -> Loader:
    return lambda p, given: p.data.copy_(given["w"][index(p)])


def on(p: torch.Tensor, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=p.device)


def _filled_first(p: torch.Tensor, given: Tensors) -> None:
    p.data[[1]] = 0
    p.data[[0, 2]] = given["w"][[0, 1]]


def _by_mask_first(p: torch.Tensor, given: Tensors) -> None:
    p.data[torch.tensor([False, True, False])] = 5.0
    p.data[[0, 2]] = given["w"][[0, 1]]


def _buffer(p: torch.Tensor, given: Tensors) -> None:
    buffer = torch.zeros(6, 3, device=p.device)
    buffer[:4] = given["w"]
    p.data.copy_(buffer)


def _asked(p: torch.Tensor, given: Tensors) -> None:
    mask = torch.tensor([True, False, True], device=p.device)
    assert torch.zeros(1, device=p.device).item() == 0.0
    assert mask.nonzero().tolist() == [[0], [2]]
    assert mask.any()
    assert torch.ones(3, device=p.device).sort().values[0] == 1
    p.data.copy_(given["w"][0][mask])


def _copied(p: torch.Tensor, given: Tensors) -> None:
    ones = copy.deepcopy(torch.ones(4, 3, device=p.device))
    assert type(ones) is torch.Tensor
    p.data.copy_(given["w"])
    p.data[0] = ones[0]


def _scattered(p: torch.Tensor, given: Tensors) -> None:
    p.data.copy_(given["w"])
    p.data.scatter_(0, on(p, 1, 0, 1)[None], given["w"][3:])


def _bytes(p: torch.Tensor) -> torch.Tensor:
    return torch.full((2, 3, 4), 66, dtype=torch.uint8, device=p.device)


def _reshaped(change: Callable[[torch.Tensor], torch.Tensor]) -> Loader:
    """Return a loader of a constant that is changed in place into another view of itself."""
    return lambda p, given: p.data.copy_(change(torch.arange(12.0, device=p.device).reshape(4, 3)))


def _on_the_cpu(p: torch.Tensor, given: Tensors) -> None:
    zeros = torch.zeros(2, 3, device=p.device).cpu()
    assert zeros.shape == (2, 3)
    p.data.copy_(torch.cat([zeros.add_(1), given["w"][:2]]))


def _in_lists(p: torch.Tensor, given: Tensors) -> None:
    rows = [torch.ones(3, device=p.device), torch.arange(3.0, device=p.device)]
    torch._foreach_add_(rows, 1)
    p.data.copy_(torch.stack(rows))


LOADERS: dict[str, tuple[Loader, tuple[int, ...]]] = {
    "a list": (lambda p, given: p.data.__setitem__([1, 0], given["w"][:2]), (2, 3)),
    "an array": (lambda p, given: p.data.__setitem__(torch.arange(2).numpy(), given["w"][:2]), (2, 3)),
    "arange": (rows(lambda p: torch.arange(2, device=p.device)), (2, 3)),
    "tensor": (rows(lambda p: on(p, 3, 0)), (2, 3)),
    "new_tensor": (rows(lambda p: p.new_tensor([3, 0], dtype=torch.long)), (2, 3)),
    "computed": (rows(lambda p: (torch.arange(4, device=p.device) * 3 + 1).remainder(4).flip(0)), (4, 3)),
    "selected": (lambda p, given: p.data.copy_(given["w"].index_select(0, on(p, 2, 0))), (2, 3)),
    "a number": (padded(lambda p: p[4:].fill_(0)), (6, 3)),
    "assigned": (padded(lambda p: p.__setitem__(slice(4, None), 0.5)), (6, 3)),
    "zeros": (padded(lambda p: p[4:].copy_(torch.zeros(2, 3, device=p.device))), (6, 3)),
    "zeros and one": (padded(lambda p: p[4:].copy_(torch.zeros(2, 3, device=p.device) + 1)), (6, 3)),
    "bits": (padded(lambda p: p[4:].copy_(_bytes(p).view(torch.float32)[..., 0])), (6, 3)),
    "masked": (padded(lambda p: p.__setitem__(torch.arange(6, device=p.device) >= 4, 0)), (6, 3)),
    "masked_fill_": (padded(lambda p: p.masked_fill_((torch.arange(6, device=p.device) >= 4)[:, None], 0)), (6, 3)),
    "in place": (padded(lambda p: p[4:].copy_(torch.ones(2, 3, device=p.device).tril_().cumsum(0))), (6, 3)),
    "largest": (padded(lambda p: p[4:].copy_(torch.arange(3, device=p.device).max())), (6, 3)),
    "a buffer": (_buffer, (6, 3)),
    "filled first": (_filled_first, (3, 3)),
    "masked first": (_by_mask_first, (3, 3)),
    "scattered": (_scattered, (4, 3)),
    "asked": (_asked, (2,)),
    "copied": (_copied, (4, 3)),
    "one scale": (lambda p, given: p.data.copy_(given["one"].max() + given["one"].amax(0, keepdim=True).min()), (1,)),
    "unsqueezed in place": (_reshaped(lambda a: a.unsqueeze_(0)[0]), (4, 3)),
    "squeezed in place": (_reshaped(lambda a: a.unsqueeze_(1).squeeze_(1).add_(1)), (4, 3)),
    "transposed in place": (_reshaped(lambda a: a.t_().add_(1)), (3, 4)),
    "moved to the CPU": (_on_the_cpu, (4, 3)),
    "as an array": (lambda p, given: p.data.copy_(torch.asarray(obj=[1.0, 2.0], device=p.device)), (2,)),
    "in lists": (_in_lists, (2, 3)),
    "item": (lambda p, given: p.data.fill_(given["s"].item()), (1,)),
    "item assigned": (lambda p, given: p.data.__setitem__(0, given["one"].item()), (2,)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_an_engine_on_meta_is_traced_as_one_on_the_cpu(name: str) -> None:
    check_the_same(*LOADERS[name])


def test_zeros_of_any_size_are_one_number() -> None:
    huge = padded(lambda p: p[4:].copy_(torch.zeros(1 << 20, 1 << 20, device="meta").bfloat16()[:2, :3]))
    assert traced(huge, "meta", (6, 3))(GIVEN)["p"][5].tolist() == [0.0, 0.0, 0.0]


def test_the_law_of_engines_on_meta_catches_constants_that_nobody_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_constants, "note_constants", lambda *args: None)
    with pytest.raises(AssertionError):
        check_the_same(*LOADERS["zeros"])


@pytest.mark.parametrize(
    "load",
    [
        lambda p, given: bool(p.data[0] != 1),
        lambda p, given: p.data[0].item(),
        lambda p, given: (p != 1).nonzero(),
        lambda p, given: p[p > 0],
        lambda p, given: p.tolist(),
        lambda p, given: p.cpu(),
        lambda p, given: torch.equal(p, p),
        lambda p, given: p.data.masked_fill_(p.data != 1, 0),
    ],
)
def test_what_an_engine_on_meta_holds_itself_isn_t_known(load: Loader) -> None:
    with pytest.raises(TraceError, match="Build the engine on the CPU") as caught:
        traced(load, "meta", (1,))
    assert "test_engines_on_meta.py" in str(caught.value), "the caller's line"


@pytest.mark.parametrize(
    ("advice", "load"),
    [
        ("torch.where", lambda p, given: given["w"].masked_fill(given["w"] > 3, 0)),
        ("an index that is not read", lambda p, given: p.data.scatter_(0, given["w"].long(), 1.0)),
        ("torch.maximum", lambda p, given: given["w"].max()),
        ("torch.minimum", lambda p, given: given["w"].amin(0)),
    ],
)
def test_a_refusal_says_in_a_line_what_to_write(advice: str, load: Loader) -> None:
    with pytest.raises(TraceError, match=advice) as caught:
        traced(load, "meta", (4, 3))
    assert len(str(caught.value).splitlines()) == 3


def test_the_advice_for_scales_is_traced() -> None:
    def load(p: torch.Tensor, given: Tensors) -> None:
        p.data.copy_(torch.maximum(given["s"], given["one"][0]))

    check_the_same(load, (1,))


@pytest.mark.parametrize(
    "use",
    [
        lambda number: number * 2,
        lambda number: torch.ones(2) * number,
        lambda number: float(number),
        lambda number: number > 1,
        lambda number: f"{int(number)}",
        lambda number: torch.tensor(number),
        lambda number: torch.tensor([number]),
        lambda number: torch.full((2,), number),
        lambda number: [1, 2][number],
    ],
)
def test_a_number_of_a_source_fills_tensors_and_is_none_otherwise(use: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(TraceError, match="'s'"):
        traced(lambda p, given: use(given["s"].item()), "cpu", (1,))


@pytest.mark.parametrize(
    ("dtype", "is_safe"),
    [(torch.int32, False), (torch.float16, False), (torch.bfloat16, True), (torch.float64, True), (torch.bool, True)],
)
def test_a_number_that_may_leave_a_dtype_s_range_is_refused(dtype: torch.dtype, is_safe: bool) -> None:
    given, p = {"s": torch.tensor(1e10)}, torch.zeros(4, dtype=dtype)
    if is_safe:
        found = st.trace(lambda tensors: p.fill_(tensors["s"].item()), given, into=lambda: {"p": p})
        assert torch.equal(found(given)["p"], p.clone().fill_(given["s"].item()))
        return
    with pytest.raises(RuntimeError, match="without overflow"):
        p.fill_(given["s"].item())
    with pytest.raises(TraceError, match="leaves the range of"):
        st.trace(lambda tensors: p.fill_(tensors["s"].item()), given, into=lambda: {"p": p})


def test_a_scalar_of_an_engine_on_meta_counts_as_never_written() -> None:
    found = traced(lambda p, given: p.data.copy_(given["w"][0] * p[0]), "meta", (3,))
    with pytest.raises(TraceError, match="never written"):
        found(GIVEN)
    assert torch.equal(found(GIVEN, fill=2.0)["p"], GIVEN["w"][0] * 2)


def test_item_of_a_source_is_no_python_number() -> None:
    kinds = []
    traced(lambda p, given: kinds.append(given["s"].item()), "cpu", (1,))
    assert isinstance(kinds[0], torch.Tensor)
    assert kinds[0].shape == ()
