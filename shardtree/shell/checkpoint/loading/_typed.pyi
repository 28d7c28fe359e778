"""What type checkers see of `load`: what it returns, by `strict`."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

import torch

from ....core.layouts import ShardColumns
from ....core.trees import Transform
from ...storage import Directory
from ...table import Checkpoint, LoadOptions, Strategies
from .._dispatch import Choice
from ._strict import StrictHandling

_Key = TypeVar("_Key")

_Returns: TypeAlias = Literal[
    StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL, "return_unexpected", "return_all"
]
_Leaves: TypeAlias = Literal[
    StrictHandling.ASSUME_OK_UNEXPECTED,
    StrictHandling.LOG_UNEXPECTED,
    StrictHandling.LOG_ALL,
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
    StrictHandling.IGNORE_ALL,
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "ignore_all",
]

class _Keywords(TypedDict, total=False):
    """What `load` takes by name alone, for type checkers."""

    world: Any
    donate: bool
    cast: bool
    plain: Sequence[str]
    device: str | torch.device | None
    layout: ShardColumns | None
    transform: Transform | None
    strategies: Strategies | None
    options: LoadOptions | None

@overload
def load(
    sharded_state_dict: dict[_Key, Any],
    checkpoint_dir: Directory | Checkpoint,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    strict: _Leaves = ...,
    **keywords: Unpack[_Keywords],
) -> dict[_Key, Any]: ...
@overload
def load(
    sharded_state_dict: dict[_Key, Any],
    checkpoint_dir: Directory | Checkpoint,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    strict: _Returns = ...,
    **keywords: Unpack[_Keywords],
) -> tuple[dict[_Key, Any], set[str], set[str]]: ...
@overload
def load(
    sharded_state_dict: Any,
    checkpoint_dir: Directory | Checkpoint,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    strict: str | StrictHandling = ...,
    **keywords: Unpack[_Keywords],
) -> Any: ...
