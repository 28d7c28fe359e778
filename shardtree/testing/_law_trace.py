"""The laws of traces (records of what loading code does), and of quantised weights, which loading code decodes.

A trace gives the same tensors as the code, also for a part of an output, and its inverse gives back the sources. A
quantised weight is cut together with its scales, and has the same values after it was dequantised and quantised again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise

import torch

from ..core.geometry import slices
from ..core.layouts import access_problems, shard_columns
from ..core.lazy import Box, as_integers
from ..core.mapping import ShardedTensor
from ..core.trees import apply_factories
from ..errors import CheckpointingException, ShapeError, TraceError
from ..quantised import Form
from ..traces import Trace, localized, trace
from ._bits import assemble, check_equal, check_same, shards_of


def check_trace(
    function: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]], sources: Mapping[str, torch.Tensor]
) -> Trace:
    """Check the laws of traces for code that loads or converts tensors, and return its trace.

    - *Traced is eager*: the evaluated trace gives the same tensors as the code, bit for bit.
    - *The same each time*: a second trace of the code equals the first.
    - *Parts are cuts*: a box of an output, computed from only the parts of sources that it needs, equals that box of
      the whole output.
    - *The way back*: if the trace has an inverse, the inverse gives back the sources.

    Args:
        function: Function from tensors by name to tensors by name; it may be called several times.
        sources: Tensors with data, best with elements that all differ.

    Raises:
        AssertionError: The code breaks a law; the error names the law and the difference.
        TraceError: The code reads values of elements.

    Examples:
        >>> def load(tensors):
        ...     return {"w": torch.cat([tensors["a"], tensors["b"]]).T}
        >>> found = check_trace(load, {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0, 9.0).view(1, 3)})
        >>> found.check()
        ()
    """
    result, eager = trace(function, sources), dict(function(dict(sources)))
    outputs = result(sources)
    check_same("the trace gives other tensors than the code", outputs, eager)
    if again := result.diff(trace(function, sources)):
        raise AssertionError(f"two traces of the code differ: {next(iter(again.values()))[0]}")
    for name, tensor in eager.items():
        for offset, shape in chain.from_iterable(layouts_of(tuple(tensor.shape))):
            local = localized(result, name, offset, shape)
            parts = [sources[root][slices(*box)] for root, box in local.boxes]
            what = f"a part is not a cut of the whole: {shape} at {offset}"
            check_same(what, {name: local.output(parts)}, {name: tensor[slices(offset, shape)]})
    try:
        back = result.inverse()
    except TraceError:
        return result
    inputs = {name: outputs[name] for name in back.sources}
    check_same("the way back gives other sources", back(inputs), {name: sources[name] for name in back.outputs})
    return result


def layouts_of(shape: tuple[int, ...]) -> Iterator[list[Box]]:
    """Yield lists of boxes that tile a tensor: the whole, and its halves and thirds along each axis."""
    zeros = (0,) * len(shape)
    yield [Box(zeros, shape)]
    for axis, size in enumerate(shape):
        for count in (2, 3):
            edges = pairwise([size * number // count for number in range(count + 1)])
            yield [
                Box((*zeros[:axis], low, *zeros[axis + 1 :]), (*shape[:axis], high - low, *shape[axis + 1 :]))
                for low, high in edges
                if low < high
            ]


# Quantised weights.

LocalTensors = Callable[[ShardedTensor], Mapping[str, torch.Tensor]]


def check_quantised(
    form: Form,
    tensors: Mapping[str, torch.Tensor],
    *,
    held: LocalTensors | None = None,
    expected: Mapping[str, torch.Tensor] | None = None,
    most: float = 0.25,
    same_codes: bool = False,
) -> dict[str, torch.Tensor]:
    """Check the laws of quantised weights, and return the dequantised weights, as float32, by key.

    - *Tensors have the form*: all of a weight's tensors have the dtypes and shapes that `form` describes.
    - *Cuts commute*: a cut of a weight, dequantised, equals the cut of the dequantised weight, also if it crosses
      blocks. The same holds in a trace.
    - *Values and scales are cut together*: the parts of all ranks, put together, are the stored tensors.
    - *Recoding comes back*: a dequantised weight that is quantised again has the same values.
    - *Scales are the values' own*: dequantised weights are close to the original ones in `expected`, as they can be
      only with the right scales.

    Args:
        form: The form of the weights.
        tensors: Whole stored tensors, by key; small, since many cuts are tried.
        held: Function from a box of a weight (a shard without data) to the tensors that your code holds on a rank with
            that box, by key. By default the form cuts the tensors, and skips boxes that would split packed values.
        expected: Original weights, by key; None to leave out the last law.
        most: Upper bound of an element's error, as a fraction of the largest element of its block. If elements are
            rounded by at most half a step, a quarter is enough for FP4, and a sixteenth for FP8.
        same_codes: Whether recoding must give the same codes and scales, not only the same values; for tensors that the
            form itself has quantised.

    Raises:
        AssertionError: A law is broken; the error names the law and the difference.

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
        scales are not the values' own
    """
    dense = partial(form.dequantise, dtype=torch.float32)
    try:
        weights = dense(tensors)
    except CheckpointingException as error:
        raise AssertionError(f"tensors do not have the form: {error}") from error
    assert weights, f"tensors do not have the form: {sorted(tensors)} are no tensors of {form.name}"
    parts_of = {key: {name: tensors[name] for name in form.keys(key)} for key in weights}
    for key, weight in weights.items():
        _ = check_trace(dense, parts_of[key])
        for boxes in layouts_of(tuple(weight.shape)):
            shape = tuple(weight.shape)
            shards = [ShardedTensor(key, None, weight.dtype, box.shape, shape, box.offset, None) for box in boxes]
            for shard in shards:
                lens = form.lens(shard)
                merge = lens.merge([parts_of[key][part.key][part.global_slice()] for part in lens.shards])
                what = f"cuts do not commute on {key!r} at {shard.global_offset}"
                check_equal(what, merge, weight[shard.global_slice()])
            _check_cut_together(form, parts_of[key], shards, held)
        if form.encode is not None and bool(torch.isfinite(weight).all()):
            _check_comes_back(form, key, weight)
            if same_codes:
                codes, again = (
                    {name: as_integers(tensor) for name, tensor in stored.items()}
                    for stored in (parts_of[key], form.quantise({key: weight}))
                )
                check_same(f"recoding {key!r} does not come back in codes and scales", again, codes)
        if expected is not None:
            _check_expected(form, key, weight, expected[key].to(torch.float32), most)
    return weights


def _check_cut_together(
    form: Form, tensors: Mapping[str, torch.Tensor], shards: Sequence[ShardedTensor], held: LocalTensors | None
) -> None:
    law = f"values and scales of {shards[0].key!r} are not cut together"
    try:
        trees = [apply_factories(form.shards(shard, None if held is None else held(shard))) for shard in shards]
    except ShapeError as error:
        if held is None and "share one stored element" in str(error):
            return  # a cut that the form refuses
        raise AssertionError(f"{law}: {error}") from error
    leaves = [leaf for tree in trees for leaf in shards_of(tree).values()]
    problems = access_problems(shard_columns(leaves))
    assert not problems, f"{law}: {problems[0]}"
    if held is not None:
        for name, tensor in assemble(trees).items():
            check_equal(f"{law}: {name!r}", tensor, tensors[name])


def _check_comes_back(form: Form, key: str, weight: torch.Tensor) -> None:
    tensors = form.quantise({key: weight})
    once = form.dequantise(tensors, torch.float32)[key]
    scales = [part.read(tensors[name]) for name, part in zip(form.keys(key), form.parts, strict=True)][1:]
    if all(bool((torch.frexp(each).mantissa == 0.5).all()) for each in scales):
        check_equal(f"recoding {key!r} does not come back", once, weight)
        return
    # Scales that aren't powers of two are rounded too, in the last bit of float32; rounded values aren't rounded again.
    again = form.dequantise(form.quantise({key: once}), torch.float32)[key]
    wrong = int(((again - once).abs() > once.abs() * 2**-20).sum())
    assert not wrong, f"recoding {key!r} does not come back: {wrong} of {once.numel()} elements differ"


def _check_expected(form: Form, key: str, weight: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    turn = (-1, -2) if form.is_turned else (-2, -1)
    error, size = (tensor.abs().movedim(turn, (-2, -1)) for tensor in (weight - expected, expected))
    rows, columns = (block or length for block, length in zip(form.block, size.shape[-2:], strict=True))
    blocks = torch.nn.functional.pad(size, (0, -size.shape[-1] % columns, 0, -size.shape[-2] % rows))
    largest = torch.unflatten(torch.unflatten(blocks, -1, (-1, columns)), -3, (-1, rows)).amax((-3, -1))
    bound = largest.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., : size.shape[-2], : size.shape[-1]]
    wrong = int((~(error <= most * bound)).sum())
    what = f"{wrong} of {error.numel()} elements of {key!r} are off by more than {most:g} of their block's largest"
    assert not wrong, f"scales are not the values' own: {what}"
