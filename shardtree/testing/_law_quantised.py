"""The laws of quantised weights: values and scales that belong together, are cut together, and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ..errors import CheckpointingException, ShapeError
from ..layouts import access_problems, shard_columns
from ..lazy import Box
from ..mapping import ShardedTensor
from ..quantised import Form
from ..trees import apply_factories
from ._bits import assemble, first_difference, shards_of
from ._law_trace import check_trace, layouts_of

Held = Callable[[ShardedTensor], Mapping[str, torch.Tensor]]


def check_quantised(
    form: Form,
    tensors: Mapping[str, torch.Tensor],
    *,
    held: Held | None = None,
    expected: Mapping[str, torch.Tensor] | None = None,
    most: float = 0.25,
    same_codes: bool = False,
) -> dict[str, torch.Tensor]:
    """Check the laws of quantised weights, and return the weights, as float32, by key.

    - *It is the form*: dtypes and shapes of all of a weight's tensors.
    - *Cuts commute*: dequantised after any cut is cut after dequantised, through blocks too; a trace says the same.
    - *Values and scales are cut together*: what ranks hold is, put together, what is stored.
    - *Recoding comes back*: what was dequantised, and is quantised again, has the same values.
    - *Scales are the values' own*: weights are about what they were made of.

    Args:
        form: of the weights.
        tensors: whole, by key; small, since many cuts are tried.
        held: from a box of a weight, a shard without data, to what your code has on that rank, by key. None for boxes
            that begin and end where values are packed, cut by the form.
        expected: the weights that were quantised, by key.
        most: how far an element may be from that, as a fraction of the largest of its block: half of a step of FP4 is
            a quarter, of FP8 a sixteenth.
        same_codes: whether what comes back must be stored as it was, not only have the same values: for what the form
            itself has quantised.

    Raises:
        AssertionError: names the law, and says what differs.

    Examples:
        >>> from shardtree.quantised import FORMS
        >>> weight = torch.randn(8, 64)
        >>> stored = FORMS["mxfp8"].quantise({"w": weight})
        >>> found = check_quantised(FORMS["mxfp8"], stored, expected={"w": weight}, most=1 / 16)
        >>> stored["w_scale_inv"] += 1  # an octave
        >>> try:
        ...     check_quantised(FORMS["mxfp8"], stored, expected={"w": weight}, most=1 / 16)
        ... except AssertionError as error:
        ...     print(str(error).split(":")[0])
        scales aren't the values' own
    """
    dense = partial(form.dequantise, dtype=torch.float32)
    try:
        weights = dense(tensors)
    except CheckpointingException as error:
        raise AssertionError(f"it isn't the form: {error}") from error
    assert weights, f"it isn't the form: {sorted(tensors)} are no tensors of {form.name}"
    own = {key: {name: tensors[name] for name in form.keys(key)} for key in weights}
    for key, weight in weights.items():
        _ = check_trace(dense, own[key])
        for boxes in layouts_of(tuple(weight.shape)):
            shards = [_shard(key, weight, box) for box in boxes]
            for shard in shards:
                built = form.lens(shard)
                made = built.merge([own[key][part.key][part.global_slice()] for part in built.shards])
                _same(f"cuts don't commute on {key!r} at {shard.global_offset}", made, weight[shard.global_slice()])
            _check_held(form, own[key], shards, held)
        if form.encode is not None and bool(torch.isfinite(weight).all()):
            _check_comes_back(form, key, weight)
            if same_codes:
                _check_codes(form, key, own[key], weight)
        if expected is not None:
            _check_expected(form, key, weight, expected[key].to(torch.float32), most)
    return weights


def _shard(key: str, whole: torch.Tensor, box: Box) -> ShardedTensor:
    shape = tuple(whole.shape)
    return ShardedTensor(key, None, whole.dtype, box.shape, shape, box.offset, None)


def _check_held(
    form: Form, tensors: Mapping[str, torch.Tensor], shards: Sequence[ShardedTensor], held: Held | None
) -> None:
    broken = f"values and scales of {shards[0].key!r} aren't cut together"
    try:
        trees = [apply_factories(form.shards(shard, None if held is None else held(shard))) for shard in shards]
    except ShapeError as error:
        if held is None and "packed" in str(error):
            return  # a cut that the form refuses
        raise AssertionError(f"{broken}: {error}") from error
    leaves = [leaf for tree in trees for leaf in shards_of(tree).values()]
    problems = access_problems(shard_columns(leaves))
    assert not problems, f"{broken}: {problems[0]}"
    if held is not None:
        for name, tensor in assemble(trees).items():
            _same(f"{broken}: {name!r}", tensor, tensors[name])


def _check_comes_back(form: Form, key: str, weight: torch.Tensor) -> None:
    stored = form.quantise({key: weight})
    once = form.dequantise(stored, torch.float32)[key]
    scales = [part.read(stored[name]) for name, part in zip(form.keys(key), form.parts, strict=True)][1:]
    if all(bool((torch.frexp(each).mantissa == 0.5).all()) for each in scales):
        _same(f"recoding {key!r} doesn't come back", once, weight)
        return
    # Other scales are rounded themselves, in the last bit of float32; and what was rounded once isn't again.
    again = form.dequantise(form.quantise({key: once}), torch.float32)[key]
    wrong = int(((again - once).abs() > once.abs() * 2**-20).sum())
    assert not wrong, f"recoding {key!r} doesn't come back: {wrong} of {once.numel()} elements differ"


def _check_codes(form: Form, key: str, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
    again = form.quantise({key: weight})
    pairs = [(each.contiguous().view(torch.uint8), again[name].view(torch.uint8)) for name, each in tensors.items()]
    wrong = ", ".join(f"{int((one != two).sum())} of {one.numel()}" for one, two in pairs)
    same = all(torch.equal(one, two) for one, two in pairs)
    assert same, f"recoding {key!r} doesn't come back: of codes and scales, {wrong} bytes differ"


def _check_expected(form: Form, key: str, weight: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    turn = (-1, -2) if form.is_turned else (-2, -1)
    error, size = ((each).abs().movedim(turn, (-2, -1)) for each in (weight - expected, expected))
    rows, columns = (each or length for each, length in zip(form.block, size.shape[-2:], strict=True))
    padded = torch.nn.functional.pad(size, (0, -size.shape[-1] % columns, 0, -size.shape[-2] % rows))
    largest = torch.unflatten(torch.unflatten(padded, -1, (-1, columns)), -3, (-1, rows)).amax((-3, -1))
    bound = largest.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., : size.shape[-2], : size.shape[-1]]
    wrong = int((~(error <= most * bound)).sum())
    what = f"{wrong} of {error.numel()} elements of {key!r} are further than {most:g} of their block's largest from it"
    assert not wrong, f"scales aren't the values' own: {what}"


def _same(broken: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = first_difference(found.contiguous(), expected.contiguous())
    assert difference is None, f"{broken}: {difference}"
