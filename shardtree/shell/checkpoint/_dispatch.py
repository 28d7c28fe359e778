"""Formats and functions for the strategies that a caller chose, and checks of options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ...core.geometry import as_int, check_type
from ...errors import MetadataError, StrategyError, error_text
from ..table import (
    LoadOptions,
    SaveOptions,
    Strategies,
    Strategy,
    StrategyAction,
    find_strategy,
    formats_with,
    get_default_strategy,
    table_of,
)

Options = TypeVar("Options")
Choice = str | tuple[str, int] | Strategy | None
"""A backend's name, for its latest version; a (backend, version) pair; a function; or None for the default."""

Backend = tuple[str, int]
"""A format's name and version."""
Backends = tuple[Backend, Backend]
"""The backends and versions of the shards and of the common state."""

DEFAULT_BACKEND = ("safetensors", 1)


def backend_of(choice: Choice, default: tuple[str, int], strategies: Strategies | None) -> tuple[str, int]:
    """Return the (backend, version) that a caller's choice stands for.

    If the choice is None or a function, this is the default: a function replaces one action of the default format.

    Args:
        choice: Choice to resolve. A name means the default's version if the default has that name, and otherwise the
            latest version that can save.
        default: Default (backend, version).
        strategies: Dispatch table; None for the process's.

    Raises:
        StrategyError: the choice is neither None, nor a name, a pair or a function.

    Examples:
        >>> backend_of("zarr", DEFAULT_BACKEND, None), backend_of(None, DEFAULT_BACKEND, None)
        (('zarr', 3), ('safetensors', 1))
    """
    if choice is None or callable(choice) or choice == default[0]:
        return default
    if isinstance(choice, str):
        return choice, _latest(choice, strategies)
    if isinstance(choice, tuple) and len(choice) == 2 and isinstance(choice[0], str):
        version = as_int(choice[1])
        if version is not None:
            return choice[0], version
    raise StrategyError(
        error_text(
            "invalid strategy",
            found=repr(choice)[:200],
            expected="a backend's name, a (backend, version) pair, a function, or None",
        )
    )


def _latest(backend: str, strategies: Strategies | None) -> int:
    save = StrategyAction.SAVE_SHARDED
    versions = [row[2] for row in table_of(strategies) if row[:2] == (save, backend)]
    # Packages are loaded only if the table lacks the backend. If they lack it too, the save's error lists all backends.
    formats = () if versions else formats_with(save, strategies=strategies)
    return max(versions or [version for name, version in formats if name == backend], default=1)


def backends_of(sharded: Choice, common: Choice, strategies: Strategies | None) -> Backends:
    """Return the backends that a save uses for the shards and for the common state.

    By default, the common state gets the shards' backend, or the native format if the shards' backend can't save common
    states.

    Raises:
        StrategyError: a choice is neither None, nor a name, a pair or a function.

    Examples:
        >>> backends_of(("punch cards", 1), None, {})
        (('punch cards', 1), ('safetensors', 1))
    """
    sharded_backend = backend_of(sharded, DEFAULT_BACKEND, strategies)
    # A `torch_dist` checkpoint must hold a common.pt, which Megatron-Core reads, instead of a native file.
    saves_common = find_strategy(StrategyAction.SAVE_COMMON, *sharded_backend, strategies=strategies) is not None
    return sharded_backend, backend_of(common, sharded_backend if saves_common else DEFAULT_BACKEND, strategies)


def objects_backend(sharded: Backend, common: Backend, strategies: Strategies | None) -> Backend | None:
    """Return the backend that stores a save's objects: the shards' or the common state's; None if neither can.

    A format without a LOAD_OBJECTS row in the dispatch table holds only tensors. The common state's format then holds
    the objects, if it can. It can't if it has a PUBLISH row: only the shards' format may publish the checkpoint.

    Examples:
        >>> objects_backend(("huggingface", 1), ("safetensors", 1), None)
        ('safetensors', 1)
        >>> objects_backend(("huggingface", 1), ("torch_dist", 1), None) is None
        True
    """

    def has(action: StrategyAction, backend: Backend) -> bool:
        return find_strategy(action, *backend, strategies=strategies) is not None

    if sharded == common or has(StrategyAction.LOAD_OBJECTS, sharded):
        return sharded
    holds_them = has(StrategyAction.SAVE_SHARDED, common) and has(StrategyAction.LOAD_OBJECTS, common)
    return common if holds_them and not has(StrategyAction.PUBLISH, common) else None


def are_objects_beside(sharded: Backend, common: Backend, strategies: Strategies | None) -> bool:
    """Return whether a checkpoint stores its objects in the common state's format instead of the shards' format.

    Examples:
        >>> are_objects_beside(("huggingface", 1), ("safetensors", 1), None)
        True
    """
    return sharded != common and objects_backend(sharded, common, strategies) == common


def strategy_of(
    action: StrategyAction, choice: Choice, default: tuple[str, int], strategies: Strategies | None
) -> Strategy:
    """Return the function for an action: the caller's own, or the one of the format that the caller chose.

    Args:
        action: Action that the function performs.
        choice: The caller's choice of a format or a function.
        default: Default (backend, version).
        strategies: Dispatch table; None for the process's.

    Raises:
        StrategyError: the table has no function of that format for the action.
    """
    if choice is not None and callable(choice):
        return choice
    return get_default_strategy(action, *backend_of(choice, default, strategies), strategies=strategies)


def sharded_backend(fields: Mapping[str, Any]) -> tuple[str, int]:
    """Return the backend and version that stored a checkpoint's tensors, from the fields of metadata.json."""
    return fields["sharded_backend"], fields["sharded_backend_version"]


def common_backend(fields: Mapping[str, Any]) -> tuple[str, int]:
    """Return the backend and version that stored a checkpoint's common state, from the fields of metadata.json."""
    return fields["common_backend"], fields["common_backend_version"]


def check_options(doing: str, options: object, kind: type) -> None:
    """Raise unless options are None or an instance of a class, `kind`, with functions as `progress` and `report`.

    Raises:
        MetadataError: the options are of another class, or a field isn't a function.
    """
    if options is None:
        return
    check_type(doing, "options", options, kind, f"Pass st.{kind.__name__}(...).")
    for name in ("progress", "report"):
        call = getattr(options, name)
        if not (callable(call) or (call is None and name == "report")):
            heading, fix = f"{doing}: invalid options.{name}", f"Pass a function as {name}, or leave {name} out."
            raise MetadataError(error_text(heading, found=repr(call), expected="a function", fix=fix))


def given_options(doing: str, options: Options | None, kind: type[Options]) -> Options:
    """Check options by `check_options`, and return them; None gives an instance of `kind` with default values."""
    check_options(doing, options, kind)
    return kind() if options is None else options


# Options and strategies that must be equal on all ranks; phases compare those that differ from the defaults.

_ALIKE = {
    SaveOptions: ("durable", "allow_pickle", "fingerprint", "checksums", "check_replicas", "common"),
    LoadOptions: ("verify", "exchange", "allow_pickle", "types", "parameter_names"),
}


def alike(options: object, doing: str = "") -> dict[str, object]:
    """Return the options that must be equal on all ranks and that differ from their defaults, by name.

    Args:
        options: Options of a save or a load. For an object of another class, which `check_options` refuses, the result
            is empty.
        doing: Prefix of the names in the result.

    Examples:
        >>> alike(SaveOptions(durable=False, threads=3), "save_options.")
        {'save_options.durable': False}
    """
    names, unusual = _ALIKE.get(type(options), ()), {}
    usual = type(options)() if names else None
    for name in names:
        value = getattr(options, name)
        if isinstance(value, (list, tuple)) and all(isinstance(item, type) for item in value):
            value = tuple(sorted(value, key=repr))  # the order of classes has no meaning
        if value != getattr(usual, name):
            unusual[f"{doing}{name}"] = value
    return unusual


def alike_choices(sharded: Choice, common: Choice) -> dict[str, object]:
    """Return the chosen strategies that differ from the defaults, by argument name, as values that ranks can compare.

    All functions are replaced by one text, since a function's repr differs between processes.
    """
    usual = (DEFAULT_BACKEND, DEFAULT_BACKEND[0])
    choices = {"sharded_strategy": None if sharded in usual else sharded, "common_strategy": common}
    # A function has another repr in each process.
    return {name: "a function" if callable(value) else value for name, value in choices.items() if value is not None}
