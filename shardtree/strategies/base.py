"""The dispatch table: strategies are plain functions, keyed by (action, backend, version).

Megatron-Core's strategy classes declare abilities by attributes and compatibility checks; here, a backend supports
exactly the actions that it has a row for. A table is a value: pass ``strategies=default_strategies | {row: function}``
to one call, or register a row for the whole process.
"""

from __future__ import annotations

import typing

from ..core.deferred import face

__all__ = [
    "ENTRY_POINT_GROUP",
    "Fn",
    "StrategyTable",
    "deciding_files",
    "default_strategies",
    "find_strategy",
    "formats_with",
    "get_default_strategy",
    "register_default_strategy",
    "table_of",
    "traits_of",
]

if typing.TYPE_CHECKING:
    from ..shell.table import (
        StrategyTable,
        deciding_files,
        default_strategies,
        find_strategy,
        formats_with,
        get_default_strategy,
        register_default_strategy,
        table_of,
        traits_of,
    )
    from ..shell.table.base import ENTRY_POINT_GROUP, Fn
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "...shell.table",
        {
            "...shell.table.base": "ENTRY_POINT_GROUP Fn",
        },
    )
