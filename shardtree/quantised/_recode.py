"""Recoding whole checkpoints, box by box: quantised weights to plain ones, or from one form to another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.geometry import check_type, refuse
from ..core.lazy import Box, Boxwise, Recipe, of_source
from ..core.mapping import ShardedTensor
from ..core.trees import check_patterns_fit, checked_patterns, key_matcher, scaled_values, those_of
from ..errors import KeyMismatch, MetadataError, ShapeError, UnsupportedValue, error_text
from ._encode import Encode
from ._form import Form
from ._forms import FORMS
from ._halves import half_weights

_NAMES = {"float8_e4m3fn": "FP8", "float8_e5m2": "FP8", "float4_e2m1fn_x2": "FP4"}  # torch 2.6 lacks the last
_NEED_SCALES = {getattr(torch, name): what for name, what in _NAMES.items() if hasattr(torch, name)}


def recode(
    to: Form | torch.dtype,
    *,
    also: Iterable[str] = (),
    forms: Iterable[Form] | None = None,
    lossless: bool = False,
    plain: Iterable[str] = (),
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a transform that recodes the quantised weights of a checkpoint, for `transform=` of `convert`.

    The transform takes a tree of whole lazy shards. Elements are read only when the result is written, box by box.
    Tensors that belong to no quantised weight stay as they are.

    Args:
        to: Form to which weights are recoded, or dtype to which they are dequantised.
        also: Patterns of keys of unquantised weights to quantise, too, as for the export of a dense checkpoint.
        forms: Forms in which weights may be stored now, recognised by the names, dtypes and shapes of their tensors;
            None for all of `FORMS`.
        lossless: Whether rounding an element is an error; otherwise, elements are rounded to the nearest.
        plain: Patterns of keys of tensors that look like tensors of a quantised weight, but aren't.

    Raises:
        ShapeError: the form can only be read, or the dtype isn't a floating-point one. When the transform is applied: a
            shard of a weight isn't made of whole blocks; tensors are named as in a form, but fit none or several forms;
            FP8 or FP4 values have no scales; some tensors of a weight are missing; or integers or bytes have scales,
            but fit no form. The error names all of them.
        KeyMismatch: a pattern matches no key; a pattern in `also` matches no quantised weight and no floating-point
            tensor; or a recoded tensor would have the key of another tensor. The error names all of them.
        MetadataError: `also` has patterns, but `to` is a dtype.
        UnsupportedValue: a float64 weight would be rounded, with `lossless`. When a weight is written: an element isn't
            finite, or, with `lossless`, is rounded.

    Examples:
        >>> import shardtree as st
        >>> weight = st.ShardedTensor.from_rank_offsets("up.weight", torch.ones(2, 4))
        >>> st.save({"up": weight}, "dense")
        >>> to_fp8 = recode(FORMS["fp8_rows"], also=["**.weight"])
        >>> done = st.convert("dense", "fp8", backend="huggingface", transform=to_fp8)
        >>> list(st.open_checkpoint("fp8"))
        ['up.weight', 'up.weight_scale']
        >>> done = st.convert("fp8", "again", backend="safetensors", transform=recode(torch.bfloat16, lossless=True))
        >>> st.load_plain_tensors("again")["up.weight"][0]
        tensor([1., 1., 1., 1.], dtype=torch.bfloat16)
    """
    patterns, as_plain = checked_patterns("recode: also", also), checked_patterns("recode: plain", plain)
    choices, fits = tuple(FORMS.values() if forms is None else forms), key_matcher(patterns)
    _check_to(to, patterns)

    def transform(tree: Mapping[str, Any]) -> dict[str, Any]:
        tensors = {key: leaf for key, leaf in tree.items() if isinstance(leaf, ShardedTensor)}
        check_patterns_fit("recode: plain", as_plain, tensors)
        form_of = _forms_of(tensors, choices, key_matcher(as_plain), are_named=forms is not None)
        used = {name for key, form in form_of.items() for name in form.keys(key)}
        others = {key: leaf for key, leaf in tree.items() if key not in used}
        plain = [key for key, leaf in tensors.items() if key in others and leaf.dtype.is_floating_point and fits(key)]
        check_patterns_fit("recode: also", patterns, [*plain, *form_of])
        wide = [key for key in plain if lossless and isinstance(to, Form) and tensors[key].dtype == torch.float64]
        if wide:
            fix = "Forms are computed in float32: cast these first, or recode with lossless=False."
            raise UnsupportedValue(error_text("recode: float64 would be rounded", offenders=map(repr, wide), fix=fix))
        weights = [others.pop(key) for key in plain] if isinstance(to, Form) else []
        for key, form in form_of.items():
            exact = torch.float32 if lossless or isinstance(to, Form) else to
            empty = torch.empty(form.shape_of(key, tensors), dtype=exact, device="meta")
            weight = ShardedTensor.from_rank_offsets(key, empty).without_data()
            data = form.lens(weight).merge([tensors[name].data for name in form.keys(key)])
            weights.append(replace(weight, data=data))
        parts = [part for weight in weights for part in _in_form(weight, to, lossless)]
        return _unite(others, parts)

    return transform


def _check_to(to: Form | torch.dtype, also: Sequence[str]) -> None:
    """Raise an error if weights can't be recoded to a form or dtype.

    Args:
        to: Form, which must have an encoder, or dtype, which must be a floating-point one.
        also: Patterns of keys of unquantised weights to quantise; there must be none if `to` is a dtype.
    """
    if isinstance(to, Form):
        to.check_made("recode")
        return
    check_type("recode", "to", to, torch.dtype, "Pass a form, such as FORMS['fp8_blocks'], or a torch dtype.")
    if not to.is_floating_point:
        fix = "Pass a floating-point dtype, such as torch.bfloat16."
        raise ShapeError(error_text("recode: `to` is not a floating-point dtype", found=to, fix=fix))
    if also:
        fix = "Pass the form for these plain weights as `to`; `shardtree.cast` changes the dtype of plain tensors."
        refuse("recode", "also", also, "no patterns, since `to` is a dtype", fix, error=MetadataError)


def _unite(rest: Mapping[str, Any], parts: Sequence[ShardedTensor]) -> dict[str, Any]:
    counts = Counter([*rest, *(part.key for part in parts)])
    twice = [repr(key) for key, count in counts.items() if count > 1]
    if twice:
        heading = "recode: new tensors, such as scales, would get keys that other tensors have"
        fix = "Rename the tensors that have these keys now."
        raise KeyMismatch(error_text(heading, offenders=twice, fix=fix))
    return {**rest, **{part.key: part for part in parts}}


def _forms_of(
    tensors: Mapping[str, Any], forms: Sequence[Form], is_plain: Callable[[str], bool], *, are_named: bool
) -> dict[str, Form]:
    """Return the form of each quantised weight, by the weight's key.

    Args:
        tensors: Shards by key.
        forms: Forms that weights may have.
        is_plain: Function that says of a key whether its tensor belongs to no quantised weight.
        are_named: Whether the caller chose the forms. If so, a tensor called `weight` with the dtype of a form's values
            counts as values of that form, even without scales.

    Raises:
        ShapeError: tensors are named as in a form, but fit none or several forms; FP8 or FP4 values have no scales;
            some tensors of a weight are missing; or integers or bytes have scales, but fit no form.
    """
    tree = {key: tensor for key, tensor in tensors.items() if not is_plain(key)}
    fitting, misfits, named = defaultdict[str, list[Form]](list), dict[str, str](), set[str]()
    for form in forms:
        for key, names in form.found(tree).items():
            try:
                shape = form.shape_of(key, tree)
                if all(form.means(shape) != other.means(shape) for other in fitting[key]):
                    fitting[key].append(form)
            except ShapeError as error:
                # Names alone don't make a form, as a norm's scale shows; bytes or integers beside scales do.
                if tree[names[0]].dtype.itemsize == 1 or not tree[names[0]].dtype.is_floating_point:
                    misfits[key] = " ".join(str(error).split("\n")[1:3]).strip()
                    named.update(names)
    several = [f"{key!r}: {', '.join(form.name for form in fits)}" for key, fits in fitting.items() if len(fits) > 1]
    if several:
        fix = "Pass forms=[FORMS[...]] with the one that config.json names: the tensors alone fit each of them."
        raise ShapeError(error_text("recode: tensors that fit several forms", offenders=several, fix=fix))
    form_of = {key: form for key, [form] in fitting.items()}
    used = {name for key, form in form_of.items() for name in form.keys(key)}
    bare = {
        key: f"{_NEED_SCALES[leaf.dtype]} values without scales"
        for key, leaf in tree.items()
        if key not in used and leaf.dtype in _NEED_SCALES
    }
    halves = half_weights(tensors, forms, {*used, *(tensors.keys() - tree.keys())}, are_named=are_named)
    wrong = _unexplained(tree, used | named) | bare | misfits | halves
    offenders = [f"{key!r}: {why}" for key, why in wrong.items() if key not in form_of]
    if offenders:
        fix = (
            "Pass all tensors of each weight, and forms=[...] with the Forms and block sizes that config.json names.\n"
            "  If tensors belong to no quantised weight, pass plain=[...] with patterns of their keys."
        )
        raise ShapeError(error_text("recode: tensors that fit no known Form", offenders=offenders, fix=fix))
    return form_of


def _unexplained(tensors: Mapping[str, ShardedTensor], known: Collection[str]) -> dict[str, str]:
    """Return a description of each quantised tensor that has scales but fits no form, by key.

    Args:
        tensors: Shards by key.
        known: Keys to ignore: tensors that fit a form, or about which there is an error already.
    """
    dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
    values = {key: dtype for key, dtype in dtypes.items() if key not in known}
    return {
        key: f"{str(dtypes[key]).removeprefix('torch.')} beside {', '.join(map(repr, names))}, which no form explains"
        for key, names in scaled_values(values, those_of(dtypes)).items()
    }


def _in_form(weight: ShardedTensor, to: Form | torch.dtype, lossless: bool) -> Sequence[ShardedTensor]:
    """Return the shards that store a whole weight in a quantised form, or the one shard of a plain tensor.

    Args:
        weight: Shard that has the whole weight.
        to: Form, or dtype of the plain tensor.
        lossless: Whether rounding an element is an error, which is raised when the element is written.
    """
    if isinstance(to, Form):
        form = replace(to, encode=_without_loss(weight.key, to)) if lossless else to
        shards = form.lens(weight).shards
        if weight.data is not None and any(part.data is None for part in shards):
            heading = f"recode: {weight.key!r} is not cut into whole blocks, which its scales need"
            found = f"a shard of shape {weight.local_shape} at offset {weight.global_offset}"
            expected = f"a shard of whole blocks of shape {to.block} in the stored matrix (0: the whole axis)"
            fix = "Redistribute the weight to shards of whole blocks first, as docs/trainer-to-engine.md shows."
            raise ShapeError(error_text(heading, found=found, expected=expected, fix=fix))
        return shards
    if not lossless:
        return [weight]

    def make(read: Iterator[torch.Tensor]) -> torch.Tensor:
        old = next(read)
        new = old.to(to)
        _check_same(weight.key, new.to(old.dtype), old)
        return new

    def recipe(box: Box) -> Recipe:
        return [(weight.data, box)], make

    identity = f"without loss to {to}", weight.data
    source = Boxwise(f"{weight.data.name} to {to}", weight.global_shape, to, recipe, lambda: identity)
    return [replace(weight, data=of_source(source), dtype=to)]


def _without_loss(key: str, form: Form) -> Encode:
    def encode(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        assert form.encode is not None
        parts, zeros = form.encode(matrix, block), (0,) * matrix.ndim
        spread = (part.spread(each, zeros, matrix.shape) for part, each in zip(form.parts, parts, strict=True))
        _check_same(key, form.join(*spread), matrix)
        return parts

    return encode


def _check_same(key: str, new: torch.Tensor, old: torch.Tensor) -> None:
    count = int(((new != old) & ~old.isnan()).sum())
    if count:
        fix = "Recode to a Form or a dtype that has these values, or pass lossless=False."
        found = f"at least {count} elements that would change"
        raise UnsupportedValue(error_text(f"recode: {key!r} would be rounded", found=found, fix=fix))
