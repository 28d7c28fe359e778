from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import ShapeError
from shardtree.testing import check_pure, first_difference
from shardtree.transforms import pad_tensors, transpose_tensors, unpad_tensors
from tests.transforms.flat_trees import Tree, check_same, check_undone, flat, lazily, two_of_a_kind, whole


@some.composite
def tables(draw: some.DrawFn) -> tuple[Tree, int]:
    """Return two tensors of the same length along an axis, of which other axes may be cut, and that axis."""
    axes = draw(some.integers(1, 3))
    axis = draw(some.integers(-axes, axes - 1))
    shape = [draw(some.integers(0, 3)) for _ in range(axes)]
    return two_of_a_kind(draw, "*.table", shape, axis), axis


@given(tables(), some.integers(0, 3))
def test_unpad_undoes_pad(drawn: tuple[Tree, int], more: int) -> None:
    tree, axis = drawn
    length = tree["0.table"].data.shape[axis]
    pad = st.bind(pad_tensors, ["*.table"], length + more, axis=axis)
    check_undone(pad, st.bind(unpad_tensors, ["*.table"], length, axis=axis), tree)
    for padded in (pad(tree), pad(lazily(tree))):
        for key in ("0.table", "1.table"):
            data = padded[key].data.narrow(axis, length, more)
            read = data if isinstance(data, torch.Tensor) else data.read()
            assert not any(read.contiguous().view(torch.uint8).flatten().tolist()), key


FILLS: dict[str, Any] = {
    "a number": -2.5,
    "a mean": lambda table: table.double().mean(0),
    "a row": lambda table: table[0],
}


def filled(pad: Callable[..., Tree], tree: Tree, fill: Any, length: int) -> None:
    """Raise unless rows were added that are the fill, and nothing else has changed, of lazy tensors too."""
    old = tree["0.table"].data
    row = fill(old).to(old.dtype) if callable(fill) else torch.full((4,), fill, dtype=old.dtype)
    for padded in (pad(tree, ["*.table"], length, fill=fill), pad(lazily(tree), ["*.table"], length, fill=fill)):
        data = padded["0.table"].data
        read = data if isinstance(data, torch.Tensor) else data.read()
        expected = torch.cat([old, *[row[None]] * (length - len(old))])
        assert first_difference(read, expected) is None
        check_same(unpad_tensors(padded, ["*.table"], len(old)), tree)
        # Read alone, a new row is what it is in the whole.
        part = data[length - 1 :, 1:3]
        assert first_difference(part if isinstance(part, torch.Tensor) else part.read(), expected[-1:, 1:3]) is None


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_the_fill_and_unpad_undoes_it(fill: str, dtype: torch.dtype) -> None:
    table = torch.randn(5, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    filled(partial(check_pure, pad_tensors), flat(whole("0.table", table)), FILLS[fill], 8)


def test_the_law_of_fills_catches_rows_that_look_at_the_padding() -> None:
    def one_by_one(tree: Tree, keys: list[str], length: int, fill: Any) -> Tree:
        for more in range(6, length + 1):
            tree = pad_tensors(tree, keys, more, fill=lambda table: table.float().mean(0))
        return tree

    with pytest.raises(AssertionError):
        filled(one_by_one, flat(whole("0.table", torch.arange(20.0).view(5, 4).sqrt())), lambda t: t[:5].mean(0), 8)


def test_what_a_lazy_fill_is_made_of() -> None:
    calls: list[torch.Size] = []

    def fill(table: torch.Tensor) -> torch.Tensor:
        calls.append(table.shape)
        return table.mean(0)

    table = lazily(flat(whole("w", torch.ones(5, 4))))
    padded = pad_tensors(table, ["w"], 8, fill=fill)["w"].data
    assert calls == [] and {fetch.shape for fetch in padded[6:].fetches} == {(5, 4)}
    assert padded[5:].read().eq(1).all() and padded[6:7].read().eq(1).all()
    assert calls == [(5, 4)], "computed once, of all of it"
    assert padded.source.parts[1].source.made_of is None, "a function has no identity"
    numbers = [pad_tensors(table, ["w"], 8, fill=fill)["w"].data.source.parts[1].source for fill in (0, 1)]
    assert numbers[0].made_of != numbers[1].made_of, "a conversion with another number is another one"


def test_the_padding_law_catches_padding_in_front() -> None:
    tree = flat(whole("0.table", torch.arange(1, 4)))
    in_front = flat(whole("0.table", torch.tensor([0, 1, 2, 3])))
    check_same(unpad_tensors(pad_tensors(tree, ["*.table"], 4), ["*.table"], 3), tree)
    with pytest.raises(AssertionError, match="table"):
        check_same(unpad_tensors(in_front, ["*.table"], 3), tree)


@given(tables(), some.data())
def test_the_inverse_order_undoes_transpose(drawn: tuple[Tree, int], data: some.DataObject) -> None:
    tree, _ = drawn
    axes = len(tree["0.table"].local_shape)
    order = data.draw(some.permutations(range(axes)))
    inverse = [order.index(axis) for axis in range(axes)]
    back = st.bind(transpose_tensors, ["**.table"], inverse)
    check_undone(st.bind(transpose_tensors, ["**.table"], [axis - axes for axis in order]), back, tree)
    reverse = st.bind(transpose_tensors, ["**.table"])
    check_undone(reverse, reverse, tree)


def test_the_transposing_law_catches_data_that_stay() -> None:
    square = torch.arange(4).reshape(2, 2)
    tree = flat(whole("0.table", square))
    check_same(transpose_tensors(flat(whole("0.table", square.T)), ["0.table"]), tree)
    with pytest.raises(AssertionError, match="table"):
        check_same(transpose_tensors(tree, ["0.table"]), tree)


def test_boxes_are_transposed_with_their_places() -> None:
    box = st.ShardedTensor.from_rank_offsets("w", torch.arange(6).reshape(2, 3), (0, 1, 2), (1, 2, 4))
    found = check_pure(transpose_tensors, {"w": box}, ["w"], (1, 0))["w"]
    assert found.data.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (found.global_shape, found.global_offset, found.axis_fragmentations) == ((12, 4), (6, 2), (4, 2))


def test_a_fraction_is_refused_among_lazy_integers_too() -> None:
    with pytest.raises(ShapeError, match=r"a tensor of torch\.int32 cannot hold the padding 0\.5"):
        pad_tensors(lazily(flat(whole("i", torch.ones(2).int()))), ["i"], 3, fill=0.5)
