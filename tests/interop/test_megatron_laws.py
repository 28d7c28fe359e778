"""from_megatron and to_megatron undo each other, field by field, and change nothing, for versions old and new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.interop.megatron import from_megatron, to_megatron
from shardtree.mapping import ShardedTensor
from shardtree.testing import check_factory, check_pure
from shardtree.testing import factories as drawn_factories
from shardtree.trees import map_shards
from tests.core.trees.samples import assert_caught
from tests.interop import old_megatron
from tests.interop.megatron_trees import as_megatrons, our_trees, unflat, view

installed = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = pytest.mark.peers

Both = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def to_old(tree: Any) -> Any:
    return to_megatron(tree, mapping=old_megatron)


NEW: Both = from_megatron, to_megatron
OLD: Both = from_megatron, to_old
OURS = our_trees()
UNFLAT = OURS.map(lambda tree: map_shards(unflat, tree))


def from_then_to_is_identity(both: Both, theirs: Any) -> None:
    there, back = both
    assert view(back(there(theirs))) == view(theirs)


def to_then_from_is_identity(both: Both, ours: Any) -> None:
    back, there = both
    assert view(back(there(ours))) == view(ours)


@given(UNFLAT)
def test_from_then_to_megatron_is_identity(ours: Any) -> None:
    from_then_to_is_identity(NEW, as_megatrons(installed, ours))


@given(OURS)
def test_from_then_to_an_old_megatron_is_identity(ours: Any) -> None:
    from_then_to_is_identity(OLD, as_megatrons(old_megatron, ours))


@given(UNFLAT)
def test_to_then_from_megatron_is_identity(ours: Any) -> None:
    to_then_from_is_identity(NEW, ours)


@given(OURS)
def test_to_then_from_an_old_megatron_is_identity(ours: Any) -> None:
    to_then_from_is_identity(OLD, ours)


def regular(tree: Any) -> Any:
    """The planted fault: irregular grids and replicas are forgotten on the way."""
    fields = {"axis_fragmentations": None, "replica_id": 0}
    return map_shards(lambda leaf: replace(leaf, **fields) if isinstance(leaf, ShardedTensor) else leaf, tree)


def test_both_laws_catch_forgotten_fields() -> None:
    forgetful: Both = (lambda tree: regular(from_megatron(tree))), to_old
    theirs = OURS.map(lambda tree: as_megatrons(old_megatron, tree))
    assert_caught(from_then_to_is_identity, forgetful, theirs)
    assert_caught(to_then_from_is_identity, forgetful, OURS)


# -- purity


def changes_nothing(convert: Callable[[Any], Any], tree: Any) -> None:
    before = view(tree)
    check_pure(lambda tree: view(convert(tree), ("data",)), tree)  # functions are made anew each time
    assert view(tree) == before


@given(UNFLAT)
def test_to_megatron_is_pure(ours: Any) -> None:
    changes_nothing(to_megatron, ours)


@given(UNFLAT)
def test_from_megatron_is_pure(ours: Any) -> None:
    changes_nothing(from_megatron, as_megatrons(installed, ours))


def test_purity_catches_a_conversion_in_place() -> None:
    def in_place(tree: Any) -> Any:
        if isinstance(tree, dict):
            tree.update(from_megatron(tree))
        return tree

    assert_caught(changes_nothing, in_place, UNFLAT.map(lambda tree: as_megatrons(installed, tree)))


@given(UNFLAT)
def test_containers_are_new_and_tensors_shared(ours: Any) -> None:
    theirs = to_megatron(ours)
    if isinstance(ours, (dict, list)):
        assert theirs is not ours
        assert from_megatron(theirs) is not theirs


# -- factories


@given(drawn_factories(), st.sampled_from([installed, old_megatron]))
def test_merge_undoes_build_through_megatrons_factories(ours: Any, mapping: Any) -> None:
    check_factory(from_megatron([as_megatrons(mapping, [ours])[0]])[0])


def test_merge_undoes_build_catches_a_merge_of_theirs_that_does_not() -> None:
    def law(merge_fn: Any, factory: Any) -> None:
        theirs = as_megatrons(installed, [replace(factory, merge_fn=merge_fn)])
        check_factory(from_megatron(theirs)[0])

    assert_caught(law, lambda loaded: torch.zeros(1), drawn_factories())
