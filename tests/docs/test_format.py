"""docs/format.md: its tables say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

import shardtree as st
from shardtree.core.codec import dtype_from_name, dtype_name, format_tag, is_tagged
from shardtree.core.codec._dtypes import _TAGS
from shardtree.core.codec._tree import _DECODERS
from shardtree.shell.storage import BLOCK_BYTES
from shardtree.shell.table.index import COLUMNS, read_index

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def rows(head: str) -> list[tuple[str, ...]]:
    """Return a table's rows as cells, given how its head begins."""
    body = PAGE.partition(f"| {head}")[2].partition("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in body]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_kind_of_value_and_its_members_are_listed() -> None:
    listed = {kind: set(words(members)) for kinds, members, _ in rows("kind") for kind in words(kinds)}
    known = {kind: set(names) for kind, (names, _) in _DECODERS.items()}
    assert listed == known | {"record": {"type", "fields"}, "pickle": {"entry"}}


def test_every_column_is_listed_in_order() -> None:
    assert tuple(name for cell, *_ in rows("column") for name in words(cell)) == COLUMNS


def test_columns_have_the_kind_and_the_axes_that_the_page_says(tmp_path: Path) -> None:
    shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))
    st.save([shard, st.ShardedObject("o", 1, (1,), (0,))], tmp_path)
    index = read_index(st.open_checkpoint(tmp_path).checkpoint)
    for cell, shape, _ in rows("column"):
        column = getattr(index, words(cell)[0])
        kind = np.uint8 if cell.endswith("_text`") else np.uint64 if "hash" in cell else np.int64
        assert (column.dtype, column.ndim) == (kind, shape.strip("(,)").count(",") + 1), cell


def test_every_dtype_with_a_tag_is_listed() -> None:
    listed = dict(
        re.findall(r"(\w+)\s`([A-Z0-9_]+)`", PAGE.partition("Dtypes with a tag")[2].partition("Every other")[0])
    )
    assert listed == {dtype_name(dtype): tag for dtype, tag in _TAGS.items()}
    assert all(
        is_tagged(dtype_from_name(name)) and format_tag(dtype_from_name(name)) == tag for name, tag in listed.items()
    )


def test_the_size_of_a_block() -> None:
    assert f"{BLOCK_BYTES:,} bytes" in PAGE


def test_every_member_of_the_metadata_is_listed(tmp_path: Path) -> None:
    st.save([], tmp_path)
    listed = {member for cell, _ in rows("member") for member in words(cell)}
    assert set(st.open_checkpoint(tmp_path).checkpoint.fields) == listed
