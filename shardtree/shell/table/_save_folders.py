"""The folder of a single save: its name, its files' names, its owner, and its removal."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from ...errors import CheckpointingException, StorageError, error_text
from ..storage import (
    Claim,
    Storage,
    abort_open_uploads,
    can,
    claim,
    is_alive,
    is_claimed,
    listed,
    locked,
    made_here,
    make_folder,
    maker_is_dead,
    owner_note,
    process_token,
    read_if_there,
    release,
    remove_folder,
    settle,
)
from ._metadata import decode_metadata, metadata_bytes
from ._traits import METADATA_FILE

logger = logging.getLogger("shardtree")

OWNER_FILE = "owner.json"
"""Name of the note in a save's folder that identifies the saving process. Only other saves read it; the clean-up after
the commit removes it."""

_SAVE_FOLDER = re.compile(r"save-\d{8}T\d{6}-[0-9a-f]{16}")
FORMAT_FILE = re.compile(r"\d{5,}-of-\d{5,}(-\d+)?\.[a-z0-9]+|own-[a-z0-9][a-z0-9._-]*")
"""Names of any format's files: a rank's data file, as from `rank_file`, or another file, as from `save_file`."""

_OUR_FILE = re.compile(
    r"(common|index-\d+|model-\d{5,}-of-\d{5,})\.safetensors"
    rf"|{FORMAT_FILE.pattern}"
    r"|owner\.json|\.owner\.json\.[0-9a-f]{16}\.new"
)

_INDEX_FILE = re.compile(r"index-\d+\.safetensors|own-index\.[a-z0-9]+")

_FIXED_NAME = re.compile(
    r"(model|model-\d{5,}-of-\d{5,})\.safetensors|__\d+_\d+\.distcp|common\.pt|\.metadata"
    r"|.*/(c[./])?\d+([./]\d+)*"  # chunks of zarr arrays
)
"""Names of files outside a save's folder that may be large enough to be uploaded in parts."""

_NO_UPLOAD_TAKES = 6 * 3600.0  # seconds; an upload of a single file is assumed to be shorter


@contextmanager
def abandoning(place: str) -> Iterator[None]:
    """Log errors of the block, which removes the files of a failed save, instead of raising them.

    These errors must not hide the save's own error. A later save removes or overwrites the remaining files.
    """
    try:
        yield
    except Exception as error:
        logger.warning("save: files of a failed save stay in %s: %s", place, error)


def is_save_folder(name: str) -> bool:
    """Return whether a folder's name is that of a save's folder.

    Examples:
        >>> is_save_folder("save-20260102T030405-0123456789abcdef"), is_save_folder("save-mine")
        (True, False)
    """
    return _SAVE_FOLDER.fullmatch(name) is not None


def new_save_id() -> str:
    """Return the name of a new save and of its folder.

    Examples:
        >>> is_save_folder(new_save_id())
        True
    """
    # The clean-up removes only folders with names of this form; random digits keep saves of the same second apart.
    return f"save-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{process_token()}"


def is_save_file(name: str) -> bool:
    """Return whether a path in a checkpoint has the form ``<save folder>/<file name>`` of files that saves write.

    Examples:
        >>> folder = "save-20260102T030405-0123456789abcdef"
        >>> is_save_file(f"{folder}/index-0.safetensors"), is_save_file("notes.txt")
        (True, False)
    """
    folder, _, last = name.rpartition("/")
    return is_save_folder(folder) and _OUR_FILE.fullmatch(last) is not None


def make_save_folder(storage: Storage, folder: str, *, durable: bool, alone: bool = False) -> Claim:
    """Make a save's folder with a note of its owner, and return the claim that marks the save as alive.

    Args:
        storage: Storage of the checkpoint's folder.
        folder: Name of the save's folder in it.
        durable: Whether to return only after the folder is on the medium.
        alone: Whether to refuse if another save is in progress, because files of both would have the same names.

    Raises:
        StorageError: the folder or the note can't be made, or another save is in progress.
    """
    # The claim precedes the folder, so that other saves never see the folder of a save that seems dead.
    own_claim = claim(folder)
    with ExitStack() as lock:
        try:
            make_folder(storage, folder, durable=durable)
            # With a lock, the second of two saves sees the first one's note; the lock is held until a refused save has
            # removed its note. Without a lock, both may see each other's note: then the first by name waits.
            if alone:
                lock.enter_context(locked(storage))
            _leave_note(storage, folder)
            if alone:
                check_alone(storage, folder, pauses=_PAUSES if can(storage).locked is None else ())
        except BaseException:
            release(folder)
            with suppress(CheckpointingException):  # the first error's cause may make this fail too
                disown(storage, folder)
            raise
    return own_claim


_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)  # seconds, for a refused save to remove its note by two requests


def check_alone(storage: Storage, folder: str, *, pauses: Sequence[float] = ()) -> None:
    """Raise if another save is in progress in a checkpoint's folder.

    Args:
        storage: Storage of the checkpoint's folder.
        folder: Name of this save's folder in it.
        pauses: Seconds to wait before each further check of the other saves. If two saves see each other, the one whose
            name sorts later gives up. So the check is repeated only while this save's name sorts before all others.

    Raises:
        StorageError: a process of this machine is running another save.
    """
    others = _others_alive(storage, folder)
    for pause in pauses:
        if not others or min(others) < folder:
            break
        time.sleep(pause)
        others = _others_alive(storage, folder)
    if others:
        fix = "Wait until that save ends, call abandon() on its AsyncRequest, or save to another folder."
        raise StorageError(error_text(f"save: another save to {storage.where()!r} is in progress", fix=fix))


def _others_alive(storage: Storage, folder: str) -> list[str]:
    names = [name for name in storage.names() if is_save_folder(name) and name != folder]
    return [name for name in names if save_is_alive(storage, name)]


def _leave_note(storage: Storage, folder: str) -> None:
    name, note = f"{folder}/{OWNER_FILE}", owner_note(folder)
    if (mark := can(storage).mark) is None:
        storage.replace(name, note, durable=False)
        one_saver = can(storage).late_requests
    else:
        # On such storages the note makes the folder visible to other ranks, so an error isn't suppressed.
        one_saver = not mark(name, note)
    place = storage.where().partition("://")[0]
    if one_saver and place not in _warned_places:
        _warned_places.add(place)
        text = "save: %s has no conditional writes, so two saves at the same time may both report success"
        logger.warning(f"{text}; run only one save to a folder at a time", storage.where())


_warned_places: set[str] = set()
"""URL schemes of storages that this process has warned about."""


@contextmanager
def owned(storage: Storage, folder: str, *, durable: bool, has_note: bool, alone: bool) -> Iterator[None]:
    """Hold a save's claim while the block runs; make the save's folder and note first, unless `has_note` is true.

    All other arguments are those of `make_save_folder`.
    """
    own_claim = claim(folder) if has_note else make_save_folder(storage, folder, durable=durable, alone=alone)
    try:
        yield
    finally:
        release(folder)
        del own_claim


@contextmanager
def alone_in(storage: Storage) -> Iterator[None]:
    """Exclude other saves to a folder while the block writes a checkpoint whose files have fixed names.

    This is for functions that write a whole checkpoint in a single process, without an `AsyncRequest`. After the block,
    files of killed saves are removed.

    Raises:
        StorageError: another save is in progress.
    """
    folder = new_save_id()
    with owned(storage, folder, durable=False, has_note=False, alone=True):
        try:
            yield
            with abandoning(storage.where()):  # the checkpoint is published by now
                for name in storage.names():
                    if is_save_folder(name) and name != folder and save_is_alive(storage, name) is False:
                        remove_interrupted(storage, name)
        finally:
            with abandoning(storage.where(folder)):
                disown(storage, folder)


@contextmanager
def noted(storage: Storage, folder: str) -> Iterator[None]:
    """Keep a note that names this process in a committed save's folder during the block, on object stores only.

    The note stays if the block raises or the process is killed. The next save then aborts the unfinished uploads.
    """
    if (mark := can(storage).mark) is None:
        yield
        return
    mark(f"{folder}/{OWNER_FILE}", owner_note(folder))
    yield
    with suppress(StorageError):  # the next removal or save removes it
        storage.remove(f"{folder}/{OWNER_FILE}")


def disown(storage: Storage, folder: str) -> None:
    """Remove the owner's note from a save's folder, and the folder if it is empty then."""
    storage.remove(f"{folder}/{OWNER_FILE}")
    remove_folder(storage, folder)


def remove_save(storage: Storage, folder: str) -> None:
    """Remove a save's files, and its folder if it is empty then."""
    # If this is interrupted, the remaining files must still tell their origin: with a note, a save that never ended;
    # with an index and no note, a save that was committed.
    for name in sorted(storage.names(folder), key=_last_to_go):
        if _OUR_FILE.fullmatch(name):
            storage.remove(f"{folder}/{name}")
    remove_folder(storage, folder)


def _last_to_go(name: str) -> int:
    return 2 if name == OWNER_FILE else int(_INDEX_FILE.fullmatch(name) is not None)


def remove_interrupted(storage: Storage, folder: str) -> None:
    """Remove the remains of a save that was never committed: its files and its open uploads."""
    abort_open_uploads(storage, partial(_was_left, folder))
    remove_save(storage, folder)


def _was_left(folder: str, name: str, age: float) -> bool:
    """Return whether the open upload of a file may be aborted as a remainder of an interrupted save.

    It may if the file `name` is in the save's folder `folder`. It also may if the file has one of the fixed names of
    formats' large files, and is directly in the checkpoint's folder. In a subfolder of that, a file with such a name
    may belong to another checkpoint, so its upload must be hours old too; `age` is in seconds.
    """
    # Deeper names may belong to another checkpoint in a subfolder, whose save may be running.
    return name.startswith(f"{folder}/") or (
        _FIXED_NAME.fullmatch(name) is not None and ("/" not in name or age > _NO_UPLOAD_TAKES)
    )


def save_is_alive(storage: Storage, folder: str) -> bool | None:
    """Return whether the save that made a folder may still finish; None if its process can't be seen from here."""
    name = f"{folder}/{OWNER_FILE}"
    try:
        note = read_if_there(storage, name)
    except StorageError:
        return None  # the note is being removed at this moment
    # Empty folders remain if a process crashes before it leaves its note, or while it removes a replaced save. Claims
    # tell which of this process's own saves are alive.
    alive, token = is_alive(note), folder[-16:]
    is_dead = maker_is_dead(token) or (made_here(token) and not is_claimed(folder) and not storage.names(folder))
    return False if alive is None and is_dead else alive


def is_orphaned(storage: Storage, folder: str, *, before: float) -> bool:
    """Return whether a save was interrupted: its process has ended, or can't be seen and nothing changed for long.

    Args:
        storage: Storage of the checkpoint's folder.
        folder: Name of the save's folder in it.
        before: Time by the storage's clock. If the process can't be seen, a save whose newest change is older counts as
            interrupted.
    """
    # Age decides only for other machines and containers: a save that waits long for its commit isn't interrupted, and
    # one that was killed a minute ago is.
    alive = save_is_alive(storage, folder)
    return newest_change(storage, folder) < before if alive is None else not alive


def is_surely_orphaned(storage: Storage, folder: str, *, before: float) -> bool:
    """Return whether a save was interrupted and none of its requests can still arrive.

    An object store may execute a killed process's requests later, even the one that commits. There, the newest change
    in the save's folder must therefore be older than `before` in any case. All arguments are those of `is_orphaned`. A
    save that cleans up after its own commit doesn't need this, since the store then refuses late commits.
    """
    if can(storage).late_requests and newest_change(storage, folder) >= before:
        return False
    return is_orphaned(storage, folder, before=before)


def newest_change(storage: Storage, folder: str) -> float:
    """Return the time of the newest change in a folder, in seconds by the storage's clock."""
    inside = (f"{folder}/{name}" for name in storage.names(folder))
    return max(storage.changed(name) or 0.0 for name in (folder, *inside))


def remove_orphaned(storage: Storage, listing: Storage, *, keep: str, before: bytes | None, stale_after: float) -> None:
    """Remove the folders of the replaced save and of interrupted saves; files of other programs stay.

    Args:
        storage: Storage of the checkpoint's folder.
        listing: `storage`, or a view of it that answers from a listing made right before the commit (see `listed`).
        keep: Name of the folder that metadata.json refers to now.
        before: The previous content of metadata.json.
        stale_after: Seconds without a change, by the storage's clock, after which a save counts as interrupted.
    """
    predecessor = _save_id(before)
    # If commits are conditional, this save's commit makes the store refuse late commits of interrupted saves.
    is_dead = is_orphaned if can(storage).replace_if is not None else is_surely_orphaned
    now = max(listing.changed(name) or 0.0 for name in (METADATA_FILE, keep))
    for name in listing.names():
        if not is_save_folder(name):
            continue
        if name == keep:
            listing.remove(f"{name}/{OWNER_FILE}")
        elif name == predecessor and listing.length(f"{name}/{OWNER_FILE}") is not None:
            remove_interrupted(listing, name)  # a removal of tensors from it was killed
        elif name == predecessor or _was_replaced_before(storage, listing, name):
            remove_save(listing, name)
        # A save that was committed since the listing has no note left, so its age alone would decide.
        elif is_dead(listing, name, before=now - stale_after) and not is_committed(storage, name):
            remove_interrupted(listing, name)
    if listing is not storage:
        settle(listing)


def _was_replaced_before(storage: Storage, listing: Storage, folder: str) -> bool:
    """Return whether a folder belongs to a replaced save whose successor was killed before it removed the folder.

    Args:
        storage: Storage of the checkpoint's folder.
        listing: `storage`, or a view of it that answers from one listing (see `listed`).
        folder: Name of the save's folder.
    """
    # A save keeps its note until its commit, so a folder without a note was committed, and replaced unless it is the
    # current one. Where a folder can exist before its note, it must also have an index, which is removed last.
    names = listing.names(folder)
    was_committed = can(storage).replace_if is not None or any(map(_INDEX_FILE.fullmatch, names))
    if OWNER_FILE in names or not was_committed:
        return False
    return _save_id(metadata_bytes(storage)) not in (None, folder)


def remove_unless_committed(storage: Storage, folder: str) -> None:
    """Remove a save's folder, unless metadata.json refers to it."""
    metadata = metadata_bytes(storage)
    if metadata is None or _save_id(metadata) not in (None, folder):
        with listed(storage) as listing:
            remove_interrupted(listing, folder)


def is_committed(storage: Storage, folder: str) -> bool:
    """Return whether metadata.json refers to a save's folder at this moment."""
    return _save_id(metadata_bytes(storage)) == folder


def _save_id(metadata: bytes | None) -> str | None:
    try:
        save_id = decode_metadata(metadata, METADATA_FILE).get("save_id") if metadata else None
    except CheckpointingException:
        return None
    return save_id if isinstance(save_id, str) else None
