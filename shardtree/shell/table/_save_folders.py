"""The folder of a single save: the names of it and its files, its owner, and its removal."""

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
"""The note in a save's folder that names the saving process. The clean-up after the commit removes it; loads don't look
at it, other saves do."""

_SAVE_FOLDER = re.compile(r"save-\d{8}T\d{6}-[0-9a-f]{16}")
FORMAT_FILE = re.compile(r"\d{5,}-of-\d{5,}(-\d+)?\.[a-z0-9]+|own-[a-z0-9][a-z0-9._-]*")
"""A file of any format: a rank's data file, as `rank_file` names it, or another one, as `save_file` does."""

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
"""Files outside a save's folder that are large enough to be uploaded in parts."""

_NO_UPLOAD_TAKES = 6 * 3600.0  # seconds


@contextmanager
def abandoning(place: str) -> Iterator[None]:
    """Remove within it what a failed save wrote to a place; where that fails, the log says so.

    The save's own error is being raised, and must not be hidden. A later save removes what stays, or overwrites it.
    """
    try:
        yield
    except Exception as error:
        logger.warning("save: what a failed save wrote stays in %s: %s", place, error)


def is_save_folder(name: str) -> bool:
    """Return whether a folder's name is one that a save gives.

    Examples:
        >>> is_save_folder("save-20260102T030405-0123456789abcdef"), is_save_folder("save-mine")
        (True, False)
    """
    return _SAVE_FOLDER.fullmatch(name) is not None


def new_save_id() -> str:
    """Return the name of a new save, which is that of its folder.

    Examples:
        >>> is_save_folder(new_save_id())
        True
    """
    # Its form makes a folder one that cleaning up may remove; random digits keep saves of one second apart.
    return f"save-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{process_token()}"


def is_save_file(name: str) -> bool:
    """Return whether a file's name inside a checkpoint is one that a save gives.

    Examples:
        >>> folder = "save-20260102T030405-0123456789abcdef"
        >>> is_save_file(f"{folder}/index-0.safetensors"), is_save_file("notes.txt")
        (True, False)
    """
    folder, _, last = name.rpartition("/")
    return is_save_folder(folder) and _OUR_FILE.fullmatch(last) is not None


def make_save_folder(storage: Storage, folder: str, *, durable: bool, alone: bool = False) -> Claim:
    """Make a save's folder with a note of its owner, and return the claim that marks the save as alive here.

    Args:
        storage: the checkpoint's folder.
        folder: the save's folder in it.
        durable: whether the folder is on the medium when this returns.
        alone: whether no other save may be in progress, since files of both would have the same names.

    Raises:
        StorageError: the folder or the note can't be made, or another save is in progress.
    """
    # Before the folder: from its first moment on, it belongs to a save that is known to be alive.
    own_claim = claim(folder)
    with ExitStack() as lock:
        try:
            make_folder(storage, folder, durable=durable)
            # With the lock, the second of two savers sees the first one's note. The lock is held until the note of one
            # that is refused is gone. Without, they may see each other's: then the first by name waits for the other.
            if alone:
                lock.enter_context(locked(storage))
            _leave_note(storage, folder)
            if alone:
                check_alone(storage, folder, pauses=_PAUSES if can(storage).locked is None else ())
        except BaseException:
            release(folder)
            with suppress(CheckpointingException):  # the same cause may prevent this too
                disown(storage, folder)
            raise
    return own_claim


_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)  # seconds; a saver that is refused takes its note back by two requests


def check_alone(storage: Storage, folder: str, *, pauses: Sequence[float] = ()) -> None:
    """Raise if another save than that of a folder is in progress.

    Args:
        storage: the checkpoint's folder.
        folder: the save's folder in it.
        pauses: seconds to wait between looks, while all others have names after this one's and may take back theirs.

    Raises:
        StorageError: a process of this machine makes one.
    """
    others = _others_alive(storage, folder)
    for pause in pauses:
        if not others or min(others) < folder:
            break
        time.sleep(pause)
        others = _others_alive(storage, folder)
    if others:
        fix = "Let only one save at a time go to a folder; wait for the other one, or abandon it."
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
        # The note makes the folder there, so that other ranks see it: a failure of this one isn't passed over.
        one_saver = not mark(name, note)
    place = storage.where().partition("://")[0]
    if one_saver and place not in _warned_places:
        _warned_places.add(place)
        what = "save: %s replaces files without conditions, so that of two savers at once both may report success"
        logger.warning(f"{what}; let one save at a time go to a folder", storage.where())


_warned_places: set[str] = set()
"""Kinds of storages that were named in a warning of this process."""


@contextmanager
def owned(storage: Storage, folder: str, *, durable: bool, has_note: bool, alone: bool) -> Iterator[None]:
    """Own a save's folder inside the block; unless this process has left its note there already, it is made."""
    own_claim = claim(folder) if has_note else make_save_folder(storage, folder, durable=durable, alone=alone)
    try:
        yield
    finally:
        release(folder)
        del own_claim


@contextmanager
def alone_in(storage: Storage) -> Iterator[None]:
    """Let no other save with files of fixed names begin inside the block, which ends with a checkpoint.

    For functions that write a checkpoint without ranks and without a request. Files of killed saves are removed after.

    Raises:
        StorageError: another save is in progress.
    """
    folder = new_save_id()
    with owned(storage, folder, durable=False, has_note=False, alone=True):
        try:
            yield
            with abandoning(storage.where()):  # the checkpoint counts by now
                for name in storage.names():
                    if is_save_folder(name) and name != folder and save_is_alive(storage, name) is False:
                        remove_interrupted(storage, name)
        finally:
            with abandoning(storage.where(folder)):
                disown(storage, folder)


@contextmanager
def noted(storage: Storage, folder: str) -> Iterator[None]:
    """Leave the owner's note in a committed save's folder inside the block, where uploads in parts can stay open.

    It stays if the block raises or the process is killed: the save that replaces this one then gives up the uploads.
    """
    if (mark := can(storage).mark) is None:
        yield
        return
    mark(f"{folder}/{OWNER_FILE}", owner_note(folder))
    yield
    with suppress(StorageError):  # the next removal, or save, takes it away
        storage.remove(f"{folder}/{OWNER_FILE}")


def disown(storage: Storage, folder: str) -> None:
    """Remove the note of the owner, and the folder if nothing else is in it."""
    storage.remove(f"{folder}/{OWNER_FILE}")
    remove_folder(storage, folder)


def remove_save(storage: Storage, folder: str) -> None:
    """Remove a save's files, and its folder unless other files are in it."""
    # If this is interrupted, the rest must still tell whose it is: with a note, of a save that never ended; without one
    # but with an index, of a save that was committed.
    for name in sorted(storage.names(folder), key=_last_to_go):
        if _OUR_FILE.fullmatch(name):
            storage.remove(f"{folder}/{name}")
    remove_folder(storage, folder)


def _last_to_go(name: str) -> int:
    return 2 if name == OWNER_FILE else int(_INDEX_FILE.fullmatch(name) is not None)


def remove_interrupted(storage: Storage, folder: str) -> None:
    """Remove what a save has left that was never committed: its files, and uploads that it didn't finish."""
    abort_open_uploads(storage, partial(_was_left, folder))
    remove_save(storage, folder)


def _was_left(folder: str, name: str, age: float) -> bool:
    """Return whether an open upload is of a save's folder, or of a file that formats with fixed names put beside it."""
    # Deeper ones may be of another checkpoint, in a folder inside this one, whose save is at it.
    return name.startswith(f"{folder}/") or (
        _FIXED_NAME.fullmatch(name) is not None and ("/" not in name or age > _NO_UPLOAD_TAKES)
    )


def save_is_alive(storage: Storage, folder: str) -> bool | None:
    """Return whether the save that made a folder can still be finished; None if its process can't be seen from here."""
    name = f"{folder}/{OWNER_FILE}"
    try:
        note = read_if_there(storage, name)
    except StorageError:
        return None  # the note is being removed at this moment
    # A crash before a save leaves its note makes an empty folder, and so does one while a replaced save is removed. Of
    # its own saves this process knows which ones are alive.
    alive, token = is_alive(note), folder[-16:]
    is_dead = maker_is_dead(token) or (made_here(token) and not is_claimed(folder) and not storage.names(folder))
    return False if alive is None and is_dead else alive


def is_orphaned(storage: Storage, folder: str, *, before: float) -> bool:
    """Return whether a save was interrupted: its process is gone, or, if that can't be seen, nothing changed for long.

    Args:
        storage: the checkpoint's folder.
        folder: the save's folder in it.
        before: the latest time of an interrupted save's newest change, in seconds by the storage's clock.
    """
    # Age is for other machines and containers alone: a save that waits long for its commit isn't interrupted, and one
    # that was killed a minute ago is.
    alive = save_is_alive(storage, folder)
    return newest_change(storage, folder) < before if alive is None else not alive


def is_surely_orphaned(storage: Storage, folder: str, *, before: float) -> bool:
    """Return whether a save was interrupted, and no request of it can still arrive; arguments as of `is_orphaned`.

    What a killed process has sent, an object store may carry out later: the request that commits, too. After a later
    commit it refuses that one; a removal without a commit has to wait.
    """
    if can(storage).late_requests and newest_change(storage, folder) >= before:
        return False
    return is_orphaned(storage, folder, before=before)


def newest_change(storage: Storage, folder: str) -> float:
    """Return when a folder or a file in it was changed last, in seconds by the storage's clock."""
    inside = (f"{folder}/{name}" for name in storage.names(folder))
    return max(storage.changed(name) or 0.0 for name in (folder, *inside))


def remove_orphaned(storage: Storage, listing: Storage, *, keep: str, before: bytes | None, stale_after: float) -> None:
    """Remove the folder of the save that was replaced, and those of interrupted saves; only files that a save writes.

    Args:
        storage: the checkpoint's folder.
        listing: the same folder, maybe as it was listed right before the commit.
        keep: the folder that metadata.json refers to now.
        before: metadata.json as it was before.
        stale_after: seconds without a change, by the storage's clock, after which a save counts as interrupted.
    """
    predecessor = _save_id(before)
    # Where a commit is conditional, this one has turned away whatever an interrupted save may have sent.
    is_dead = is_orphaned if can(storage).replace_if is not None else is_surely_orphaned
    now = max(listing.changed(name) or 0.0 for name in (METADATA_FILE, keep))
    for name in listing.names():
        if not is_save_folder(name):
            continue
        if name == keep:
            listing.remove(f"{name}/{OWNER_FILE}")
        elif name == predecessor and listing.length(f"{name}/{OWNER_FILE}") is not None:
            remove_interrupted(listing, name)  # what removed tensors from it was killed
        elif name == predecessor or _was_replaced_before(storage, listing, name):
            remove_save(listing, name)
        # A save that was committed since the listing has no note any more, and would be judged by its age.
        elif is_dead(listing, name, before=now - stale_after) and not is_committed(storage, name):
            remove_interrupted(listing, name)
    if listing is not storage:
        settle(listing)


def _was_replaced_before(storage: Storage, listing: Storage, folder: str) -> bool:
    """Return whether a folder is of a save that was replaced by one that was killed before it removed it.

    Args:
        storage: the checkpoint's folder.
        listing: the same folder, as it was listed before.
        folder: the save's folder.
    """
    # A save has its note until after its commit: one without was committed, and replaced unless it is the current one
    # by now. Where a folder may be there before its note, an index has to be in it: written last, it goes last.
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
    """Return whether metadata.json refers to a save's folder now; it may have been committed a moment ago."""
    return _save_id(metadata_bytes(storage)) == folder


def _save_id(metadata: bytes | None) -> str | None:
    try:
        save_id = decode_metadata(metadata, METADATA_FILE).get("save_id") if metadata else None
    except CheckpointingException:
        return None
    return save_id if isinstance(save_id, str) else None
