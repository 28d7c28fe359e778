"""Where target and checkpoint differ in shape or dtype: an error, or, when asked for, the overlap, converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.plans import convertible, read_rounds
from shardtree.errors import KeyMismatch, ShapeError
from shardtree.testing import PRINTABLE_DTYPES, Layout, Piece, bits, cut, layouts
from tests.options import load_keywords
from tests.shell.checkpoint.parts import saved_tensors, whole

Load = Callable[..., Any]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random values, none of which is a NaN: of these, conversions keep no particular bits."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10).to(dtype)


# The law: of another shape the overlap is loaded, converted as Tensor.to does, and the rest is what it was.


def check_overlap(
    source: torch.Tensor, kept: torch.Tensor, layout: Layout, load: Load, *, given_data: bool, **options: Any
) -> None:
    """Raise unless each rank gets the stored elements where there are some, and its own elsewhere, bit for bit."""
    expected = kept.clone() if given_data else torch.zeros_like(kept)
    part = tuple(slice(0, min(sizes)) for sizes in zip(source.shape, kept.shape, strict=True))
    expected[part] = source[part].to(kept.dtype)
    folder = saved_tensors(w=source)

    def on_rank(world: st.World) -> None:
        shards = [replace(s, allow_shape_mismatch=True) for s in cut(layout, "w", kept.clone(), world.rank)]
        targets = shards if given_data else [shard.without_data() for shard in shards]
        loaded = load(
            {f"{n}": shard for n, shard in enumerate(targets)}, folder, world=world, **load_keywords(**options)
        )
        for number, shard in enumerate(cut(layout, "w", expected, world.rank)):
            found = loaded.get(f"{number}")
            assert bits(found) == bits(shard.data), f"rank {world.rank}: {found} is not {shard.data}"

    st.simulate(layout.ranks, on_rank)


@pytest.mark.slow
@settings(max_examples=30)
@given(data=some.data())
def test_of_another_shape_the_overlap_is_loaded_and_the_rest_is_kept(data: some.DataObject) -> None:
    axes = data.draw(some.integers(0, 3))
    sizes = some.tuples(*[some.integers(0, 5)] * axes)
    shape, other = data.draw(sizes, label="stored"), data.draw(sizes, label="target")
    dtype, stored_dtype = data.draw(some.sampled_from(FLOATS)), data.draw(some.sampled_from(FLOATS))
    check_overlap(
        values(shape, stored_dtype, 1),
        values(other, dtype, 2),
        data.draw(layouts(other, 3), label="layout"),
        st.load,
        given_data=data.draw(some.booleans(), label="with data"),
        donate=data.draw(some.booleans(), label="donate"),
        exchange=data.draw(some.sampled_from(["never", "always"])),
        cast=True,
    )


SHORT, LONG = values((3, 4), torch.float32, 1), values((5, 4), torch.bfloat16, 2)
ALL = Layout(1, (5, 4), (Piece(0, (0, 0), (5, 4)),), grid=(1, 1))


def zeroing(target: Any, folder: Any, **options: Any) -> Any:
    """A planted fault: the rest becomes zeros."""
    return st.load(st.without_data(target), folder, **load_keywords(**options))


def test_the_law_catches() -> None:
    check_overlap(SHORT, LONG, ALL, st.load, given_data=True, cast=True)
    with pytest.raises(AssertionError, match="is not"):
        check_overlap(SHORT, LONG, ALL, zeroing, given_data=True, cast=True)


# Shapes.


def test_no_strict_mode_hides_a_mismatch() -> None:
    for strict in st.StrictHandling:
        with pytest.raises((ShapeError, KeyMismatch), match=r"checkpoint has|missing"):
            st.load({"w": whole("w", torch.zeros(5))}, saved_tensors(w=torch.ones(4), v=torch.ones(1)), strict=strict)


def test_a_left_out_key_does_not_hide_a_padded_one() -> None:
    target = {"w": whole("w", torch.zeros(5), allow_shape_mismatch=True), "x": whole("x", torch.zeros(1))}
    loaded, missing, unexpected = st.load(target, saved_tensors(w=torch.ones(4), v=torch.ones(1)), strict="return_all")
    assert (loaded["w"].tolist(), missing, unexpected) == ([1, 1, 1, 1, 0], {"v"}, {"x"})


# Dtypes.


@pytest.mark.parametrize("before", PRINTABLE_DTYPES, ids=str)
def test_what_is_said_to_be_convertible_is_converted_as_torch_does(before: torch.dtype) -> None:
    dtypes = {str(dtype): dtype for dtype in PRINTABLE_DTYPES if convertible(before, dtype)}
    source = torch.tensor([0, 1, 1, 0, 1], dtype=torch.uint8).to(before)
    target = {key: whole(key, torch.empty(5, dtype=dtype)) for key, dtype in dtypes.items()}
    loaded = st.load(target, saved_tensors(**dict.fromkeys(dtypes, source)), cast=True)
    assert before in dtypes.values()
    for key, dtype in dtypes.items():
        assert loaded[key].dtype == dtype and bits(loaded[key]) == bits(source.to(dtype)), key


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        (300, torch.int64, torch.uint8),
        (-1, torch.int8, torch.uint16),
        (2**63, torch.uint64, torch.int64),
        (-(2**40), torch.int64, torch.int32),
    ],
)
def test_an_integer_that_does_not_fit_is_an_error(value: int, before: torch.dtype, after: torch.dtype) -> None:
    folder = saved_tensors(w=torch.tensor([1, value], dtype=before))
    with pytest.raises(ShapeError, match=f"'w' cannot be converted[\\s\\S]*{value}"):
        st.load({"w": whole("w", torch.empty(2, dtype=after))}, folder, cast=True)


@pytest.mark.parametrize("exchange", ["never", "always"])
def test_conversions_take_bounded_rounds(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rounds, "__kwdefaults__", {"most_bytes": 20})
    pieces = [Piece(number // 3, (number, 0), (1, 4)) for number in range(5)]
    check_overlap(SHORT, LONG, Layout(2, (5, 4), tuple(pieces)), st.load, given_data=True, cast=True, exchange=exchange)
