"""Donated tensors of a load: each has memory of its own, and is still what its shard says."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import hypothesis
import hypothesis.strategies as st_
import pytest
import torch

import shardtree as st
from shardtree.core.mapping.memory import _reach, check_no_aliases
from shardtree.errors import ShapeError
from shardtree.shell.checkpoint.loading._targets import with_memories
from tests.shell.checkpoint.parts import freed, saved_tensors, whole

W = torch.arange(12.0).view(3, 4)


def donate(target, folder):
    return st.load(target, folder, donate=True, validate_access_integrity=False)


@st_.composite
def views(draw):
    """Draw a view of a buffer, whose own elements are apart."""
    dtype = draw(st_.sampled_from([torch.uint8, torch.int16, torch.int32]))
    buffer = BUFFER.view(dtype)
    shape = draw(st_.lists(st_.integers(1, 4), max_size=3))
    strides = [draw(st_.integers(0 if length == 1 else 1, 12)) for length in shape]
    last = sum(stride * (length - 1) for stride, length in zip(strides, shape, strict=True))
    hypothesis.assume(last < buffer.numel())
    view = buffer.as_strided(shape, strides, draw(st_.integers(0, buffer.numel() - 1 - last)))
    hypothesis.assume(len(byte_set(view)) == view.nbytes)
    return view


BUFFER = torch.zeros(64, dtype=torch.uint8)


def byte_set(view):
    """Return the positions in the buffer of a view's bytes, found by writing to them."""
    BUFFER.zero_()
    view.fill_(-1 if view.dtype.is_signed else 255)
    return set(BUFFER.nonzero().flatten().tolist())


def elements_of(view):
    return view.data_ptr(), view.shape, view.stride(), view.dtype


def refuses_what_is_read(check, donated, read):
    sets = [byte_set(view) for view in donated]
    # Of tensors that are the same elements one counts: what is stored under their keys is compared.
    same = dict(zip(map(elements_of, donated), sets, strict=True))
    clash = len(set().union(*sets)) < sum(map(len, same.values())) or any(
        one & byte_set(view) for one in sets for view in read
    )
    pairs = [[(whole(str(number), view), view) for number, view in enumerate(views)] for views in (donated, read)]
    try:
        check(pairs[0], [(replace(shard, key="read"), view) for shard, view in pairs[1]])
    except ShapeError:
        assert clash, "refused what has no common bytes"
    else:
        assert not clash, "took what has common bytes"


@hypothesis.given(donated=st_.lists(views(), min_size=1, max_size=4), read=st_.lists(views(), max_size=3))
def test_donated_tensors_are_refused_exactly_where_they_have_bytes_that_are_read(donated, read):
    refuses_what_is_read(partial(check_no_aliases, "load"), donated, read)


def by_first_and_last_byte(donated, read):
    """The planted fault: tensors that reach over the same bytes are taken to share them."""
    ranges = sorted((view.data_ptr(), view.data_ptr() + _reach(view)) for _, view in [*donated, *read])
    if any(end > begin for (_, end), (begin, _) in pairwise(ranges)):
        raise ShapeError("they may share memory")


@pytest.mark.parametrize(
    ("fault", "donated", "read", "says"),
    [
        (by_first_and_last_byte, [BUFFER[::2], BUFFER[1::2]], [], "refused"),
        (lambda donated, read: None, [BUFFER[:4]], [BUFFER[3:9]], "took"),
    ],
)
def test_the_law_of_what_is_read_catches_a_check_that_is_too_strict_or_none(fault, donated, read, says):
    with pytest.raises(AssertionError, match=says):
        refuses_what_is_read(fault, donated, read)


def test_what_is_read_may_be_expanded():
    row = torch.zeros(8)
    read = [whole("r", row[:4].expand(3, 4))]
    pairs = [[(shard, shard.data) for shard in shards] for shards in ([whole("w", row[4:])], read)]
    check_no_aliases("load", *pairs)
    with pytest.raises(ShapeError, match=r"'w' at .* and 'r' at .*, which is read"):
        check_no_aliases("load", [(shard, shard.data) for shard in [whole("w", row[3:7])]], pairs[1])


def test_one_tensor_may_be_donated_twice_for_the_same_box_of_one_key():
    tied = torch.zeros(3, 4)
    loaded = donate({"in": whole("w", tied), "out": whole("w", tied, replica_id=1)}, saved_tensors(w=W))
    assert loaded["in"] is loaded["out"] is tied and torch.equal(tied, W)


TIED = {
    "whole": lambda b: b,
    "a parameter": torch.nn.Parameter,
    "transposed": lambda b: b.view(4, 3).t(),
    "conjugated": lambda b: b.to(torch.complex64).conj(),
    "complex of 16 bytes, with nan": lambda b: b.to(torch.complex128).fill_(complex("nan")),
    "without axes": lambda b: b.view(-1)[0],
}


@pytest.mark.parametrize("case", TIED)
@pytest.mark.parametrize("exchange", ["never", "always"])
def test_tied_weights_are_filled_once_with_what_is_stored_under_both_keys(case, exchange):
    tied = TIED[case](torch.zeros(3, 4))
    data = (tied.detach() + 1).resolve_conj()
    loaded = st.load(
        {"in": whole("in", tied), "own": whole("own", torch.zeros(2)), "out": whole("out", tied)},
        saved_tensors(**{"in": data, "own": torch.ones(2), "out": data}),
        donate=True,
        options=st.LoadOptions(exchange=exchange),
    )
    assert loaded["in"] is loaded["out"] is tied and torch.equal(tied.nan_to_num(7), data.nan_to_num(7))


@pytest.mark.parametrize("case", TIED)
def test_tied_weights_that_were_stored_untied_are_refused_before_their_memory_is_touched(case):
    tied = TIED[case](torch.zeros(3, 4))
    before, version = tied.detach().clone(), tied._version
    data = tied.detach().clone().resolve_conj()
    folder = saved_tensors(**{"in": data, "out": data.fill_(3) + 1})
    with pytest.raises(ShapeError, match=r"share memory, but their new values differ\n  'out' and 'in'"):
        donate({"in": whole("in", tied), "out": whole("out", tied)}, folder)
    assert torch.equal(before.nan_to_num(7), tied.detach().nan_to_num(7)) and tied._version == version


def halves(key, data, replica_id, flattened_range):
    return [whole(key, half, (0, part, 2), replica_id=replica_id) for part, half in enumerate(data.chunk(2))]


def doubled_halves(key, data, replica_id, flattened_range):
    """Build what isn't views."""
    return halves(key, data.clone(), replica_id, flattened_range)


FUSED = {
    "views": (halves, lambda: torch.zeros(4, 3)),
    "views of a parameter": (halves, lambda: torch.nn.Parameter(torch.zeros(4, 3))),
    "views with strides": (halves, lambda: torch.zeros(3, 4).t()),
    "copies": (doubled_halves, lambda: torch.zeros(4, 3)),
    "copies with strides": (doubled_halves, lambda: torch.zeros(3, 4).t()),
}


def by_load(target, data):
    return donate(target, saved_tensors(w=data))["w"]


def by_redistribute(target, data):
    found = st.redistribute({"w": whole("w", data)}, target, donate=True)["w"]
    assert found.merge_fn is target["w"].merge_fn
    return found.data


@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("fill", [by_load, by_redistribute])
def test_what_a_donated_factory_holds_is_filled_and_returned(case, fill):
    build, make = FUSED[case]
    fused, data, merged = make(), torch.arange(12.0).view(4, 3), []

    def merge(parts):
        merged.append(parts)
        return torch.cat(parts)

    target = {"w": st.ShardedTensorFactory("w", fused, build, merge)}
    version = fused._version
    assert fill(target, data) is fused and torch.equal(fused, data) and fused._version > version
    assert len(merged) == case.startswith("copies")  # views are filled where they are, without a second tensor


@pytest.mark.parametrize("case", ["views", "copies"])
def test_what_tied_factories_hold_is_filled_once_or_refused_and_never_filled_over(case):
    fused = torch.zeros(4, 3)
    target = {key: st.ShardedTensorFactory(key, fused, FUSED[case][0], torch.cat) for key in ("in", "out")}
    same = saved_tensors(**{"in": torch.ones(4, 3), "out": torch.ones(4, 3)})
    found = donate(target, same)
    assert all(torch.equal(each, torch.ones(4, 3)) and (each is fused) == (case == "views") for each in found.values())
    other = saved_tensors(**{"in": torch.ones(4, 3), "out": torch.zeros(4, 3)})
    if case == "views":
        with pytest.raises(ShapeError, match="differ\n  'out' and 'in'"):
            donate(target, other)
    else:
        assert [found.sum() for found in donate(target, other).values()] == [12, 0]


@pytest.mark.parametrize("case", ["views", "copies"])
def test_what_a_donated_factory_holds_shares_memory_with_no_other_leaf(case):
    fused = torch.zeros(4, 3)
    target = {"w": st.ShardedTensorFactory("w", fused, FUSED[case][0], torch.cat), "row": whole("row", fused[3])}
    folder = saved_tensors(w=torch.ones(4, 3), row=torch.ones(3))
    with pytest.raises(ShapeError, match=r"share memory\n  'w' at .* and 'row'"):
        donate(target, folder)
    report = st.explain(target, folder, donate=True)
    assert not report.ok and "share memory" in str(report)
    assert not fused.any()


def test_tied_weights_are_filled_once_from_memory():
    tied = torch.zeros(3, 4)
    target = {"in": whole("in", tied), "out": whole("out", tied)}
    found = st.redistribute({"a": whole("in", W), "b": whole("out", W.clone())}, target, donate=True)
    assert found["in"].data is found["out"].data is tied and torch.equal(tied, W)
    with pytest.raises(ShapeError, match="redistribute: donated tensors share memory, but their new values differ"):
        st.redistribute({"a": whole("in", W), "b": whole("out", W + 1)}, target, donate=True)
    assert torch.equal(tied, W)


def test_a_tensor_and_its_conjugate_are_not_filled_alike():
    base = torch.zeros(2, dtype=torch.complex64)
    target = {"a": whole("w", base), "b": whole("w", base.conj())}
    with pytest.raises(ShapeError, match="share memory"):
        donate(target, saved_tensors(w=torch.tensor([1 + 2j, 3 - 4j])))


def test_columns_of_a_large_matrix_are_told_apart_by_their_blocks():
    matrix = torch.empty(4096, 6144)
    target = [whole(str(number), part) for number, part in enumerate(matrix.split(2048, 1))]
    assert with_memories(target, donate=True)
    target.append(whole("more", matrix[5:9]))
    with pytest.raises(ShapeError, match="'more' at"):
        with_memories(target, donate=True)


def test_what_is_too_finely_interleaved_to_tell_is_refused():
    buffer = torch.empty(25_000_000, dtype=torch.uint8)
    with pytest.raises(ShapeError, match=r"'a' at .* and 'b' at .* too finely interleaved"):
        with_memories([whole("a", buffer[::2]), whole("b", buffer[1::2])], donate=True)


@pytest.mark.slow
def test_many_donated_tensors_are_checked_quickly():
    shards = [whole(f"k{number}", part) for number, part in enumerate(torch.zeros(20_000, 3).unbind())]
    pairs = [(shard, shard.data) for shard in shards]
    times = []
    for _ in range(3):
        start = time.process_time()
        check_no_aliases("load", pairs)
        times.append(time.process_time() - start)
    assert min(times) < 5


def transpose(tensor):
    return tensor.t_()


def to_half(tensor):
    tensor.data = tensor.data.bfloat16()
    return tensor


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (transpose, r"\(4, 3\) torch.float32"),
        (to_half, r"\(3, 4\) torch.bfloat16"),
        (freed, r"\(3, 4\) torch.float32, freed"),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_tensor_that_changed_after_its_shard_was_built_is_named(change, found, padded):
    tensor = torch.zeros(3, 4)
    shard = whole("w", tensor, allow_shape_mismatch=padded)
    change(tensor)
    message = rf"'w' was changed[\s\S]*found {found}, expected \(3, 4\) torch.float32"
    with pytest.raises(ShapeError, match=message):
        donate({"w": shard}, saved_tensors(w=W))
    if padded:
        with pytest.raises(ShapeError, match=message):
            st.load({"w": shard}, saved_tensors(w=W))
    assert change is freed or not tensor.any()
    assert torch.equal(st.load({"w": replace(shard, data=None)}, saved_tensors(w=W))["w"], W)
