"""Every public address of commit 73b114f, the last one before modules moved, can be imported for ever."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

from shardtree._moved import new_address
from tests.golden.addresses import pickled_as

LINES = [line.split() for line in (Path(__file__).parent / "golden" / "addresses.txt").read_text().splitlines()]

GONE = {
    "shardtree.codec.Entry": "is HeaderEntry: a storage has entries too",
    "shardtree.plans.resharding.BYTES_IN_FLIGHT": "is a limit among others, which are not public",
    "shardtree.checkpoint.loading.load_plain_tensors": "is shardtree.checkpoint.load_plain_tensors alone",
    "shardtree.strategies.archives.ACTIONS": "the rows of formats are one table of names, `default_strategies`",
    "shardtree.strategies.archives.rows_of_archives": "likewise",
    "shardtree.strategies.torch_checkpointing.RankPart": "is that of the package of archives, which never was public",
    **{
        f"shardtree.strategies.{name}.ROWS": "the rows of formats are one table of names, `default_strategies`"
        for name in ("deepspeed", "dtensor_files", "huggingface", "torch_checkpointing", "torch_dist", "zarr")
    },
    **{
        f"shardtree.strategies.index.{name}": "is shardtree.maintenance's; the kit shows what formats need"
        for name in (
            "bounding_box",
            "file_contents",
            "regions_between",
            "remove_sharded",
            "unused_files",
            "verify_index",
            "without_prefix",
        )
    },
    **{
        f"shardtree.strategies.index.{old}": f"is the method `{new}` of an Index"
        for old, new in {"file_at": "file", "find_texts": "find_keys", "kind_at": "kind", "kinds_at": "kinds"}.items()
    },
    "shardtree.strategies.index.files_damage": "is files_findings: it yields what was checked as well",
    "shardtree.strategies.index.whole_damage": "is whole_file_findings, likewise",
    "shardtree.strategies.safetensors.verify_files": "is shardtree.maintenance's: the table has it as a row",
    "shardtree.strategies.torch.archive_unchecked": "is archive_findings, likewise",
}
"""Public addresses that can't be imported any more, each with the reason, which CHANGELOG.md has too."""

NOT_UNPICKLED = {
    **{
        f"shardtree.checkpoint._open.{name}": "moved to checkpoint._contents; nothing stores a function that reads"
        for name in (
            "load_common_state_dict",
            "load_content_metadata",
            "load_sharded_metadata",
            "load_tensors_metadata",
        )
    },
    "shardtree.checkpoint.loading._load.load_plain_tensors": "moved before rooms did; nothing stores it",
    "shardtree.testing.conformance._value_cases.check_rows": "moved to conformance._row_cases; nothing stores it",
    "shardtree.strategies.index._columns.stored_columns": "stands beside the loads now, which formats of others do",
    "shardtree.strategies.index._save.write_file": "has a module of its own, which our own format need not load",
    "shardtree.traces._recording.trace": "moved to traces._tracing before this list was kept; nothing stores `trace`",
}
"""Addresses in pickles that can't be imported any more, each with the reason."""


def found(address: str) -> bool:
    """Return whether an address can be imported."""
    try:
        resolve_name(address)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_public_address_can_be_imported() -> None:
    assert len(LINES) == 856
    assert [address for address, *_ in LINES if not found(address)] == sorted(GONE)


def test_what_pickles_name_is_what_the_public_address_has() -> None:
    pairs = [(address, pickled[0]) for address, *pickled in LINES if pickled and address not in GONE]
    assert sorted({old for _, old in pairs if not found(old)}) == sorted(NOT_UNPICKLED)
    kept = [(address, old) for address, old in pairs if old not in NOT_UNPICKLED]
    assert [pair for pair in kept if resolve_name(pair[0]) is not resolve_name(pair[1])] == []


@pytest.mark.parametrize("address", ["shardtree.nowhere", "shardtree.layouts.nowhere.Mesh", "shardtree.Mesh.nowhere"])
def test_an_address_that_is_gone_is_found(address: str) -> None:
    assert not found(address)


def test_the_list_has_the_addresses_of_this_process_s_classes() -> None:
    listed = {address: pickled for address, *pickled in LINES}
    assert [new_address(old) for old in listed["shardtree.Mesh"]] == [pickled_as(resolve_name("shardtree.Mesh"))]
    assert {"shardtree.objects", "shardtree.mapping.memory", "shardtree.layouts.meshes.Mesh"} <= listed.keys()
