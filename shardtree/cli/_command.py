"""What all commands have in common: flags without a type in the help, formats listed there, options known to errors."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

FORMATS = "{formats}"
"""In an option's help: the formats that can be written. Listed when help is shown, since that imports them."""

_OF_SAVES = {"sharded_strategy": "backend", "common_strategy": "common_backend"}
"""Keywords of `save`, whose errors a conversion may raise, and its own for the same."""

_options: ContextVar[Mapping[str, str]] = ContextVar("options", default=MappingProxyType({}))


def options_as_typed() -> Mapping[str, str]:
    """Return the running command's options as they are typed, by the names of the keywords that they are passed as."""
    return _options.get()


class Command(TyperCommand):
    """A command of shardtree."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, --help included."""
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        options = [one for one in self.params if isinstance(one, TyperOption)]
        typed = {str(one.name): _typed(one) for one in options}
        token = _options.set({**typed, **{name: typed[same] for name, same in _OF_SAVES.items() if same in typed}})
        try:
            return super().invoke(ctx)
        finally:
            _options.reset(token)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print its help."""
        for one in self.params:
            if isinstance(one, TyperOption) and one.help and FORMATS in one.help:
                from ._names import formats_text

                one.help = one.help.replace(FORMATS, formats_text())
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """All commands together."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, --help included."""
        return _without_types(super().get_params(ctx))


def _typed(option: TyperOption) -> str:
    long = next((name for name in option.opts if name.startswith("--")), option.opts[0])
    return long if option.is_flag else f"{long} {option.metavar or 'VALUE'}"


def _without_types(params: list[Any]) -> list[Any]:
    for one in params:
        # A flag takes no value: with a type beside it, people type one.
        if isinstance(one, TyperOption) and one.is_flag and one.metavar is None:
            one.metavar = ""
    return params
