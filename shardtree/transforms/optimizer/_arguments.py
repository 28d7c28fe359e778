"""Whether arguments are of their kinds, before anything looks into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import TreeError, error_text
from ...mapping import ShardedTensor, ShardedTensorFactory


def check_dict(doing: str, name: str, value: object, expected: str, kinds: Any = object) -> None:
    """Raise unless an argument is a dict, with values of some kinds.

    Raises:
        TreeError: names each value that isn't.

    Examples:
        >>> check_dict("save", "id_to_name", {0: "w"}, "{id: name}", str)
    """
    if not isinstance(value, Mapping):
        raise TreeError(error_text(f"{doing}: {name} isn't a dict", found=type(value).__name__, expected=expected))
    wrong = [f"{key!r}: {type(one).__name__}" for key, one in value.items() if not isinstance(one, kinds)]
    if wrong:
        raise TreeError(error_text(f"{doing}: {name}", expected=expected, offenders=wrong))


def check_params(doing: str, params: object) -> None:
    """Raise unless these are sharded parameters by id or name.

    Raises:
        TreeError: names each that isn't.

    Examples:
        >>> check_params("save", {})
    """
    expected = "{id or name: ShardedTensor or ShardedTensorFactory}"
    check_dict(doing, "id_to_sharded_param_map", params, expected, (ShardedTensor, ShardedTensorFactory))


def check_param(doing: str, param: object) -> None:
    """Raise unless this is a parameter's shard or factory.

    Raises:
        TreeError: it isn't.

    Examples:
        >>> import torch
        >>> check_param("save", ShardedTensor.from_rank_offsets("w", torch.zeros(2)))
    """
    if not isinstance(param, (ShardedTensor, ShardedTensorFactory)):
        expected = "a ShardedTensor or a ShardedTensorFactory"
        raise TreeError(error_text(f"{doing}: a parameter", found=type(param).__name__, expected=expected))


def excluded(doing: str, exclude_keys: object) -> set[Any]:
    """Return the state keys that are left out; one text is one key.

    Raises:
        TreeError: these aren't several.

    Examples:
        >>> excluded("save", "step"), sorted(excluded("save", ("step", "m")))
        ({'step'}, ['m', 'step'])
    """
    keys = [exclude_keys] if isinstance(exclude_keys, str) else exclude_keys
    if not isinstance(keys, Iterable):
        raise TreeError(error_text(f"{doing}: exclude_keys", found=repr(exclude_keys), expected="state keys"))
    return set(keys)
