"""What a format's writer accepts, its reader opens without `allow_pickle`; and `verify` opens what a load opens."""

from __future__ import annotations

import io
import pathlib
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from urllib.parse import ParseResult

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import TreeError, UnsafeFile, UnsupportedValue
from shardtree.formats.archives._decode import FACTORIES
from shardtree.storage import MemoryStorage
from tests.shell.checkpoint.parts import FORMATS

TYPES = (HTTPStatus, ParseResult)
"""Classes of the caller's; in protocol 2 the second one is of a module `urlparse`."""

LEAVES: list[Callable[[], Any]] = [
    *(lambda factory=factory: defaultdict(factory, a=factory()) for factory in FACTORIES),
    *(lambda: None, lambda: -(2**80), lambda: float("nan"), lambda: 1 - 2j, lambda: "é", lambda: b"\xff"),
    *(lambda: bytearray(b"a"), lambda: range(3), lambda: slice(1, None), lambda: {1, "a"}, lambda: frozenset([b"a"])),
    *(lambda: Counter("aab"), lambda: OrderedDict(a=1), lambda: deque([1], 3), lambda: {(1, 2): 3, None: 4, 0.5: 5}),
    *(lambda: Namespace(a=1), lambda: SimpleNamespace(a=1), lambda: io.BytesIO(b"ab"), lambda: pathlib.Path("a/b")),
    *(lambda: torch.bfloat16, lambda: torch.device("cuda:1"), lambda: torch.Size([1, 2]), lambda: torch.strided),
    *(lambda: torch.arange(3), lambda: torch.zeros(2, dtype=torch.float8_e4m3fn), lambda: torch.tensor([1j]).conj()),
    *(lambda: torch.eye(2).to_sparse(), lambda: torch.nn.Parameter(torch.zeros(2)), lambda: torch.Generator()),
    *(lambda: np.float64(1), lambda: np.bool_(True), lambda: np.str_("a"), lambda: np.datetime64("2020-01-01")),
    *(lambda: np.arange(4.0)[::2], lambda: np.array(["a"]), lambda: np.array([None]), lambda: np.dtype("f4")),
    *(lambda: HTTPStatus.OK, lambda: ParseResult(*"abcdef"), lambda: Fraction(1, 2), lambda: Decimal(1), lambda: int),
    *(lambda: defaultdict(lambda: 1), lambda: defaultdict(Counter), lambda: object()),
]
WRAPS: list[Callable[[Any], Any]] = [
    *(lambda value: value, lambda value: [value], lambda value: (1, value), lambda value: deque([value])),
    *(lambda value: {"x": value}, lambda value: OrderedDict(x=value), lambda value: defaultdict(int, x=value)),
    *(lambda value: Namespace(x=value), lambda value: {3: value}),
]
PLACES: list[Callable[[Any], Any]] = [lambda value: value, lambda value: st.ShardedObject("o", value, (1,), (0,))]
"""In the common state, and in an object."""

Save = Callable[[Any, MemoryStorage, tuple[str, int]], object]


def check_opens(save: Save, backend: tuple[str, int], place: int, value: Any) -> None:
    tree = {"state": PLACES[place](value), "w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    target, folder = {"state": PLACES[place](None)} if place else {}, MemoryStorage()
    try:
        save(tree, folder, backend)
    except (UnsupportedValue, TreeError):
        return
    options = st.LoadOptions(types=TYPES)
    try:
        assert "state" in st.load(target, folder, options=options)
    except UnsafeFile as error:
        raise AssertionError("the reader refuses what the writer took") from error
    reports: list[Any] = []
    assert st.verify(folder, options=options, report=reports.append) == ()
    assert not refused(reports[0])


def refused(report: Any) -> list[str]:
    """Return what a load refuses, as `verify` reports it."""
    return [one.why for one in report.unchecked if "refuses" in one.why]


ARCHIVES = [("torch_dist", 1), ("dcp", 1)]
"""Formats that keep values in torch.save's archives, in pickles of protocol 2; the others have no pickles."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ARCHIVES, ids=str)
def test_each_kind_of_value_is_opened_or_refused_by_the_writer(backend: tuple[str, int]) -> None:
    for number, make in enumerate(LEAVES):
        check_opens(st.save, backend, number % 2, {"x": [make()]})


@given(
    some.sampled_from(FORMATS),
    some.integers(0, 1),
    some.sampled_from(LEAVES),
    some.lists(some.sampled_from(WRAPS), max_size=3),
)
def test_what_a_writer_accepts_its_reader_opens(
    backend: tuple[str, int], place: int, make: Callable[[], Any], wraps: list[Callable[[Any], Any]]
) -> None:
    value = make()
    for wrap in wraps:
        value = wrap(value)
    check_opens(st.save, backend, place, value)


def save_pickled(tree: Any, folder: MemoryStorage, backend: tuple[str, int]) -> None:
    """The planted fault: a writer that takes what its reader refuses."""
    st.save(tree, folder, backend, options=st.SaveOptions(allow_pickle=True))


@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_the_law_of_what_is_opened_catches_pickles(backend: tuple[str, int]) -> None:
    check_opens(save_pickled, backend, 0, defaultdict(int))
    with pytest.raises(AssertionError):
        check_opens(save_pickled, backend, 0, Fraction(1, 2))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("backend", ARCHIVES, ids=str)
def test_verify_names_what_a_load_with_the_same_options_refuses(backend: tuple[str, int], place: int) -> None:
    folder, reports = MemoryStorage(), list[Any]()
    st.save({"state": PLACES[place](HTTPStatus.OK)}, folder, backend)
    for options in (None, st.LoadOptions(types=TYPES)):
        assert st.verify(folder, options=options, report=reports.append) == ()
    assert "it names http.HTTPStatus" in refused(reports[0])[0]
    assert not refused(reports[1])


def test_verify_names_a_common_state_that_was_pickled() -> None:
    folder, reports = MemoryStorage(), list[Any]()
    save_pickled({"state": Fraction(1, 2)}, folder, ("safetensors", 1))
    for options in (None, st.LoadOptions(allow_pickle=True)):
        assert st.verify(folder, options=options, report=reports.append) == ()
    assert [len(refused(report)) for report in reports] == [1, 0]
