"""Half weights: quantised weights with some of their stored tensors missing, such as the values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ..core.mapping import ShardedTensor
from ..errors import shorten
from ._form import Form
from ._part import Part


def half_weights(
    tensors: Mapping[str, ShardedTensor], forms: Sequence[Form], used: Collection[str], *, are_named: bool
) -> dict[str, str]:
    """Return a text that names the missing tensors of each incomplete weight, by the key of a tensor that is present.

    A weight counts as quantised if two of its tensors are present, or one whose name or dtype only tensors of quantised
    weights have. A single tensor with a common name, such as `scale`, and an ordinary floating-point dtype is ignored.

    Args:
        tensors: Shards by key.
        forms: Forms that weights may have.
        used: Keys to ignore, such as those of complete weights.
        are_named: Whether the caller chose the forms. If so, a tensor called `weight` with the dtype of a form's values
            counts as values of that form.

    Examples:
        >>> import torch
        >>> from shardtree.quantised import FORMS
        >>> blocks = ShardedTensor.from_rank_offsets("up_blocks", torch.zeros(2, 1, 16, dtype=torch.uint8))
        >>> half_weights({"up_blocks": blocks}, [FORMS["mxfp4"]], (), are_named=False)
        {'up_blocks': "mxfp4 without 'up_scales'"}
    """
    unused = {key: tensor for key, tensor in tensors.items() if key not in used}
    faults = dict[str, tuple[int, int, str]]()
    # Complete weights, whatever their shapes, and names that would make them weights of another form.
    wholes = [(form, key) for form in forms for key in form.found(tensors)]
    not_meant = {key for _, key in wholes}
    not_meant |= {key.removesuffix(form.base) + name for form, key in wholes for name in form.without}
    for form in forms:
        for stem in dict.fromkeys(_stems(unused, form.parts)):
            names = [stem + part.name for part in form.parts]
            lacking = [name for name in names if name not in tensors]
            pairs = zip(names, form.parts, strict=True)
            present = [(name, part) for name, part in pairs if name in unused and _may_be(part, unused[name])]
            has_keys = names[0] in tensors, stem + form.base in tensors
            if not not_meant.issuperset(lacking) and _is_certain(form.parts[0], present, *has_keys, are_named):
                # AWQ's names are among GPTQ's: the form with fewest missing parts counts, then with most present ones.
                text = f"{form.name} without {', '.join(shorten(map(repr, lacking)))}"
                rank = (len(lacking), -len(present), text)
                faults[present[0][0]] = min(rank, faults.get(present[0][0], rank))
    return {key: text for key, (*_, text) in faults.items()}


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
    """Return whether the tensors that are present prove that their weight is quantised.

    Args:
        values: Description of the form's tensor of values.
        held: Keys of the tensors that are present, each with the description that its name, dtype and axes fit.
        has_values: Whether a tensor with the key of the values exists, whatever its dtype.
        has_weight: Whether a tensor with the weight's own key exists. If so, a tensor with the name of a scale may
            belong to an unquantised weight.
        are_named: Whether the caller chose the forms. If so, a tensor called `weight` counts as values of the form.
    """
    if held and held[0][1] is values:
        is_weight = are_named and held[0][0].split(".")[-1] == "weight"
        return bool(values.name) or len(held) > 1 or is_weight
    return not has_values and (len(held) > 1 or any(_tells(key, part, has_weight) for key, part in held))


def _tells(key: str, part: Part, has_weight: bool) -> bool:
    """Return whether the presence of a single tensor, such as a scale, proves that its weight is quantised.

    Args:
        key: Key of the tensor.
        part: Description of a stored tensor that the tensor's name, dtype and axes fit.
        has_weight: Whether a tensor with the weight's own key exists.
    """
    is_number = any(dtype.is_floating_point and dtype.itemsize > 1 for dtype in part.dtypes)
    return not is_number or (not has_weight and "weight" in key.split(".")[-1]) or key.endswith("_scale_inv")
