"""Recognition of quantised tensors, by keys and dtypes: their values mean nothing without the scales in other tensors.

The key suffixes are in a table here, since packages that change dtypes need them, but can't import `quantised`. A test
compares the table with the forms of `quantised`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch

from ...errors import ShapeError, error_text
from ._key_patterns import check_patterns_fit, checked_patterns, key_matcher

Dtypes = tuple[torch.dtype, ...]
Scaled = Mapping[str, tuple[str, ...]]
"""The keys of quantised tensors, each with the keys of the tensors that are needed to decode it."""


def _named(*names: str) -> Dtypes:
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))  # torch 2.6 lacks some


_BYTES, _INTEGERS, _NUMBERS = (torch.uint8,), (torch.int32,), (torch.float32, torch.bfloat16, torch.float16)
_FP8 = _named("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_POWERS = _named("float8_e8m0fnu")
_PACKED = (torch.int8, *_BYTES, *_INTEGERS)
_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))

# Suffix and dtypes of the values, then suffix and dtypes of the tensor whose presence reveals them.
_ROWS: tuple[tuple[str, Dtypes, str, Dtypes], ...] = (
    ("", _FP8, "_scale_inv", (*_NUMBERS, *_BYTES, *_POWERS)),
    ("", _FP8, "_scale", (*_NUMBERS, *_BYTES, *_POWERS)),
    ("_scale_inv", _BYTES, "", _FP8),  # powers of two, as bytes
    ("_blocks", _BYTES, "_scales", _BYTES),
    ("_scales", _BYTES, "_blocks", _BYTES),
    ("", _BYTES, "_scale", _FP8),
    ("", _BYTES, "_scale_2", _NUMBERS),
    ("weight_packed", _BYTES, "weight_scale", (*_FP8, *_BYTES, *_POWERS)),
    ("weight_packed", _BYTES, "weight_global_scale", _NUMBERS),
    ("weight_packed", _INTEGERS, "weight_scale", _NUMBERS),
    ("weight_packed", _INTEGERS, "weight_shape", (torch.int64, *_INTEGERS)),
    ("weight_packed", _INTEGERS, "weight_zero_point", _INTEGERS),
    ("weight_zero_point", _INTEGERS, "weight_packed", _INTEGERS),
    *(("qweight", _INTEGERS, *beside) for beside in (("scales", _NUMBERS), ("qzeros", _INTEGERS))),
    *(("qzeros", _INTEGERS, *beside) for beside in (("scales", _NUMBERS), ("qweight", _INTEGERS))),
    # Forms of other programs, which `quantised` doesn't know.
    ("", (torch.int8,), "_scale", (*_NUMBERS, *_BYTES, *_POWERS)),  # compressed-tensors' integers, ModelOpt's
    ("", (torch.int8,), "_scale_inv", (*_NUMBERS, *_BYTES, *_POWERS)),
    ("weight", _BYTES, "weight_scale", _NUMBERS),
    ("weight", (torch.int8, *_BYTES, *_FP8), "scale", (*_NUMBERS, *_POWERS)),  # DeepSeek's own names
    ("weight", (torch.int8,), "SCB", _NUMBERS),  # bitsandbytes'
    ("weight", (torch.int8,), "weight_scales", _NUMBERS),  # EETQ's
    ("", (torch.int8, *_BYTES), ".absmax", (*_NUMBERS, *_BYTES)),
    ("", (torch.int8, *_BYTES), ".quant_map", _NUMBERS),
    (".absmax", _BYTES, ".nested_absmax", _NUMBERS),
    *((state, _BYTES, ".absmax", (*_NUMBERS, *_BYTES)) for state in _STATES),  # values may be stored as bfloat16
    *(("W_q", _PACKED, name, _NUMBERS) for name in ("scale", "zero", "meta.scale", "meta.zero")),  # HQQ's
    ("._data", (*_PACKED, *_FP8), "._scale", _NUMBERS),  # Quanto's
    ("qdata", (*_PACKED, *_FP8), "scale", (*_NUMBERS, *_FP8, *_BYTES, *_POWERS)),  # torchao's
    ("weight", _named("uint32"), "scales", (*_NUMBERS, *_BYTES)),  # MLX's
)
SCALED_DTYPES = frozenset(dtype for _, dtypes, _, _ in _ROWS for dtype in dtypes)
"""Dtypes in which values that need scales may be stored."""

BY_SCALES = (
    "Apply their scales: load through form.lens of shardtree.quantised.FORMS, or from a checkpoint that\n"
    "  convert(transform=recode(dtype)) has written. If they need no scales, pass plain=[patterns]."
)
"""Advice for values that would be cast without their scales."""


def scaled_values(
    tensors: Mapping[str, torch.dtype], stored: Callable[[list[str]], Mapping[str, torch.dtype]]
) -> Scaled:
    """Return the quantised tensors among tensors to cast: the keys of a tensor's scales, by the tensor's key.

    A tensor counts as quantised if its dtype and the end of its key are in the table of quantised forms, and a tensor
    exists that has the name and dtype of its scales.

    Args:
        tensors: Dtype of each tensor that is to be cast, by key.
        stored: Function from keys to the dtypes of those keys that exist. It is called only if a tensor's dtype and key
            are in the table.

    Examples:
        >>> there = {"w": torch.float8_e4m3fn, "w_scale": torch.float32, "mask": torch.float8_e4m3fn}
        >>> scaled_values(there, those_of(there))
        {'w': ('w_scale',)}
    """
    beside = defaultdict[str, list[tuple[str, Dtypes]]](list)
    for key, dtype in tensors.items():
        for end, dtypes, other, other_dtypes in _ROWS if dtype in SCALED_DTYPES else ():
            if dtype in dtypes and key.endswith(end):
                beside[key].append((key.removesuffix(end) + other, other_dtypes))
    if not beside:
        return {}
    found = stored(sorted({name for names in beside.values() for name, _ in names}))
    scales = {key: tuple(name for name, dtypes in names if found.get(name) in dtypes) for key, names in beside.items()}
    return {key: names for key, names in scales.items() if names}


def those_of(dtypes: Mapping[str, torch.dtype]) -> Callable[[list[str]], dict[str, torch.dtype]]:
    """Return a function from keys to the dtypes of those keys that exist in `dtypes`.

    Examples:
        >>> those_of({"w": torch.float32})(["w", "x"])
        {'w': torch.float32}
    """
    return lambda keys: {key: dtypes[key] for key in keys if key in dtypes}


def scaled_what(dtype: torch.dtype, scales: Iterable[str]) -> str:
    """Return the text for a quantised tensor that would be cast without its scales, for errors.

    Examples:
        >>> scaled_what(torch.float8_e4m3fn, ["w_scale"])
        "float8_e4m3fn values that need 'w_scale' beside them"
    """
    return f"{str(dtype).removeprefix('torch.')} values that need {', '.join(map(repr, scales))} beside them"


def refuse_scaled(doing: str, tensors: Mapping[str, torch.dtype], scaled: Scaled) -> None:
    """Raise if quantised tensors would be cast without their scales.

    Args:
        doing: Name of the operation, for the error.
        tensors: Dtype of each tensor that would be cast, by key.
        scaled: Keys of the quantised tensors among them and of their scales, as `scaled_values` returns them.

    Raises:
        ShapeError: `scaled` isn't empty; the error names each key, and its scales.

    Examples:
        >>> refuse_scaled("cast", {"w": torch.float32}, {})
    """
    if scaled:
        lines = [f"{key!r}: {scaled_what(tensors[key], names)}" for key, names in scaled.items()]
        heading = f"{doing}: quantised values would be cast without their scales"
        raise ShapeError(error_text(heading, offenders=lines, fix=BY_SCALES))


def plain_matcher(doing: str, plain: Iterable[str], keys: Callable[[], Iterable[str]]) -> Callable[[str], bool]:
    """Return a predicate of keys that is true for tensors that need no scales, as the caller declares.

    Args:
        doing: Name of the operation, for errors.
        plain: Patterns of the keys of such tensors.
        keys: Function that returns the existing keys; called only if there are patterns.

    Raises:
        KeyMismatch: A pattern fits no key, or `plain` isn't a list of patterns.

    Examples:
        >>> plain_matcher("cast", ["mask*"], lambda: ["mask", "w"])("mask")
        True
    """
    patterns = checked_patterns(f"{doing}: plain", plain)
    if patterns:
        check_patterns_fit(f"{doing}: plain", patterns, set(keys()))
    return key_matcher(patterns)
