"""`shardtree inspect`: what is in a checkpoint, as a table or as JSON, without reading one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checkpoint import OpenCheckpoint, load_content_metadata, open_checkpoint
from ..errors import CheckpointingException
from ._brief import entries_of
from ._contents import Contents, check_patterns, contents_at, select
from ._files import files_in
from ._inspect_show import Findings, document, show_findings
from ._output import Output, complain, json_text

_SORTS = {"key": lambda row: row.key, "bytes": lambda row: (-(row.length or 0), row.key)}


def run_inspect(
    checkpoint: str, *, patterns: Sequence[str], sort: str, limit: int | None, as_json: bool, allow_pickle: bool
) -> int:
    """Print what is in a checkpoint, and return the exit status: 1 where its common state can't be read.

    Args:
        checkpoint: a path or URL.
        patterns: of the keys to show; none for all.
        sort: "key" or "bytes".
        limit: rows of each table; None for all.
        as_json: whether to print JSON.
        allow_pickle: whether pickled values may be unpickled.

    Raises:
        CheckpointingException: it can't be opened.
    """
    found = _examine(checkpoint, patterns, sort, allow_pickle)
    if as_json:
        print(json_text(document(found, limit)))
    else:
        show_findings(Output(), found, limit, is_selection=bool(patterns))
    return 0 if found.common is not None else 1


def _examine(where: str, patterns: Sequence[str], sort: str, allow_pickle: bool) -> Findings:
    tree = open_checkpoint(where, allow_pickle=allow_pickle)
    everything = contents_at(tree)
    check_patterns("inspect", patterns, everything)
    chosen = select(everything, patterns)
    order = _SORTS[sort]
    ordered = Contents(tuple(sorted(chosen.tensors, key=order)), tuple(sorted(chosen.objects, key=order)))
    common = _common(tree)
    content = load_content_metadata(preloaded_state_dict=common or {})
    if common is not None:
        common = {name: value for name, value in common.items() if name != "content_metadata"}
    return Findings(
        where, tree.checkpoint.fields, everything, ordered, common, content, files_in(tree.checkpoint.storage)
    )


def _common(tree: OpenCheckpoint) -> dict[str, Any] | None:
    try:
        return entries_of(tree.common())
    except CheckpointingException as error:
        complain("inspect", error)
        return None
