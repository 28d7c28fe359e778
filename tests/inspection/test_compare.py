"""Two checkpoints compared: nothing is found where they are equal bit for bit, and everything where they aren't."""

from __future__ import annotations

import enum
from argparse import Namespace
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree import LoadOptions
from shardtree.inspection import _differences
from shardtree.inspection._comparison import CheckpointDifference, compare
from shardtree.inspection._differences import ValueDifference, boxes_within
from shardtree.storage import MemoryStorage
from shardtree.testing import GlobalState, bits, global_states, rank_tree, state_layouts
from tests.options import load_keywords
from tests.shell.checkpoint.parts import saved as saved_tree
from tests.shell.checkpoint.parts import whole as tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def saved(state: GlobalState, layout: Any, ranks: int) -> MemoryStorage:
    folder = MemoryStorage()
    st.simulate(ranks, lambda world: st.save(rank_tree(state, layout, world.rank), folder, world=world))
    return folder


def compared(left: torch.Tensor, right: torch.Tensor, **options: Any) -> ValueDifference | None:
    found = compare(saved_tree([tensor("w", left)]), saved_tree([tensor("w", right)]), **load_keywords(**options))
    assert replace(found, values=(), nbytes=0) == CheckpointDifference()
    return found.values[0] if found.values else None


def check_finds(state: GlobalState, left: MemoryStorage, right: MemoryStorage, changed: str | None, most: int) -> None:
    """Raise unless a comparison finds just the tensor that was changed."""
    found = compare(left, right, max_bytes_in_flight=most)
    assert [difference.key for difference in found.values] == ([changed] if changed else [])
    assert bool(found) == (changed is not None)
    assert found.nbytes == sum(whole.nbytes for whole in state.tensors.values())


@pytest.mark.slow
@given(some.data())
def test_layouts_make_no_difference_and_each_bit_does(data: some.DataObject) -> None:
    state = data.draw(global_states())
    left, right = (saved(state, data.draw(state_layouts(state, ranks)), ranks) for ranks in (3, 2))
    most = data.draw(some.sampled_from([64 * 50, 2**20]))
    check_finds(state, left, right, None, most)
    keys = [key for key, whole in state.tensors.items() if whole.numel() and whole.dtype != torch.bool]
    if keys:
        key = data.draw(some.sampled_from(keys))
        place = data.draw(some.integers(0, 8 * state.tensors[key].nbytes - 1))
        other = replace(state, tensors={**state.tensors, key: flipped(state.tensors[key], place)})
        check_finds(state, left, saved(other, data.draw(state_layouts(other, 2)), 2), key, most)


def flipped(whole: torch.Tensor, place: int) -> torch.Tensor:
    raw = bytearray(bits(whole))
    raw[place // 8] ^= 1 << place % 8
    return torch.frombuffer(raw, dtype=whole.dtype).view(whole.shape)


def test_the_law_catches_a_comparison_that_reads_half(monkeypatch: pytest.MonkeyPatch) -> None:
    state = GlobalState({"w": torch.arange(8)}, {}, {})
    left, right = saved_tree([tensor("w", torch.arange(8))]), saved_tree([tensor("w", flipped(torch.arange(8), 500))])
    check_finds(state, left, right, "w", 64)

    def half(shape: tuple[int, ...], most: int, doing: str) -> Any:
        return list(boxes_within(shape, most, doing))[:4]

    monkeypatch.setattr(_differences, "boxes_within", half)
    with pytest.raises(AssertionError):
        check_finds(state, left, right, "w", 64)


VALUES: dict[str, tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]] = {
    "floats": (torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1.0, 2, 3], [4, 7, 5.5]]), (2, (1, 1), 5, 7, 2)),
    "negative zero": (torch.tensor(0.0), torch.tensor(-0.0), (1, (), 0, 0, 0)),
    "infinities": (torch.tensor([1.0, 0]), torch.tensor([torch.inf, 0]), (1, (0,), 1, torch.inf, torch.inf)),
    "wide integers": (
        torch.tensor([7, -(2**63)]),
        torch.tensor([7, 2**63 - 1]),
        (1, (1,), -(2**63), 2**63 - 1, 2**64 - 1),
    ),
    "bytes": (torch.tensor([3, 255]).byte(), torch.tensor([5, 0]).byte(), (2, (0,), 3, 5, 255)),
    "bools": (torch.tensor([True, False]), torch.tensor([True, True]), (1, (1,), False, True, 1)),
    "complex": (torch.tensor([3j]), torch.tensor([4 + 0j]), (1, (0,), 3j, 4, 5)),
    "float8": (
        torch.tensor([2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1.0]).to(torch.float8_e4m3fn),
        (1, (0,), 2, 1, 1),
    ),
}
if hasattr(torch, "float4_e2m1fn_x2"):  # torch 2.6 hasn't; it has no numbers of these, so they are told by their bits
    left, right = (torch.tensor(raw, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for raw in ([1, 5], [1, 99]))
    VALUES["float4"] = (left, right, (1, (1,), "0x05", "0x63", None))


@pytest.mark.parametrize("most", [1, 2**20])
@pytest.mark.parametrize("case", VALUES)
def test_what_differs_is_told(case: str, most: int) -> None:
    left, right, expected = VALUES[case]
    found = compared(left, right, max_bytes_in_flight=most)
    assert found is not None
    assert (found.count, found.first, found.left, found.right, found.largest) == expected
    assert found.elements == left.numel()


def test_nans_are_equal_to_themselves_bit_for_bit() -> None:
    one, other = (torch.tensor([word], dtype=torch.int32).view(torch.float32) for word in (0x7FC00000, 0x7FC00001))
    assert compared(one, one.clone()) is None
    found = compared(one, other)
    assert found is not None and found.largest is None and str(found.left) == "nan"


def test_elements_that_torch_cannot_show_are_told_by_their_bits() -> None:
    left, right = (torch.tensor([word], dtype=torch.int16).view(torch.bits16) for word in (1, 0x7FFF))
    found = compared(left, right)
    assert found is not None and (found.left, found.right, found.largest) == ("0x0001", "0x7fff", None)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


COMMON: dict[str, Any] = {
    "args": Namespace(rates=torch.tensor([0.1, 0.2]), colour=Colour.RED),
    "buffer": BytesIO(b"abc"),
    "step": 7,
}


def changed(**values: Any) -> Any:
    return {**COMMON, "args": Namespace(**{**vars(COMMON["args"]), **values})}


@pytest.mark.parametrize("types", [(), (Colour,)])
def test_common_states_are_compared_to_the_last_field(types: tuple[type, ...]) -> None:
    left = saved_tree(COMMON)
    same, other = saved_tree(changed()), saved_tree(changed(rates=torch.tensor([0.1, 0.3]), colour=Colour.BLUE))
    assert not compare(left, same, options=LoadOptions(types=types))
    path = ("args", "colour") if types else ("args", "colour", "name")
    assert path in compare(left, other, options=LoadOptions(types=types)).common.mismatch
    assert ("args", "rates") in compare(left, other, options=LoadOptions(types=types)).common.mismatch
    assert compare(left, saved_tree({**COMMON, "buffer": BytesIO(b"abd")})).common
