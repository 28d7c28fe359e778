"""Cases about the actions PARSE, RESOLVE, DESCRIBE and PUBLISH, the smaller steps of loads and saves."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, get_args, get_type_hints

import torch

from ...core.mapping import ShardedTensor
from ...inspection import open_checkpoint
from ...shell.checkpoint import is_checkpoint
from ...shell.storage import Storage, storage_at
from ...shell.table import (
    METADATA_FILE,
    Checkpoint,
    FormatTraits,
    ReadCache,
    Resolution,
    StrategyAction,
    is_deciding,
    is_save_folder,
)
from .._bits import check_same
from .._layouts import even_layout
from .._states import GlobalState
from .._watched import Call, watched
from ._files import file_names
from ._layout_cases import LOADS, SHAPE, numbers
from ._subject import Case, Promise, Subject, save_trees, trees_of

# A weight, and its master under Megatron-Core's key, since some formats compare the two.
_TENSORS = {"w": numbers(SHAPE).bfloat16(), "optimizer.state.param.w": numbers(SHAPE), "b": numbers((5,), 50)}


def _save_state(subject: Subject, place: Storage | None = None) -> Storage:
    layout = {key: even_layout(tuple(whole.shape), 1) for key, whole in _TENSORS.items()}
    return save_trees(subject, trees_of(GlobalState(_TENSORS, {}, {}), layout), place)


def _without_writer(subject: Subject) -> Subject:
    """Return the subject with None as `save`, if the dispatch table has a row for saving the backend's shards."""
    # The caller's writer doesn't call a row that a test replaces, and may write the files of a second format too.
    return replace(subject, save=None) if subject.has(StrategyAction.SAVE_SHARDED) else subject


def _open(subject: Subject, place: Storage, results: Mapping[Any, Any] | None = None) -> Checkpoint:
    """Open a checkpoint whose read cache contains only `results`, a mapping from functions to their results."""
    checkpoint = open_checkpoint(place, strategies=subject.strategies).checkpoint
    return replace(checkpoint, cache=ReadCache(results))


def _call(subject: Subject, action: StrategyAction, *arguments: Any) -> Any:
    function = subject.row(action)
    assert function is not None, f"there is no row for {action.value}"
    return function(*arguments)


def _received(value: Any, name: str) -> Any:
    """Return the copy of a value that other ranks receive.

    Raises:
        AssertionError: The value can't be sent.
    """
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise AssertionError(f"{name} cannot be sent to other ranks: {type(error).__name__}: {error}") from error


def _check_loads(subject: Subject, checkpoint: Checkpoint) -> None:
    """Raise unless the backend's function for LOAD_SHARDED loads all tensors, whole, from an open checkpoint."""
    memories = {key: torch.zeros_like(whole) for key, whole in _TENSORS.items()}
    shards = [ShardedTensor.from_rank_offsets(key, memory) for key, memory in memories.items()]
    _call(subject, StrategyAction.LOAD_SHARDED, checkpoint, shards)
    check_same("tensors differ", memories, _TENSORS)


# PARSE: rank 0 parses the metadata for all ranks, and other rows use the result.


def parsing(subject: Subject) -> Iterator[Case]:
    """Yield loads on a rank that received the parsed metadata from another rank, and must not parse it again."""
    yield Case("a rank that receives it loads the same", partial(_check_received, subject))
    if subject.has(StrategyAction.LOAD_METADATA):
        yield Case("a rank that receives it does not parse again", partial(_check_read_once, subject))


def _open_received(subject: Subject, place: Storage, source: Storage) -> Checkpoint:
    parse = subject.row(StrategyAction.PARSE)
    parsed = _call(subject, StrategyAction.PARSE, _open(subject, source))
    return _open(subject, place, {parse: _received(parsed, "the result")})


def _check_received(subject: Subject) -> None:
    place = _save_state(subject)
    _check_loads(subject, _open_received(subject, place, place))


def _check_read_once(subject: Subject) -> None:
    place, read_by_row = _save_state(subject), set[str]()
    checkpoint = _open_received(subject, watched(place, before=partial(_note, read_by_row)), place)
    read_by_row.clear()  # opening has read metadata.json and looked for files that decide on the format
    _call(subject, StrategyAction.LOAD_METADATA, checkpoint)
    names = sorted(PurePosixPath(name).name for name in read_by_row)
    assert not names, f"load_metadata reads {names} again; use checkpoint.once(parse)"


def _note(names: set[str], call: Call) -> None:
    if call.method in ("read", "open"):
        names.add(call.name)


# RESOLVE: ranks share the work, and each keeps all results.


def resolving(subject: Subject) -> Iterator[Case]:
    """Yield cases in which 1, 2 or 3 ranks share a search (RESOLVE) for facts that the metadata lacks.

    Afterwards, each rank must load all tensors.
    """
    for ranks in (1, 2, 3):
        yield Case(f"shared by {ranks}", partial(_check_resolved, subject, ranks))


def _check_resolved(subject: Subject, ranks: int) -> None:
    place = _save_state(subject)
    for listed in (False, True):
        checkpoints = [_open(subject, place) for _ in range(ranks)]
        arguments = frozenset(_TENSORS), listed
        resolutions = [_call(subject, StrategyAction.RESOLVE, checkpoint, *arguments) for checkpoint in checkpoints]
        kinds = sorted({type(resolution).__name__ for resolution in resolutions})
        assert len(kinds) == 1, f"ranks that need the same keys get {' and '.join(kinds)}"
        if resolutions[0] is not None:
            assert isinstance(resolutions[0], Resolution), f"returned a {kinds[0]}, expected a Resolution or None"
            results = [
                _received(resolution.find(rank, ranks), "a result of find")
                for rank, resolution in enumerate(resolutions)
            ]
            for resolution in resolutions:
                resolution.keep(results)
        for checkpoint in checkpoints:
            _check_loads(subject, checkpoint)


# DESCRIBE: traits promise which files a checkpoint has, and how they may be read.


def describing(subject: Subject) -> Iterator[Case]:
    """Yield a case that checks the format's traits, and one that compares a checkpoint's files with them."""
    yield Case("the traits", partial(_check_traits, subject))
    yield Case("a checkpoint's files", partial(_check_files, subject))


def _check_traits(subject: Subject) -> None:
    traits = _call(subject, StrategyAction.DESCRIBE)
    assert isinstance(traits, FormatTraits), f"returned a {type(traits).__name__}, expected FormatTraits"
    choices = get_args(get_type_hints(FormatTraits)["cuts_chunks"])
    assert traits.cuts_chunks in choices, f"cuts_chunks is {traits.cuts_chunks!r}, expected one of {choices}"
    again = _call(subject, StrategyAction.DESCRIBE)
    assert traits == again, f"says {traits}, and then {again}"


def _check_files(subject: Subject) -> None:
    traits = _call(subject, StrategyAction.DESCRIBE)
    place = _save_state(_without_writer(subject))
    names = file_names(place)
    deciding = [name for name in names if is_deciding(name, traits.decided_by)]
    known = deciding or METADATA_FILE in names
    assert known, f"decided_by={traits.decided_by!r} matches none of {sorted(map(_last, names))}"
    for name in deciding:
        assert traits.is_whole(place, name), f"is_whole says that {_last(name)!r} is a part of a file"
    beside = [name for name in names - {METADATA_FILE} if not is_save_folder(PurePosixPath(name).parts[0])]
    assert not (traits.in_save_folder and beside), f"in_save_folder=True, and {sorted(beside)} lie beside the folder"


def _last(name: str) -> str:
    return PurePosixPath(name).name


# PUBLISH: the last step of a save in a format whose checkpoints have no metadata.json.


def last_steps(subject: Subject) -> Iterator[Case]:
    """Yield a save whose folder must be a checkpoint after the last step (PUBLISH), and not before."""
    yield Case("nothing before it, all after it", partial(_check_last_step, subject))


def _check_last_step(subject: Subject) -> None:
    place, seen = storage_at(subject.directory()), list[bool]()

    def commit(*arguments: Any) -> None:
        seen.append(is_checkpoint(place, strategies=subject.strategies))
        _call(subject, StrategyAction.PUBLISH, *arguments)
        seen.append(is_checkpoint(place, strategies=subject.strategies))

    _save_state(_without_writer(subject.with_row(StrategyAction.PUBLISH, commit)), place)
    assert seen == [False, True], f"is a checkpoint before and after it: {seen}, expected {[False, True]}"
    _check_loads(subject, _open(subject, place))


PROMISES = (
    Promise("parsed metadata serves other ranks", LOADS | {StrategyAction.PARSE}, parsing),
    Promise("ranks that resolve together load the same", LOADS | {StrategyAction.RESOLVE}, resolving),
    Promise("traits are those of a checkpoint's files", frozenset({StrategyAction.DESCRIBE}), describing),
    Promise("the last step makes the checkpoint", LOADS | {StrategyAction.PUBLISH}, last_steps, saves=True),
)
