"""Cases about files: interrupted saves, overwriting, listing, recognition, damage and truncation."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import PurePosixPath

from ...errors import AlreadyACheckpoint, CheckpointingException
from ...inspection import load_common_state_dict, load_sharded_metadata, open_checkpoint, verify
from ...shell.checkpoint import is_checkpoint
from ...shell.storage import LocalStorage, Storage, can, files_in, make_folder, storage_at
from ...shell.table import (
    METADATA_FILE,
    OWNER_FILE,
    Recognize,
    StrategyAction,
    VerifyReport,
    find_strategy,
    is_save_folder,
)
from ...stores import MemoryStorage
from .._layouts import even_layout
from .._states import GlobalState
from .._watched import Call, watched
from ._layout_cases import COLUMNS, LOADS, ROWS, SHAPE, WHOLE, numbers
from ._subject import Case, Layouts, Promise, Refused, Subject, Trees, check_there, save_trees, trees_of


class ProcessDied(Exception):
    """Raised by each call of a storage after the simulated death of its process."""


def file_names(storage: Storage, folder: str = "") -> set[str]:
    """Return the names of all files in a storage, including those in subfolders.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> _ = storage.write("a/b", [memoryview(b"c")], durable=False)
        >>> file_names(storage)
        {'a/b'}
    """
    return set(files_in(storage, folder))


def is_not_owner_note(name: str) -> bool:
    """Return whether a file is anything but ``owner.json``, the note that identifies the process of a save."""
    return PurePosixPath(name).name != OWNER_FILE


def write(storage: Storage, name: str, data: bytes) -> None:
    """Write a file, replacing any existing one."""
    folder = PurePosixPath(name).parent.as_posix()
    if storage.length(name) is not None:
        storage.remove(name)
    elif folder != ".":
        make_folder(storage, folder, durable=False)
    storage.write(name, [memoryview(data)], durable=False)


def failing_storage(storage: Storage, number: int) -> Storage:
    """Return a storage whose calls fail from the call with a given number on."""

    # All later calls fail too, since a killed process can't clean up as it could after a single exception.
    def fail(call: Call) -> None:
        if call.number >= number:
            raise ProcessDied(f"at {call.method} of {call.name!r}")

    failing: Storage = watched(storage, before=fail)
    return failing


@contextmanager
def silenced_log() -> Iterator[None]:
    """Silence the log: a save that is interrupted on purpose warns about files that it can't remove."""
    logger, silence = logging.getLogger("shardtree"), logging.Filter("nothing")
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)


def calls_of(storage: Storage) -> tuple[Storage, list[Call]]:
    """Return a storage that records its calls, and the list to which it appends them."""
    calls: list[Call] = []
    return watched(storage, before=calls.append), calls


# The cases.

_FOREIGN = {
    "notes.txt": b"nothing",
    "empty": b"",
    "config.json": b'{"a": 1}',
    "deep/data.bin": bytes(64),
}
_MOST_DEATHS = 16
_LAYOUT = {"w": ROWS, "b": ROWS}
_ON_ONE = {"w": WHOLE, "b": WHOLE}  # one rank, since the order of several ranks' calls differs each time


def _states(first: int = 0) -> tuple[GlobalState, GlobalState]:
    """Return a state of tensors that count up from ``first + 1``, and the same state with common values.

    A format may refuse the common values.
    """
    tensors = {"w": numbers(SHAPE, first), "b": numbers(SHAPE, first + 30)}
    return GlobalState(tensors, {}, {}), GlobalState(tensors, {}, {"step": first, "betas": (0.9, 0.95)})


def _save_state(
    subject: Subject, first: int = 0, place: Storage | None = None, layout: Layouts = _LAYOUT, **options: bool
) -> Storage:
    """Save tensors that count up from ``first + 1``, and return the storage.

    Common values are saved too if the format supports them.

    Args:
        subject: The backend under test.
        first: Number that tells the saved states apart.
        place: Storage for the checkpoint; None for a new one.
        layout: Layout of each tensor, by key.
        options: Options of the save.
    """
    plain, rich = (trees_of(state, layout) for state in _states(first))
    with_common = subject.has(StrategyAction.LOAD_COMMON) and _supports_common(subject, rich)
    return save_trees(subject, rich if with_common else plain, place, **options)


def _supports_common(subject: Subject, trees: Trees) -> bool:
    if subject.holds_common is None:
        subject.holds_common = False
        with suppress(Refused):
            save_trees(subject, trees)
            subject.holds_common = True
    return subject.holds_common


def _check_is(subject: Subject, place: Storage, first: int = 0) -> None:
    """Raise unless the checkpoint in a storage has the state that `_save_state` saves for the same number `first`."""
    rich = "common" in load_common_state_dict(place, strategies=subject.strategies)
    check_there(subject, _states(first)[rich], {"w": COLUMNS, "b": COLUMNS}, place)


def commits(subject: Subject) -> Iterator[Case]:
    """Yield cases of saves that die at a call of the storage: the remains must be no checkpoint, or a whole one."""
    storage, calls = calls_of(storage_at(subject.directory()))
    _save_state(subject, 0, storage, _ON_ONE)
    # The calls are a sample, since a save can make hundreds, and each death needs a save of its own. Included are all
    # calls right after a file was replaced or renamed, since one of these operations commits.
    after = {call.number + 1 for call in calls if call.method in ("replace", "replace_if", "move")}
    for number in sorted({*range(0, len(calls), -(-len(calls) // _MOST_DEATHS)), *after} & {*range(len(calls))}):
        call = calls[number]
        yield Case(f"dies at {call.method} of {_last(call.name)!r}", partial(_check_death, subject, number))


def _check_death(subject: Subject, number: int) -> None:
    place = storage_at(subject.directory())
    # A save may survive failed calls, such as those of a clean-up; only the folder's content counts.
    with silenced_log(), suppress(ProcessDied, Refused, CheckpointingException):
        _save_state(subject, 0, failing_storage(place, number), _ON_ONE)
    if is_checkpoint(place, strategies=subject.strategies):
        try:
            _check_is(subject, place)
        except (AssertionError, CheckpointingException) as error:
            raise AssertionError(f"the remains count as a checkpoint, but are not whole: {error}") from error


def overwrites(subject: Subject) -> Iterator[Case]:
    """Yield cases of saves over a checkpoint.

    These saves must be refused unless requested, be complete, and leave no old files.
    """
    yield Case("a second save", partial(_check_second, subject))
    if can(storage_at(subject.directory())).sibling is not None:
        yield Case("overwrite=True", partial(_check_overwrite, subject))
        yield Case("other tensors in their place", partial(_check_others, subject))


def _check_second(subject: Subject) -> None:
    place = _save_state(subject)
    try:
        _save_state(subject, 100, place)
    except AlreadyACheckpoint:
        return _check_is(subject, place)
    raise AssertionError("it replaced the checkpoint without being asked to")


def _check_overwrite(subject: Subject) -> None:
    place, fresh = _save_state(subject), _save_state(subject, 100)
    write(place, "notes.txt", b"mine")
    _save_state(subject, 100, place, overwrite=True)
    _check_is(subject, place, 100)
    is_there = place.length("notes.txt") is not None and place.read("notes.txt") == b"mine"
    assert is_there, "a file that is not the checkpoint's is gone"
    # Numbers of files are compared, since names can contain the save's id, which differs.
    left, expected = file_names(place) - {"notes.txt"}, file_names(fresh)
    assert len(left) == len(expected), f"files after the overwrite: {sorted(left)}, of a new save: {sorted(expected)}"


def _check_others(subject: Subject) -> None:
    """Raise unless overwriting a checkpoint with different tensors leaves no trace of the old tensors."""
    # The old tensors are loaded first, so that a backend that caches metadata by path fails here.
    place: Storage | None = None
    for shapes in ({"w": SHAPE, "b": (2,)}, {"w": (2, 3), "v": (3, 2)}):
        state = GlobalState({key: numbers(shape) for key, shape in shapes.items()}, {}, {})
        layout = {key: even_layout(shape, 1) for key, shape in shapes.items()}
        place = save_trees(subject, trees_of(state, layout), place, **{} if place is None else {"overwrite": True})
        check_there(subject, state, layout, place)
        if subject.has(StrategyAction.LOAD_METADATA):
            metadata = load_sharded_metadata(place, strategies=subject.strategies)
            listing = {key: getattr(leaf, "global_shape", None) for key, leaf in metadata.items()}
            assert listing == shapes, f"metadata says {listing}, stored are {shapes}"


def listings(subject: Subject) -> Iterator[Case]:
    """Yield cases of folders in which the backend must list the checkpoint's own files, and no others."""
    yield Case("a checkpoint alone", partial(_check_listing, subject, ()))
    yield Case("a checkpoint beside other files", partial(_check_listing, subject, tuple(_FOREIGN)))


def _check_listing(subject: Subject, others: tuple[str, ...]) -> None:
    place = _save_state(subject)
    own_files = file_names(place) - {METADATA_FILE}
    for name in others:
        write(place, name, _FOREIGN[name])
    checkpoint = open_checkpoint(place, strategies=subject.strategies).checkpoint
    fields = checkpoint.fields
    backends = {(fields[f"{kind}_backend"], fields[f"{kind}_backend_version"]) for kind in ("sharded", "common")}
    rows = [find_strategy(StrategyAction.LIST_FILES, *name, strategies=subject.strategies) for name in backends]
    names = {name for row in rows if row is not None for name in row(checkpoint)}
    assert not names & {*others}, f"lists {sorted(names & {*others})}, which is not the checkpoint's"
    missing = own_files - names
    assert not missing, f"does not list {sorted(missing)}"


def recognitions(subject: Subject) -> Iterator[Case]:
    """Yield cases: a folder that the backend must recognise, and folders that it must not take for its own."""
    recognize = subject.row(StrategyAction.RECOGNIZE)
    assert recognize is not None
    yield Case("an empty folder", partial(_check_not_recognized, recognize, {}))
    for name, data in _FOREIGN.items():
        yield Case(f"a folder with {name}", partial(_check_not_recognized, recognize, {name: data}))
    yield Case("a single file of text", partial(_check_single, subject, recognize))
    yield Case("a checkpoint", partial(_check_recognized, subject, recognize))


def _check_not_recognized(recognize: Recognize, files: dict[str, bytes]) -> None:
    # The files are in memory, whatever storage is tested, since recognition must go by content, not by paths.
    storage = MemoryStorage()
    for name, data in files.items():
        write(storage, name, data)
    fields = recognize(storage)
    assert fields is None, f"takes it for {dict(fields or {})}"


def _check_single(subject: Subject, recognize: Recognize) -> None:
    storage = storage_at(subject.directory())
    if isinstance(storage, LocalStorage):
        make_folder(storage)
        write(storage, "notes.txt", b"nothing")
        fields = recognize(storage_at(f"{storage.root}/notes.txt"))
        assert fields is None, f"takes it for {dict(fields or {})}"


def _check_recognized(subject: Subject, recognize: Recognize) -> None:
    place = _save_state(subject)
    if place.length(METADATA_FILE) is not None:
        return  # metadata.json names the format, so that recognition isn't needed
    fields = recognize(place)
    name = None if fields is None else (fields.get("sharded_backend"), fields.get("sharded_backend_version"))
    assert name == (subject.backend, subject.version), f"takes its own checkpoint for {name}"


def damages(subject: Subject) -> Iterator[Case]:
    """Yield cases for `verify`: an undamaged checkpoint, and for each of its files one with a flipped bit."""
    yield Case("as it was saved", partial(_check_undamaged, subject))
    for number, file in enumerate(sorted(file_names(_save_state(subject)))):
        yield Case(f"a flipped bit in {_last(file)!r}", partial(_check_flipped, subject, number))


def _check_undamaged(subject: Subject) -> None:
    findings = verify(_save_state(subject), strategies=subject.strategies, report=lambda _: None)
    assert findings == (), f"finds {[str(damage) for damage in findings]}"


def _check_flipped(subject: Subject, number: int) -> None:
    """Raise unless `verify` finds a flipped bit, or reports its byte as unchecked.

    Args:
        subject: The backend.
        number: Index of the damaged file among the checkpoint's files, which are sorted by name.
    """
    place = _save_state(subject)
    file = sorted(file_names(place))[number]
    data = place.read(file)
    for at in sorted({len(data) // 3, len(data) // 2, len(data) - 1}) if data else []:
        write(place, file, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        reports: list[VerifyReport] = []
        try:
            damage = verify(place, strategies=subject.strategies, report=reports.append)
        except CheckpointingException:
            continue  # an error of ours reports it too
        unsure = any(part.covers(file, at) for report in reports for part in report.unchecked)
        assert damage or unsure, f"does not see byte {at} of {len(data)}, and does not report it as unchecked"


def truncations(subject: Subject) -> Iterator[Case]:
    """Yield cases with a file of a checkpoint cut short, or missing: a load must fail, or give the whole state."""
    for number, file in enumerate(sorted(file_names(_save_state(subject)))):
        for name, keep in (("half of", 0.5), ("no", None)):
            yield Case(f"{name} {_last(file)!r}", partial(_check_truncated, subject, number, keep))


def _check_truncated(subject: Subject, number: int, keep: float | None) -> None:
    place = _save_state(subject)
    file = sorted(file_names(place))[number]
    data = place.read(file)
    place.remove(file)
    if keep is not None:
        write(place, file, data[: int(len(data) * keep)])
    try:
        _check_is(subject, place)
    except CheckpointingException:
        return


def _last(file: str) -> str:
    """Return the last component of a path, for the names of cases.

    For the path of a save's folder, whose name changes with each save, the result is a fixed text.
    """
    last = PurePosixPath(file).name
    return "the save's folder" if is_save_folder(last) else last


_NO_ROW: frozenset[StrategyAction] = frozenset()
_LISTED = frozenset({StrategyAction.LIST_FILES})

PROMISES = (
    Promise("a save that dies leaves no checkpoint, or a whole one", _NO_ROW, commits, saves=True),
    Promise("a checkpoint is replaced as a whole, and only when asked", _LISTED, overwrites, saves=True),
    Promise("the checkpoint's files are listed, and no others", _LISTED, listings),
    Promise("the format is recognised, and nothing else", LOADS | {StrategyAction.RECOGNIZE}, recognitions),
    Promise("verify sees flipped bits, or says that it cannot", frozenset({StrategyAction.VERIFY}), damages),
    Promise("what is left of a cut file is not loaded as if it were whole", _NO_ROW, truncations),
)
