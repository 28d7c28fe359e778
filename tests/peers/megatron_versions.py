"""What differs between the releases of Megatron-Core that tests run beside, in one place: 0.16.1 to 0.19.2."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def _installed() -> tuple[int, int]:
    try:
        major, minor = version("megatron-core").split(".")[:2]
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


INSTALLED = _installed()
"""The release's first two numbers; zeros where there is none."""

CHANGED_ARGUMENTS = (
    {"common_strategy", "verify_integrity", "async_strategy", "process_group"} if INSTALLED >= (0, 17) else set()
)
"""Arguments of `save` and `load` that came and went since 0.16, whose names and order ours are."""


def has(span: str) -> bool:
    """Return whether the installed release has a name that docs/megatron.md marks, as ``until 0.18``.

    Examples:
        >>> has("")
        True
    """
    which, _, release = span.partition(" ")
    numbers = tuple(map(int, release.split("."))) if release else INSTALLED
    return numbers >= INSTALLED if which == "until" else numbers <= INSTALLED


def source_of(module: str) -> ast.Module:
    """Return a module of `dist_checkpointing`, parsed; an empty one where the release has none.

    Not imported: importing takes seconds and warns of what isn't installed.
    """
    name = f"megatron/core/dist_checkpointing/{module.replace('.', '/')}.py"
    found = [path for path in files("megatron-core") or [] if path.as_posix() == name]
    return ast.parse(Path(str(found[0].locate())).read_text() if found else "")


def buffer_of(
    config: Any,
    named: Mapping[str, torch.nn.Parameter],
    groups: SimpleNamespace,
    bucket_size: int | None,
) -> Any:
    """Return the buffer of a distributed optimizer's parameters, in the model's order.

    Args:
        config: a `DistributedDataParallelConfig`.
        named: parameters by name.
        groups: process groups, `tp` and `dp_cp`.
        bucket_size: of how many elements a bucket is; None for one bucket.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parameters, numbers = list(named.values()), list(range(len(named)))
    layout = {}
    if INSTALLED >= (0, 18):  # until then the buffer cuts itself; else it is given cut, or has no padding
        make = DistributedOptimizer._compute_per_buffer_param_layout
        layout["param_layout"] = make(parameters, bucket_size, groups.dp_cp.size(), config, numbers)
    return _ParamAndGradBuffer(
        config,
        torch.float32,
        torch.float32,
        [(one, name) for name, one in named.items()] if INSTALLED >= (0, 17) else parameters,
        groups.dp_cp,
        bucket_size,
        {one: name for name, one in named.items()},
        1.0,
        numbers,
        False,
        groups,
        **layout,
    )
