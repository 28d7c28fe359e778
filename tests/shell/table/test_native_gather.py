"""Small tensors that go to a file together: their bytes are those that each would have given by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.mapping import ShardedTensor
from shardtree.shell.storage import Buffer, tensor_buffers
from shardtree.shell.table.safetensors import _layout, _write
from shardtree.shell.table.safetensors._layout import Entries, FilePart, Source, entries_of, gathered, together
from shardtree.testing import STORABLE_DTYPES, random_bits, shapes
from tests.core.trees.samples import assert_caught

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Gather = Callable[[Sequence[ShardedTensor]], Buffer]

SMALL, TOGETHER = 24, 60


def of_a_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return what an operation gives whose gradient is wanted."""
    return tensor.clone().requires_grad_(True).view(tensor.shape) if tensor.is_floating_point() else tensor


def parameter(tensor: torch.Tensor) -> torch.Tensor:
    held = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    if tensor.dtype == torch.float32:
        held.grad = torch.ones_like(tensor)
    return held


def conjugate(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj() if tensor.is_complex() else tensor


def negative(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj().imag if tensor.is_complex() else tensor


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(2, *tensor.shape)


FORMS = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.permute(tuple(reversed(range(tensor.ndim)))),
    "every second": lambda tensor: tensor[::2] if tensor.ndim else tensor,
    "not from the beginning": lambda tensor: tensor[1:] if tensor.ndim else tensor,
    "expanded": expanded,
    "parameter": parameter,
    "of a graph": of_a_graph,
    "conjugate": conjugate,
    "negative": negative,
}


class Recipe(NamedTuple):
    """A tensor to be made; torch can't print all of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    form: str = "as it is"

    def make(self) -> torch.Tensor:
        return FORMS[self.form](random_bits(self.shape, self.dtype, self.seed))


@st.composite
def lists(draw: st.DrawFn) -> list[Recipe]:
    """Return recipes of tensors, many of which have elements of one size, in memory of every kind."""
    size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    dtypes = st.sampled_from([dtype for dtype in STORABLE_DTYPES if dtype.itemsize in (size, 8)])
    forms = st.sampled_from(sorted(FORMS))
    return draw(st.lists(st.builds(Recipe, shapes(), dtypes, st.integers(0, 2**16), forms), max_size=8))


def entries(held: Sequence[torch.Tensor]) -> Entries:
    shards = [ShardedTensor.from_rank_offsets(f"w{number}", tensor) for number, tensor in enumerate(held)]
    return entries_of(shards, allow_pickle=False)


def made(recipes: list[Recipe]) -> list[torch.Tensor]:
    return [recipe.make() for recipe in recipes]


def written(held: Entries) -> Iterator[Buffer]:
    return _write._part_buffers(FilePart(b"", held, held.length.cumsum() - held.length), None)


def small_limits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_layout, "_SMALL_BYTES", SMALL)
    patch.setattr(_layout, "_GATHERED_BYTES", TOGETHER)


def are_the_bytes_of_each(gather: Gather, recipes: list[Recipe]) -> None:
    held = made(recipes)
    with pytest.MonkeyPatch.context() as patch:
        small_limits(patch)
        patch.setattr(_write, "gathered", gather)
        # All are kept, as by who writes several at once.
        found = list(written(entries(held)))
    assert b"".join(found) == b"".join(buffer for tensor in held for buffer in tensor_buffers(tensor))


@pytest.mark.slow
@settings(max_examples=200)
@given(lists())
def test_what_is_gathered_are_the_bytes_of_each(recipes: list[Recipe]) -> None:
    are_the_bytes_of_each(gathered, recipes)


@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
def test_every_dtype_is_gathered(dtype: torch.dtype) -> None:
    recipes = [Recipe(shape, dtype, 5) for shape in [(2,), (), (0, 3), (1, 2)]]
    are_the_bytes_of_each(gathered, recipes)
    held = entries(made(recipes))
    grouped = [len(held.sources[rows]) for rows in together(held)]
    assert grouped == ([4] if dtype.itemsize <= 8 else [1, 1, 1, 1])


def test_the_law_catches_tensors_in_another_order() -> None:
    assert_caught(are_the_bytes_of_each, lambda shards: gathered([*shards][::-1]), lists())


@pytest.mark.slow
def test_the_law_catches_memory_that_is_taken_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_plain(source: Source, item_size: int) -> bool:
        return item_size <= 8

    def as_it_lies(shards: Sequence[ShardedTensor]) -> Buffer:
        found = bytearray()
        for data in (shard.data for shard in shards):
            first = data.storage_offset() * data.itemsize
            found += bytes(data.untyped_storage().tolist())[first : first + data.nbytes]
        return memoryview(found)

    monkeypatch.setattr(_layout, "_is_plain", is_plain)
    assert_caught(are_the_bytes_of_each, as_it_lies, lists())


Groups = Callable[[Entries], list[slice]]


def groups_of(held: Entries) -> list[slice]:
    return list(together(held))


def groups_keep_order_and_limits(group: Groups, recipes: list[Recipe]) -> None:
    held = entries(made(recipes))
    with pytest.MonkeyPatch.context() as patch:
        small_limits(patch)
        groups = group(held)
    assert [row for rows in groups for row in range(len(held))[rows]] == list(range(len(held)))
    for rows in groups:
        sizes, lengths = set(held.item_size[rows].tolist()), held.length[rows].tolist()
        assert len(sizes) == 1
        assert len(lengths) == 1 or (sum(lengths) <= TOGETHER and max(lengths) <= SMALL)


@pytest.mark.slow
@settings(max_examples=200)
@given(lists())
def test_groups_keep_the_order_and_their_limits(recipes: list[Recipe]) -> None:
    groups_keep_order_and_limits(groups_of, recipes)


def test_the_law_of_groups_catches_one_for_all() -> None:
    assert_caught(groups_keep_order_and_limits, lambda held: [slice(0, len(held))] if len(held) else [], lists())


def test_as_many_go_together_as_the_limits_say() -> None:
    most = _layout._SMALL_BYTES
    sizes = [most] * 5 + [most + 1] + [1, most]
    held = entries([torch.zeros(size, dtype=torch.uint8) for size in sizes])
    groups = [held.length[rows].tolist() for rows in together(held)]
    assert groups == [[most] * 4, [most], [most + 1], [1, most]]
