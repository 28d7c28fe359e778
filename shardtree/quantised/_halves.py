"""Half weights: tensors that are parts of a quantised weight, the other parts of which aren't there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ..core.mapping import ShardedTensor
from ..errors import shorten
from ._form import Form
from ._part import Part


def half_weights(
    tensors: Mapping[str, ShardedTensor], forms: Sequence[Form], used: Collection[str], *, are_named: bool
) -> dict[str, str]:
    """Return the faults of weights of which only some parts are there, by the key of one part.

    Names that other tensors have too, such as `scale`, and dtypes of ordinary numbers don't show alone that a tensor
    belongs to a quantised weight: two parts together do, or one by a name or a dtype that nothing else has.

    Args:
        tensors: shards by key.
        forms: those that weights may have.
        used: keys of parts of whole weights.
        are_named: whether the caller chose the forms: then a matrix of their values called `weight` is one.

    Examples:
        >>> import torch
        >>> from shardtree.quantised import FORMS
        >>> blocks = ShardedTensor.from_rank_offsets("up_blocks", torch.zeros(2, 1, 16, dtype=torch.uint8))
        >>> half_weights({"up_blocks": blocks}, [FORMS["mxfp4"]], (), are_named=False)
        {'up_blocks': "mxfp4 without 'up_scales'"}
    """
    rest = {key: tensor for key, tensor in tensors.items() if key not in used}
    found = dict[str, tuple[int, int, str]]()
    # Weights that lack nothing, if maybe of other shapes, and what would make them ones of another form.
    wholes = [(form, key) for form in forms for key in form.found(tensors)]
    not_meant = {key for _, key in wholes}
    not_meant |= {key.removesuffix(form.base) + name for form, key in wholes for name in form.without}
    for form in forms:
        for stem in dict.fromkeys(_stems(rest, form.parts)):
            names = [stem + part.name for part in form.parts]
            lacking = [name for name in names if name not in tensors]
            pairs = zip(names, form.parts, strict=True)
            held = [(name, part) for name, part in pairs if name in rest and _may_be(part, rest[name])]
            there = names[0] in tensors, stem + form.base in tensors
            if not not_meant.issuperset(lacking) and _is_certain(form.parts[0], held, *there, are_named):
                # AWQ's names are among GPTQ's: what lacks least is meant, and of these what has most.
                text = f"{form.name} without {', '.join(shorten(map(repr, lacking)))}"
                rank = (len(lacking), -len(held), text)
                found[held[0][0]] = min(rank, found.get(held[0][0], rank))
    return {key: text for key, (*_, text) in found.items()}


def _stems(tensors: Mapping[str, ShardedTensor], parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        for key, tensor in tensors.items():
            if key.endswith(part.name) and _may_be(part, tensor):
                yield key.removesuffix(part.name)


def _may_be(part: Part, tensor: ShardedTensor) -> bool:
    shape, axes = tensor.global_shape, len(part.per or ()) + len(part.tail)
    return tensor.dtype in part.dtypes and len(shape) >= axes and shape[len(shape) - len(part.tail) :] == part.tail


def _is_certain(
    values: Part, held: Sequence[tuple[str, Part]], has_values: bool, has_weight: bool, are_named: bool
) -> bool:
    """Return whether parts that are there can only be those of a quantised weight.

    Args:
        values: the form's first part.
        held: keys that are there, with the parts that they fit.
        has_values: whether a tensor has the first part's key, of whatever dtype.
        has_weight: whether a tensor has the weight's: then what is called a scale of it may be no part.
        are_named: Argument of `half_weights`.
    """
    if held and held[0][1] is values:
        is_weight = are_named and held[0][0].split(".")[-1] == "weight"
        return bool(values.name) or len(held) > 1 or is_weight
    return not has_values and (len(held) > 1 or any(_tells(key, part, has_weight) for key, part in held))


def _tells(key: str, part: Part, has_weight: bool) -> bool:
    """Return whether nothing but a scale (or a zero, or the number of a group) has such a name or dtype."""
    is_number = any(dtype.is_floating_point and dtype.itemsize > 1 for dtype in part.dtypes)
    return not is_number or (not has_weight and "weight" in key.split(".")[-1]) or key.endswith("_scale_inv")
