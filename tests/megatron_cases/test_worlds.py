"""The comparison and the places on which these cases rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron_cases.worlds import Place, assert_same, places

ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ONE, ONE.double()),
        (ONE, ONE.reshape(1, 2)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        ({"w": ONE}, {"w": ONE, "more": []}),
        ({"w": [ONE]}, {"w": (ONE,)}),
        ({"step": 1}, {"step": True}),
    ],
    ids=["dtype", "shape", "sign of zero", "empty container", "container's type", "value's type"],
)
def test_the_comparison_catches_another(found: Any, expected: Any) -> None:
    assert_same(expected, expected)
    with pytest.raises(AssertionError):
        assert_same(found, expected)


def test_tensor_ranks_are_neighbours_and_stages_are_furthest_apart() -> None:
    found = places(2, 2)
    assert [(place.tp, place.dp, place.pp) for place in found[:5]] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 0, 1),
    ]
    assert found[-1] == Place(1, 1, 1, 2, 2, 2)
