"""The leaves beside Megatron-Core's: the same arguments give the same fields, and what it refuses, we refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from shardtree import mapping as ours
from shardtree.errors import CheckpointingException

megatron = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = pytest.mark.peers

searching = settings(max_examples=3000)  # a planted fault may take long to meet
small = st.integers(0, 4)
shapes = st.lists(small, max_size=3).map(tuple)
replicas = st.integers(0, 2) | st.lists(st.integers(0, 2), max_size=3).map(tuple)

FIELDS = (
    "key",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
    "replica_id",
    "prepend_axis_num",
    "allow_shape_mismatch",
    "flattened_range",
)


def of(shard):
    """A shard as plain values, data by elements."""
    fields = {name: getattr(shard, name) for name in FIELDS}
    fields |= {"local_shape": tuple(shard.local_shape), "data": None if shard.data is None else shard.data.tolist()}
    return fields | {"has_regular_grid": shard.has_regular_grid}


def outcome(call):
    """What a call gives, or None where it raises."""
    try:
        return call()
    except (
        CheckpointingException,
        megatron.CheckpointingException,
        AssertionError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ):
        return None


def our_outcome(call):
    """What a call of ours gives, or None where it raises what we raise on purpose; other errors are bugs."""
    try:
        return call()
    except CheckpointingException:
        return None


def same_outcome(call, peers=megatron, own=ours):
    expected = outcome(lambda: call(peers))
    assert our_outcome(lambda: call(own)) == expected
    return expected


# -- from_rank_offsets


@st.composite
def rank_offsets(draw):
    """Data and arguments of from_rank_offsets; axes differ, since ours refuses a repeated one."""
    data = torch.rand(draw(shapes))
    prepended = draw(st.integers(0, 2))
    axes = draw(st.lists(st.integers(-1, data.ndim + prepended), max_size=3, unique=True))
    valid = draw(st.booleans())
    cuts = []
    for axis in axes:
        count = draw(st.integers(1, 3) if valid else st.integers(-1, 3))
        cuts.append((axis, draw(st.integers(0, count - 1) if valid else st.integers(-1, 3)), count))
    return (
        data,
        cuts,
        {"replica_id": draw(replicas), "prepend_axis_num": prepended, "allow_shape_mismatch": draw(st.booleans())},
    )


def from_rank_offsets_agrees(case, own=ours):
    data, cuts, options = case
    return same_outcome(lambda m: of(m.ShardedTensor.from_rank_offsets("w", data, *cuts, **options)), own=own)


@given(rank_offsets())
def test_from_rank_offsets_gives_the_same_fields(case):
    from_rank_offsets_agrees(case)


def test_the_comparison_catches_offsets_counted_in_ranks():
    class InRanks:
        class ShardedTensor:
            @staticmethod
            def from_rank_offsets(key, data, *cuts, **options):
                shard = megatron.ShardedTensor.from_rank_offsets(key, data, *cuts, **options)
                shard.global_offset = shard.local_chunk_offset_in_global()
                return shard

    def differs(case):
        if (
            0 in case[0].shape
            or outcome(lambda: InRanks.ShardedTensor.from_rank_offsets("w", case[0], *case[1], **case[2])) is None
        ):
            return False
        try:
            from_rank_offsets_agrees(case, own=InRanks)
        except AssertionError:
            return True
        return False

    find(rank_offsets(), differs, settings=searching)


def test_a_flat_range_is_refused_by_from_rank_offsets():
    same_outcome(lambda m: of(m.ShardedTensor.from_rank_offsets("w", torch.ones(2), flattened_range=slice(0, 2))))


# -- the constructor


@st.composite
def descriptions(draw):
    """Arguments of ShardedTensor, mostly of ranks that agree."""
    local = draw(shapes)
    prepended = draw(st.integers(0, 1))
    rank = len(local) + prepended + draw(st.sampled_from([0, 0, 0, 0, 0, 1]))
    sizes = st.lists(st.integers(0, 8), min_size=rank, max_size=rank).map(tuple)
    offset = draw(sizes) if draw(st.integers(0, 9)) else draw(shapes)
    counts = draw(st.none() | st.lists(st.integers(1, 4), min_size=rank, max_size=rank).map(tuple))
    data = draw(
        st.sampled_from([None, torch.zeros(local), torch.zeros(local), torch.zeros(local).half(), torch.zeros(1)])
    )
    return (
        "w",
        data,
        torch.float32,
        local,
        draw(sizes),
        offset,
        counts,
        draw(replicas),
        prepended,
        draw(st.booleans()),
    )


def leaves_its_global_shape(_key, _data, _dtype, local, whole, offset, _counts, _replica, prepended, padded):
    box = (1,) * prepended + local
    return not padded and any(first + size > all_ for first, size, all_ in zip(offset, box, whole, strict=False))


@given(descriptions())
def test_a_description_is_accepted_where_megatron_accepts_it_and_the_box_lies_in_the_tensor(case):
    if leaves_its_global_shape(*case):  # accepted there, an error here
        assert our_outcome(lambda: ours.ShardedTensor(*case)) is None
    else:
        same_outcome(lambda m: of(m.ShardedTensor(*case)))


@given(descriptions())
def test_slices_and_chunks_are_the_same(case):
    if our_outcome(lambda: ours.ShardedTensor(*case)) is None:
        return
    local, counts, prepended = case[3], case[6], case[8]
    same_outcome(lambda m: m.ShardedTensor(*case).global_slice())
    same_outcome(lambda m: m.ShardedTensor(*case).max_allowed_chunks())
    # With one piece along a zero-size axis its index is 0 here; there it divides by zero.
    if not any(size == 0 and counts and counts[axis] == 1 for axis, size in enumerate(local, prepended)):
        same_outcome(lambda m: m.ShardedTensor(*case).local_chunk_offset_in_global())


# -- narrow


@given(rank_offsets(), st.integers(0, 3), st.integers(-5, 5), st.integers(-1, 5))
def test_narrow_gives_the_same_shard(case, dim, start, length):
    data, cuts, options = case
    if dim < data.ndim and data.shape[dim] == 0:  # there it divides by zero, here nothing of nothing is nothing
        return

    def narrowed(m):
        return [
            of(part)
            for part in m.ShardedTensor.from_rank_offsets("w", data, *cuts, **options).narrow(dim, start, length)
        ]

    same_outcome(narrowed)


@given(descriptions(), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4))
def test_narrow_of_any_description_gives_the_same_shard(case, dim, start, length):
    whole, local = case[4], case[3]
    irregular = leaves_its_global_shape(*case) or case[1] is None  # there only data can be narrowed
    if irregular or (dim < len(local) and local[dim] == 0 and whole[dim + case[8]] == 0):
        return
    same_outcome(lambda m: [of(part) for part in m.ShardedTensor(*case).narrow(dim, start, length)])


# -- objects and replicas


def of_object(leaf):
    return leaf.key, leaf.data, tuple(leaf.global_shape), tuple(leaf.global_offset), leaf.replica_id, leaf.unique_key


@st.composite
def cells(draw):
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return draw(st.text("ab_.-é", min_size=1, max_size=6)), None, shape, offset, draw(replicas)


@given(cells())
def test_unique_keys_are_the_same_and_parse_to_the_same_object(case):
    assert same_outcome(lambda m: of_object(m.ShardedObject(*case)))
    unique_key = ours.ShardedObject(*case).unique_key
    assert same_outcome(lambda m: of_object(m.ShardedObject.empty_from_unique_key(unique_key, case[4])))


@given(cells().filter(lambda case: len(case[2]) > 1))
def test_unique_keys_without_the_last_size_parse_to_the_same_object(case):
    old = ours.ShardedObject(*case).unique_key.rpartition(".")[0]
    assert same_outcome(lambda m: of_object(m.ShardedObject.empty_from_unique_key(old)))


@pytest.mark.parametrize(
    "text", ["", "k", "k/shard_0", "k/piece_0_1", "k/shard_a_1", "k/shard_0_1_2", "k/shard_0.0_1.1.1"]
)
def test_what_is_no_unique_key_raises_in_both(text):
    assert same_outcome(lambda m: of_object(m.ShardedObject.empty_from_unique_key(text))) is None


@given(st.integers(-2, 2) | st.lists(st.integers(-2, 2), max_size=4) | st.sampled_from([None, 0.0, True, False]))
def test_the_main_replica_is_the_same(replica):
    same_outcome(lambda m: m.is_main_replica(replica))


def test_factories_hand_their_functions_the_same_arguments():
    data = torch.ones(3)

    def built(m):
        key, tensor, replica, flat = m.ShardedTensorFactory(
            "f", data, lambda *given: given, lambda tree: tree, (0, 1), slice(0, 3)
        ).build()
        return key, tensor is data, replica, flat

    assert same_outcome(built)
