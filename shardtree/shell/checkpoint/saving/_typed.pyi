"""What type checkers see of `save`: what it returns, by `async_sharded_save`."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

from ....core.layouts import ShardColumns
from ...storage import Directory
from ...table import AsyncRequest, SaveOptions, Strategies
from .._dispatch import Choice

class _Keywords(TypedDict, total=False):
    """What `save` takes by name alone, for type checkers."""

    world: Any
    overwrite: bool
    layout: ShardColumns | None
    strategies: Strategies | None
    options: SaveOptions | None

# In this order: a call that doesn't say async_sharded_save fits the first two.
@overload
def save(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    async_sharded_save: Literal[False] = ...,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = ...,
    content_metadata: Mapping[str, Any] | None = ...,
    **keywords: Unpack[_Keywords],
) -> None: ...
@overload
def save(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    async_sharded_save: Literal[True] = ...,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = ...,
    content_metadata: Mapping[str, Any] | None = ...,
    **keywords: Unpack[_Keywords],
) -> AsyncRequest[Any]: ...
@overload
def save(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    async_sharded_save: bool = ...,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = ...,
    content_metadata: Mapping[str, Any] | None = ...,
    **keywords: Unpack[_Keywords],
) -> AsyncRequest[Any] | None: ...
