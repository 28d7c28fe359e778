"""check_strategy: every registered format passes, and each kind of broken backend is caught by the right law."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from shardtree.errors import CheckpointingException, StrategyError, UnsupportedValue
from shardtree.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardtree.shell.table import Resolution, find_strategy
from shardtree.storage import ReadReport
from shardtree.strategies import (
    AsyncRequest,
    Checked,
    Checkpoint,
    FormatTraits,
    PendingSave,
    Strategy,
    StrategyAction,
    default_strategies,
)
from shardtree.testing import StrategyReport, check_strategy
from shardtree.testing._bits import carried
from shardtree.testing.conformance import _row_cases
from shardtree.testing.conformance._layout_cases import RANDOM
from shardtree.testing.conformance._promises import OF_ACTIONS, PROMISES
from shardtree.trees import map_shards
from tests.faults.sampling import EXHAUSTIVE, sample, usually
from tests.testing.writers import (
    write_dcp_safetensors,
    write_deepspeed,
    write_dtensor_files,
    write_legacy,
    write_torch_checkpointing,
    write_universal,
)

FORMATS = sorted({(backend, version) for _, backend, version in default_strategies})
SOME_FORMATS = [pytest.param(each, marks=() if each in sample(FORMATS, 3) else EXHAUSTIVE) for each in FORMATS]
WRITERS = {
    ("zarr", 1): write_legacy,
    ("dtensor_files", 1): write_dtensor_files,
    ("torch_checkpointing", 1): write_torch_checkpointing,
    ("dcp_safetensors", 1): write_dcp_safetensors,
    ("deepspeed", 1): write_deepspeed,
    ("universal", 1): write_universal,
}
NATIVE, HUGGING_FACE = ("safetensors", 1), ("huggingface", 1)
Save, Load, Common, Metadata = (
    StrategyAction.SAVE_SHARDED,
    StrategyAction.LOAD_SHARDED,
    StrategyAction.LOAD_COMMON,
    StrategyAction.LOAD_METADATA,
)

# -- every format


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME_FORMATS, ids=str)
def test_every_registered_format_keeps_its_promises(name: tuple[str, int]) -> None:
    report = check_strategy(*name, save=WRITERS.get(name))
    asked = {action for action, *row in default_strategies if tuple(row) == name}
    assert report.backend == name
    if Load in asked:
        assert {"regular layouts come back", "flat ranges come back", "replicas come back"} <= {*report.kept}
    if name == NATIVE:  # it refuses nothing, and leaves out only what it has no row for
        assert report.refused == ()
        rows = {RECOGNISED: "recognize", PARSED: "parse", RESOLVED: "resolve", LAST_STEP: "publish"}
        assert dict(report.left_out) == {promise: f"no row for {row}" for promise, row in rows.items()}


def test_it_runs_on_files_too(tmp_path: Path) -> None:
    places = iter(range(10**6))
    only = ["regular layouts come back", "a checkpoint is replaced as a whole, and only when asked", DEATHS, RECOGNISED]
    report = check_strategy(*HUGGING_FACE, directory=lambda: tmp_path / str(next(places)), only=only)
    assert {*report.kept} == {*only}
    assert next(places) > 20


# -- faults, each a wrapper around the native format's row

Fault = Callable[..., Any]
DEATHS = "a save that dies leaves no checkpoint, or a whole one"
RECOGNISED = "the format is recognised, and nothing else"
ROWS_FIT = "rows fit their protocols"
PARSED = "parsed metadata serves other ranks"
RESOLVED = "ranks that resolve together load the same"
LAST_STEP = "the last step makes the checkpoint"
TRAITS = "traits are those of a checkpoint's files"


def native(action: StrategyAction) -> Strategy:
    return default_strategies[action, *NATIVE]


def saving(change: Callable[[list[Any]], list[Any]]) -> Fault:
    """Return a SAVE_SHARDED that writes something else than it was given."""

    def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Any]:
        return native(Save)(pending, change(list(shards)))

    return save_sharded


def loading(change: Callable[[ShardedTensor], ShardedTensor | None]) -> Fault:
    """Return a LOAD_SHARDED that reads another box for some shards, or nothing."""

    def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
        chosen = [other for shard in shards if (other := change(shard)) is not None]
        return native(Load)(checkpoint, chosen)

    return load_sharded


def tensors_alone(change: Callable[[ShardedTensor], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda shards: [change(shard) if isinstance(shard, ShardedTensor) else shard for shard in shards]


def swapped(shards: list[Any]) -> list[Any]:
    """Give two chunks of one shape each other's values."""
    for one in range(len(shards) - 1):
        pair = shards[one], shards[one + 1]
        kinds = {(tuple(each.data.shape), each.dtype) for each in pair if isinstance(each, ShardedTensor)}
        if len(kinds) == 1 and all(isinstance(each, ShardedTensor) and each.data.numel() for each in pair):
            shards[one : one + 2] = [replace(pair[n], data=pair[1 - n].data) for n in (0, 1)]
            break
    return shards


def as_bfloat16(shard: ShardedTensor) -> ShardedTensor:
    wide = shard.dtype in (torch.float32, torch.float64)
    return replace(shard, data=shard.data.bfloat16().to(shard.dtype)) if wide else shard


def from_its_beginning(shard: ShardedTensor) -> ShardedTensor:
    """Fill a flat range as if it began where its box does."""
    flat = shard.flattened_range
    return shard if flat is None else replace(shard, flattened_range=slice(0, flat.stop - flat.start))


def from_the_corner(shard: ShardedTensor) -> ShardedTensor:
    return replace(shard, global_offset=(0,) * len(shard.global_offset), axis_fragmentations=None)


def hasty(pending: PendingSave, shards: Any) -> AsyncRequest[Any]:
    """Say that there is a checkpoint before anything is written."""
    request = native(Save)(pending, shards)

    def write() -> Any:
        fields = b'{"sharded_backend": "safetensors", "sharded_backend_version": 1, "common_backend": "safetensors", '
        early = fields + b'"common_backend_version": 1}'
        if pending.world.rank == 0 and pending.before is None:
            pending.storage.write("metadata.json", [memoryview(early)], durable=False)
        written = request.async_fn()
        if pending.world.rank == 0 and pending.before is None:
            pending.storage.remove("metadata.json")
        return written

    return replace(request, async_fn=write)


def eager(pending: PendingSave, shards: Any) -> AsyncRequest[Any]:
    """Write while preparing."""
    request = native(Save)(pending, shards)
    written = request.async_fn()
    return replace(request, async_fn=lambda: written)


def lists_for_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: lists_for_tuples(child) for key, child in value.items()}
    return [lists_for_tuples(child) for child in value] if type(value) in (list, tuple) else value


def grown(checkpoint: Checkpoint) -> dict[str, Any]:
    """Say that each tensor with axes begins one row further down."""
    found = dict(native(Metadata)(checkpoint))
    for key, leaf in found.items():
        if isinstance(leaf, ShardedTensor) and leaf.global_shape:
            offset, shape = (1, *leaf.global_offset[1:]), (leaf.global_shape[0] + 1, *leaf.global_shape[1:])
            found[key] = replace(leaf, global_offset=offset, global_shape=shape, axis_fragmentations=None)
    return found


def forgetful(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    found = native(StrategyAction.LOAD_OBJECTS)(checkpoint, objects)
    return found[:1] * len(found)


def greedy(checkpoint: Checkpoint, key_prefix: str) -> None:
    native(StrategyAction.REMOVE_SHARDED)(checkpoint, key_prefix[:-8])


def mangled(pending: PendingSave, shards: Any) -> AsyncRequest[Any]:
    """Work in the memory of the tensors that are saved."""
    for shard in shards:
        if isinstance(shard, ShardedTensor) and shard.data.is_floating_point() and not shard.data.requires_grad:
            shard.data.mul_(1)
            shard.data.add_(1)
    return native(Save)(pending, shards)


def raw(pending: PendingSave, shards: Any) -> AsyncRequest[Any]:
    if any(isinstance(shard, ShardedTensor) and shard.dtype.is_complex for shard in shards):
        raise TypeError("Got unsupported ScalarType ComplexDouble")
    return native(Save)(pending, shards)


def refusing(pending: PendingSave, shards: Any) -> AsyncRequest[Any]:
    raise UnsupportedValue("this format holds nothing")


def cut_at_64_kib(shard: ShardedTensor) -> ShardedTensor:
    size = shard.dtype.itemsize
    if shard.data.numel() * size <= 65536:
        return shard
    data = shard.data.clone()
    data.view(-1)[65536 // size :] = 0
    return replace(shard, data=data)


def remembering() -> Fault:
    """Return a LOAD_METADATA that reads each folder once."""
    known: dict[str, Any] = {}

    def load_metadata(checkpoint: Checkpoint) -> Any:
        return known.setdefault(checkpoint.storage.where(), native(Metadata)(checkpoint))

    return load_metadata


def beside(shard: ShardedTensor) -> ShardedTensor:
    """Clear what is given before it is filled."""
    if shard.allow_shape_mismatch:
        shard.data.zero_()
    return shard


def without_capitals(shards: list[Any]) -> list[Any]:
    return [shard for shard in shards if shard.key == shard.key.lower()]


def scalars_plus_one(shard: ShardedTensor) -> ShardedTensor:
    return shard if shard.global_shape else replace(shard, data=shard.data + 1)


def on_flat_ranges(shard: ShardedTensor) -> ShardedTensor:
    return shard if shard.flattened_range is None else replace(shard, data=shard.data.flip(0))


def without_lazy_data(shard: ShardedTensor) -> ShardedTensor:
    is_lazy = not isinstance(shard.data, torch.Tensor)
    return replace(shard, data=torch.zeros(shard.local_shape, dtype=shard.dtype)) if is_lazy else shard


def tolerant(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Go on where a file is cut short."""
    with suppress(CheckpointingException):
        return native(Load)(checkpoint, shards)
    return ReadReport()


def without_objects(checkpoint: Checkpoint) -> dict[str, Any]:
    return {key: leaf for key, leaf in native(Metadata)(checkpoint).items() if isinstance(leaf, ShardedTensor)}


def resolve_alone(checkpoint: Checkpoint, keys: Set[str], listed: bool) -> Resolution:
    """Keep the result of one rank, however many there are."""

    def keep(results: Sequence[Any]) -> None:
        (checkpoint.cache.results["resolved"],) = results

    return Resolution(lambda share, shares: {}, keep)


NATIVE_FAULTS: dict[str, tuple[StrategyAction, Fault, str, str]] = {
    # name: the row, its fault, the promise that must be named, what is said of it
    "drops a replica when it saves": (
        Save,
        saving(lambda shards: [shard for shard in shards if is_main_replica(shard.replica_id)]),
        "replicas come back",
        "",
    ),
    "swaps two chunks": (
        Save,
        saving(swapped),
        "several tensors come back, each as itself",
        "'[ab]': 24 of 24 elements",
    ),
    "casts": (
        Save,
        saving(tensors_alone(as_bfloat16)),
        "every dtype comes back bit for bit",
        "float64: tensors differ",
    ),
    "loses a shard without elements": (
        Save,
        saving(lambda shards: [one for one in shards if isinstance(one, ShardedObject) or one.data.numel()]),
        "shards without elements come back",
        "a tensor without elements: raised our KeyMismatch",
    ),
    "ignores a flat range": (Load, loading(from_its_beginning), "flat ranges come back", "'w': .* elements differ"),
    "ignores an offset": (Load, loading(from_the_corner), "regular layouts come back", "loaded as 2 ranks' rows: "),
    "says a wrong offset": (Metadata, grown, "metadata says what was saved", r"at \(1, 0\) in \(5, 6\)"),
    "forgets an object": (
        StrategyAction.LOAD_OBJECTS,
        forgetful,
        "objects come back, each as itself",
        "rank 0 of 1 found",
    ),
    "loses a tuple": (
        Common,
        lambda checkpoint: lists_for_tuples(native(Common)(checkpoint)),
        "the common state comes back as it was",
        r"a tuple: rank 0 found \[1, 2\], expected \(1, 2\)",
    ),
    "counts before it is written": (
        Save,
        hasty,
        DEATHS,
        r"dies at \w+ of .*: the remains count as a checkpoint, but are not whole",
    ),
    "writes while it prepares": (Save, eager, "nothing is written before the request runs", "preparing wrote"),
    "removes too much": (
        StrategyAction.REMOVE_SHARDED,
        greedy,
        "removal takes what has the prefix, and no more",
        "removing 'exp_avg.' leaves",
    ),
    "claims to have verified all": (
        StrategyAction.VERIFY,
        lambda checkpoint: tuple(Checked(name, 1) for name in native(StrategyAction.LIST_FILES)(checkpoint)),
        "verify sees flipped bits, or says that it cannot",
        "does not see byte",
    ),
    "lists a file of others": (
        StrategyAction.LIST_FILES,
        lambda checkpoint: (*native(StrategyAction.LIST_FILES)(checkpoint), "notes.txt"),
        "the checkpoint's files are listed, and no others",
        r"lists \['notes.txt'\]",
    ),
    "expects what does not go wrong": (
        Metadata,
        lambda checkpoint: replace(
            native(Metadata)(checkpoint),
            refused=lambda shards: dict.fromkeys([shard.key for shard in shards], "planted"),
        ),
        "explain says what a load would do",
        "a target that fits: says",
    ),
    "works in the caller's memory": (Save, mangled, "any strides are saved", "the save changed the tensor"),
    "cuts what is long": (
        Save,
        saving(tensors_alone(cut_at_64_kib)),
        "many ranks, axes and elements come back",
        "more than a megabyte",
    ),
    "clears what it does not fill": (
        Load,
        loading(beside),
        "loads write what is asked for, and no more",
        "wrote where nothing is stored",
    ),
    "forgets capitals": (Save, saving(without_capitals), "any key comes back", "'W': raised our"),
    "takes other arguments": (Load, lambda checkpoint: None, "rows fit their protocols", "too many positional"),
    "adds to scalars": (
        Save,
        saving(
            tensors_alone(lambda shard: shard if shard.global_shape else replace(shard, data=carried(shard.data) + 1))
        ),
        "scalars come back",
        "on 1 rank: ",
    ),
    "takes every box for the first": (
        Load,
        loading(from_the_corner),
        "irregular layouts come back",
        "loaded as rows: ",
    ),
    "takes every layer for the first": (Load, loading(from_the_corner), "prepended axes come back", "as 4 layers: "),
    "takes each part for the first": (
        Load,
        loading(from_the_corner),
        "a part is loaded as it is in the whole",
        "a row of a grid: ",
    ),
    "saves no lazy data": (Save, saving(tensors_alone(without_lazy_data)), "lazy tensors are saved", "a view of one: "),
    "lists nothing": (
        Metadata,
        lambda checkpoint: {},
        "what does not fit is an error",
        "another shape: raised KeyMismatch",
    ),
    "turns flat ranges round": (
        Save,
        saving(tensors_alone(on_flat_ranges)),
        "ranks need not know each other's shards",
        "4 ranks' flat ranges: ",
    ),
    "has no common state": (
        Common,
        lambda checkpoint: {},
        "common values keep their places",
        "nothing but values: found",
    ),
    "lists no objects": (Metadata, without_objects, "metadata names every object", "lists objects {}"),
    "goes on where a file is cut": (
        Load,
        tolerant,
        "what is left of a cut file is not loaded as if it were whole",
        "half of .*: ",
    ),
    "writes lists for tuples": (
        StrategyAction.SAVE_COMMON,
        lambda pending, common: native(StrategyAction.SAVE_COMMON)(pending, lists_for_tuples(common)),
        "the common state comes back as it was",
        "a tuple: rank 0 found",
    ),
    "parses to what cannot be sent": (
        StrategyAction.PARSE,
        lambda checkpoint: lambda: 0,
        PARSED,
        "the result cannot be sent to other ranks",
    ),
    "resolves on one rank alone": (
        StrategyAction.RESOLVE,
        resolve_alone,
        RESOLVED,
        "shared by 2: raised a raw ValueError",
    ),
    "describes itself with an unknown word": (
        StrategyAction.DESCRIBE,
        lambda: FormatTraits(cuts_chunks="sometimes"),  # type: ignore[arg-type]
        TRAITS,
        "cuts_chunks is 'sometimes', expected one of",
    ),
}


def of_hugging_face(action: StrategyAction) -> Strategy:
    return default_strategies[action, *HUGGING_FACE]


_FIELDS = {"sharded_backend": "huggingface", "sharded_backend_version": 1}
_FIELDS |= {"common_backend": "huggingface", "common_backend_version": 1}

HUGGING_FACE_FAULTS: dict[str, tuple[StrategyAction, Fault, str, str]] = {
    # a format that has rows that the native one lacks
    "recognises everything": (
        StrategyAction.RECOGNIZE,
        lambda storage: of_hugging_face(StrategyAction.RECOGNIZE)(storage) or _FIELDS,
        RECOGNISED,
        "an empty folder: takes it for",
    ),
    "parses again on each rank": (
        StrategyAction.PARSE,
        lambda checkpoint: of_hugging_face(StrategyAction.PARSE)(checkpoint),
        PARSED,
        r"load_metadata reads \['model.safetensors'\] again",
    ),
    "says that its files lie in a folder of the save": (
        StrategyAction.DESCRIBE,
        lambda: replace(of_hugging_face(StrategyAction.DESCRIBE)(), in_save_folder=True),
        TRAITS,
        r"in_save_folder=True, and \['model.safetensors'\] lie beside",
    ),
    "has no last step": (
        StrategyAction.PUBLISH,
        lambda pending, fields: None,
        LAST_STEP,
        r"before and after it: \[False, False\]",
    ),
}

FAULTS = {name: (NATIVE, *fault) for name, fault in NATIVE_FAULTS.items()}
FAULTS |= {name: (HUGGING_FACE, *fault) for name, fault in HUGGING_FACE_FAULTS.items()}
ELSEWHERE = {
    "what is written can be read",
    "a checkpoint is replaced as a whole, and only when asked",
    "random states come back in random layouts",
}
"""Promises whose planted faults have tests of their own."""


def caught(name: tuple[str, int], action: StrategyAction, fault: Fault, promise: str) -> str:
    """Return what the one promise says of a faulty row."""
    table = default_strategies | {(action, *name): fault}
    with pytest.raises(AssertionError) as failure:
        check_strategy(*name, strategies=table, only=[promise])
    return str(failure.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", usually(list(FAULTS), 5))
def test_it_catches_a_backend_that(name: str) -> None:
    backend, action, fault, promise, said = FAULTS[name]
    text = caught(backend, action, fault, promise)
    assert re.search(rf"^  {re.escape(promise)}: not in \d+ of \d+ case", text, re.MULTILINE), text
    assert re.search(said, text), text
    kept = check_strategy(*backend, only=[promise]).kept
    assert kept == (promise,) or not find_strategy(action, *backend), "the promise is broken without the fault too"


def test_a_raw_error_comes_with_the_lines_of_the_backend_that_raised_it() -> None:
    text = caught(NATIVE, Save, raw, "every dtype comes back bit for bit")
    (traceback,) = set(re.findall(r"raised a raw TypeError: .*\n((?:        .*\n)+)", text))
    file, line = map(str.strip, traceback.splitlines())
    assert re.fullmatch(rf'File "{re.escape(__file__)}", line \d+, in raw', file), text
    assert line.startswith("raise TypeError(")


def test_an_error_of_ours_comes_without_lines() -> None:
    assert "File" not in caught(NATIVE, Save, refusing, "regular layouts come back")


@pytest.mark.slow
def test_all_that_is_broken_is_told_at_once() -> None:
    table = default_strategies | {(Save, *NATIVE): saving(swapped), (Common, *NATIVE): lambda checkpoint: {}}
    with pytest.raises(AssertionError) as failure:
        check_strategy(*NATIVE, strategies=table)
    text = str(failure.value)
    assert re.match(r"\('safetensors', 1\) breaks \d+ of \d+ promises\n", text)
    for promise in ("several tensors come back", "removal takes", "the common state comes back", "common values keep"):
        assert f"\n  {promise}" in text, text
    assert "and 15 more" in text  # common values, of which the first three are told
    assert "random states" not in text


@pytest.mark.slow
def test_what_the_plain_cases_do_not_show_random_ones_find_and_shrink() -> None:
    """A fault that needs three axes, of which the cases have none."""

    def turned(shard: ShardedTensor) -> ShardedTensor:
        if shard.data.ndim != 3 or not shard.data.numel():
            return shard
        return replace(shard, data=carried(shard.data).flip(2).view(shard.dtype))

    table = default_strategies | {(Save, *NATIVE): saving(tensors_alone(turned))}
    only = ["random states come back in random layouts"]
    with pytest.raises(AssertionError, match=only[0]) as failure:
        check_strategy(*NATIVE, strategies=table, examples=100, only=only)
    text = str(failure.value)
    assert re.search(r"GlobalState\(tensors=\{'\S+': '\S+ \(1, 1, \d\)'\}, objects=\{\}, common=\{\}\)", text), text
    assert text.count("Piece(") == 2, text  # one to save, one to load


def test_it_catches_a_backend_that_can_only_write() -> None:
    promise = "what is written can be read"
    table = {row: default_strategies[row] for row in default_strategies if row != (Metadata, *NATIVE)}
    with pytest.raises(AssertionError, match="load_sharded: there is no row for load_metadata"):
        check_strategy(*NATIVE, strategies=table, only=[promise])


def test_it_catches_a_backend_that_remembers_what_it_read_before(tmp_path: Path) -> None:
    promise, places = "a checkpoint is replaced as a whole, and only when asked", iter(range(10**6))
    table = default_strategies | {(Metadata, *NATIVE): remembering()}
    with pytest.raises(AssertionError, match="other tensors in their place: "):
        check_strategy(*NATIVE, strategies=table, only=[promise], directory=lambda: tmp_path / str(next(places)))


def test_deaths_on_purpose_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert check_strategy(*NATIVE, only=[DEATHS]).kept == (DEATHS,)
    assert caplog.records == []


# -- other tables, other names


def test_an_unknown_promise_is_an_error() -> None:
    with pytest.raises(StrategyError, match=r"unknown promises in only=\n  'scalars'\n[\s\S]*scalars come back"):
        check_strategy(*NATIVE, only=["scalars"])


def test_a_name_without_rows_is_an_error() -> None:
    with pytest.raises(StrategyError, match=r"no rows for \('punch cards', 1\)"):
        check_strategy("punch cards", 1)


def test_a_format_that_is_only_read_is_asked_nothing_without_a_writer() -> None:
    report = check_strategy("zarr", 1)
    assert report.kept == ("rows fit their protocols", "what is written can be read")
    assert report.left_out["regular layouts come back"] == "no row for saving; pass save="
    assert report.left_out["any strides are saved"] == "no row for saving"
    assert report.left_out["removal takes what has the prefix, and no more"] == "no row for remove_sharded"


def test_a_writer_that_writes_something_else_is_caught() -> None:
    def flipped(trees: Any, place: Any) -> None:
        write_legacy(
            map_shards(
                lambda leaf: replace(leaf, data=leaf.data.flip(-1)) if isinstance(leaf, ShardedTensor) else leaf, trees
            ),
            place,
        )

    with pytest.raises(AssertionError, match="regular layouts come back"):
        check_strategy("zarr", 1, save=flipped, only=["regular layouts come back"])


@pytest.mark.slow
def test_the_report_reads_itself() -> None:
    only = ["scalars come back", "every dtype comes back bit for bit", "objects come back, each as itself"]
    text = str(check_strategy(*HUGGING_FACE, only=only))
    assert text.startswith("('huggingface', 1) keeps ")
    assert "refused: every dtype comes back bit for bit: bits16, " in text
    assert "left out: objects come back, each as itself: it is refused: " in text
    assert isinstance(StrategyReport(("x", 1), ()).left_out, dict)


@pytest.mark.slow
def test_the_same_cases_run_each_time() -> None:
    seen: list[list[tuple[Any, ...]]] = []

    def noted(pending: PendingSave, shards: Any) -> AsyncRequest[Any]:
        seen[-1] += [(shard.key, shard.replica_id) for shard in shards if pending.world.rank == 0]
        return native(Save)(pending, shards)

    for _ in range(2):
        seen.append([])
        table = default_strategies | {(Save, *NATIVE): noted}
        check_strategy(
            *NATIVE, strategies=table, only=["flat ranges come back", "random states come back in random layouts"]
        )
    assert seen[0] == seen[1] and len(seen[0]) > 10


# -- actions: ours all have promises, and those of others bring theirs


def test_each_action_has_promises_and_each_promise_is_an_actions() -> None:
    assert {*OF_ACTIONS} == {*StrategyAction}
    names = [promise.name for promise in (*PROMISES, *RANDOM)]
    of_all_rows = {promise.name for promise in _row_cases.PROMISES}
    assert all(OF_ACTIONS.values()) and len(names) == len({*names})
    assert {name for own in OF_ACTIONS.values() for name in own} == {*names} - of_all_rows


def test_each_promise_has_a_planted_fault_and_each_action_a_faulty_row() -> None:
    names = {promise.name for promise in (*PROMISES, *RANDOM)}
    assert names - {promise for _, _, _, promise, _ in FAULTS.values()} == {*ELSEWHERE}
    for action, own in OF_ACTIONS.items():
        caught_by = {promise for _, faulty, _, promise, _ in FAULTS.values() if faulty is action}
        assert caught_by & {*own}, action


class Added(Enum):
    """Actions that this test adds."""

    COUNT = "count_tensors"
    OTHER = "another"


class CountTensors(Protocol):
    def __call__(self, checkpoint: Checkpoint, /) -> int: ...


def count_tensors(checkpoint: Checkpoint) -> int:
    return len(native(Metadata)(checkpoint))


def check_count(count: CountTensors, save: Callable[..., Checkpoint]) -> None:
    tree = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    halves = [{"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, 2))} for rank in (0, 1)]
    assert [count(save({"step": 3})), count(save(tree)), count(save(*halves))] == [0, 1, 1], "counts wrong"


def added(function: Fault, action: Enum = Added.COUNT) -> dict[Any, Fault]:
    return {(action, *NATIVE): function}


def test_an_added_action_keeps_the_promise_that_comes_with_it() -> None:
    table, only = default_strategies | added(count_tensors), [ROWS_FIT, "count_tensors keeps its promise"]
    options: dict[str, Any] = {"promises": {Added.COUNT: check_count}, "protocols": {Added.COUNT: CountTensors}}
    assert check_strategy(*NATIVE, strategies=table, only=only, **options).kept == (*only,)
    assert check_strategy(*HUGGING_FACE, strategies=table, only=only, **options).left_out == {
        "count_tensors keeps its promise": "no row for count_tensors"
    }
    wrong = default_strategies | added(lambda checkpoint: 1)
    with pytest.raises(AssertionError, match=r"count_tensors keeps its promise: not in 1 of 1 case\n.*counts wrong"):
        check_strategy(*NATIVE, strategies=wrong, only=only, **options)
    with pytest.raises(
        AssertionError, match=r"rows fit their protocols[\s\S]*count_tensors: called with \(checkpoint\)"
    ):
        check_strategy(*NATIVE, strategies=default_strategies | added(lambda: 1), only=only, **options)


def test_an_action_without_a_promise_is_an_error_that_says_what_it_needs() -> None:
    table = default_strategies | added(count_tensors) | added(count_tensors, Added.OTHER)
    with pytest.raises(StrategyError) as failure:
        check_strategy(*NATIVE, strategies=table, promises={Added.COUNT: check_count})
    text = str(failure.value)
    assert "('safetensors', 1) has functions for actions without a check\n  Added.OTHER\n" in text
    assert "promises={action: check}" in text and "protocols={action: protocol}" in text
    assert check_strategy(*HUGGING_FACE, strategies=table, only=[ROWS_FIT]).kept == (ROWS_FIT,)


def test_what_an_added_check_saves_may_be_refused() -> None:
    def check_objects(count: Any, save: Callable[..., Checkpoint]) -> None:
        save({"step": 3, "rng": ShardedObject("rng", 1, (1,), (0,))})

    table = default_strategies | {(Added.COUNT, *HUGGING_FACE): count_tensors}
    report = check_strategy(
        *HUGGING_FACE, strategies=table, promises={Added.COUNT: check_objects}, only=["count_tensors keeps its promise"]
    )
    assert report.kept == () and "it is refused: " in report.left_out["count_tensors keeps its promise"]
