"""Megatron-Core's `integrity.json`, an optional list of the SHA-256 of each file of a checkpoint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CheckpointingException, CorruptCheckpoint, error_text
from ..kit import Checked, Checkpoint, Damage, Finding, Storage, Unchecked, in_threads, limits, parse_json

MANIFEST_FILE = "integrity.json"

_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_manifest(checkpoint: Checkpoint) -> Mapping[str, str] | None:
    """Return the SHA-256 of each file by its name, as hexadecimal digits; None if there is no manifest.

    Raises:
        CorruptCheckpoint: The manifest isn't sound, or has hashes of another algorithm.
    """
    return checkpoint.once(_read)


def _read(checkpoint: Checkpoint) -> Mapping[str, str] | None:
    # In folders of other formats, a file of that name belongs to another program. Only our own metadata.json has a
    # digest.
    if not checkpoint.traits.manifest or "digest" in checkpoint.fields:
        return None
    storage = checkpoint.storage
    length = storage.length(MANIFEST_FILE)
    if length is None:
        return None
    where = storage.where(MANIFEST_FILE)
    # A crafted manifest mustn't fill the memory; it isn't hashed itself.
    if length > limits.SIDE_FILE_BYTES:
        raise _unsound(where, f"{length} bytes", f"at most {limits.SIDE_FILE_BYTES}")
    fields = parse_json(storage.read(MANIFEST_FILE), where)
    files = fields.get("files") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(files, dict):
        raise _unsound(where, "no list of files", '{"algorithm": "sha256", "files": {name: hash}}')
    if fields.get("algorithm") != "sha256":
        raise _unsound(where, f"algorithm {fields.get('algorithm')!r}"[:200], "'sha256', the only one known")
    for name, value in files.items():
        if not isinstance(value, str) or _SHA256.fullmatch(value) is None:
            raise _unsound(where, f"{name[:200]!r}: {value!r}"[:400], "64 hexadecimal digits")
    return files


def check_listed(checkpoint: Checkpoint, name: str) -> None:
    """Raise if a file's SHA-256 differs from its entry in the manifest. A listed file is read whole, but only once.

    Raises:
        CorruptCheckpoint: The SHA-256 differs, or the manifest isn't sound.
    """
    checked_names = checkpoint.once(_checked_names)
    expected = (read_manifest(checkpoint) or {}).get(name)
    if expected is None or name in checked_names:
        return
    if file_sha256(checkpoint.storage, name) != expected:
        fix = "The medium or a later program damaged it; load another checkpoint."
        where = checkpoint.storage.where(name)
        heading = f"load: {where!r} is not what was saved: its SHA-256 differs from that in {MANIFEST_FILE}"
        raise CorruptCheckpoint(error_text(heading, fix=fix))
    checked_names.add(name)


def _checked_names(_: Checkpoint) -> set[str]:
    """Return a new set for the names of checked files; `Checkpoint.once` keeps it for the open checkpoint."""
    return set()


def manifest_findings(checkpoint: Checkpoint) -> tuple[tuple[Finding, ...], frozenset[str]]:
    """Return the findings about all files of a checkpoint with a manifest, and the names of the undamaged files.

    Both are empty without a manifest. Files that it does not list are reported as unchecked. The manifest itself needs
    no checksum: any change makes it unsound, or makes a file differ from its entry.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CorruptCheckpoint as error:
        return (Damage(MANIFEST_FILE, str(error)),), frozenset()
    if manifest is None:
        return (), frozenset()
    names = sorted(manifest)
    wrong = in_threads(lambda name: _wrong(checkpoint, name, manifest[name]), names, checkpoint.options.threads)
    damages = [Damage(name, what) for name, what in zip(names, wrong, strict=True) if what]
    whole = frozenset(name for name, what in zip(names, wrong, strict=True) if not what) | {MANIFEST_FILE}
    checked = [Checked(name, checkpoint.storage.length(name) or 0) for name in sorted(whole)]
    return (*damages, *checked, *_unlisted_files(checkpoint.storage, manifest)), whole


def _wrong(checkpoint: Checkpoint, name: str, expected: str) -> str:
    """Return the damage of a listed file as text; "" if it is undamaged."""
    try:
        length = checkpoint.storage.length(name)
        if length is None:
            return f"no such file, which {MANIFEST_FILE} lists"
        sha256 = file_sha256(checkpoint.storage, name)
    except CheckpointingException as error:  # A name may lead out of the folder.
        return str(error)
    checkpoint.options.progress(length)
    return "" if sha256 == expected else f"its SHA-256 differs from that in {MANIFEST_FILE}"


def _unlisted_files(storage: Storage, manifest: Mapping[str, Any]) -> Iterator[Unchecked]:
    for name in storage.names():
        length = storage.length(name)
        if name not in manifest and name != MANIFEST_FILE and length:
            yield Unchecked(name, f"{MANIFEST_FILE} does not list it", length)


def file_sha256(storage: Storage, name: str) -> str:
    """Return the SHA-256 of a whole file as hexadecimal digits.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.write("empty", [], durable=False)
        0
        >>> file_sha256(storage, "empty")[:16]
        'e3b0c44298fc1c14'
    """
    sha256, room = hashlib.sha256(), memoryview(bytearray(limits.STEP_BYTES))
    with storage.open(name) as reader:
        for byte in range(0, reader.length, limits.STEP_BYTES):
            part = room[: min(limits.STEP_BYTES, reader.length - byte)]
            reader.read_into(byte, [part])
            sha256.update(part)
    return sha256.hexdigest()


def _unsound(where: str, found: str, expected: str) -> CorruptCheckpoint:
    fix = "It was damaged, or made by another program; remove it if you trust the other files."
    return CorruptCheckpoint(error_text(f"open: {where!r} is malformed", found=found, expected=expected, fix=fix))
