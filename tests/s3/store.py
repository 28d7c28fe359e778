"""What an S3 server holds: objects of one bucket with tags and times, and uploads in parts."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import RLock


@dataclass(frozen=True)
class Stored:
    """An object.

    Attributes:
        data: its bytes.
        tag: its ETag, with the quotation marks.
        changed: when it was put, in seconds since 1970.
        generation: counts what was put, from 1.
    """

    data: bytes | bytearray
    tag: str
    changed: float
    generation: int


class Refused(Exception):
    """The answer to a request that isn't carried out: its HTTP status and S3's code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass
class Store:
    """Objects and uploads; every method is one step, as S3's requests are.

    Attributes:
        ignores_conditions: whether If-Match and If-None-Match are passed over, as by old servers.
        clock: returns the time, in seconds since 1970.
    """

    ignores_conditions: bool = False
    clock: object = time.time
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    lock: RLock = field(default_factory=RLock)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def now(self) -> float:
        return float(self.clock())  # type: ignore[operator]

    def get(self, key: str) -> Stored:
        with self.lock:
            if key not in self.objects:
                raise Refused(404, "NoSuchKey")
            return self.objects[key]

    def put(
        self,
        key: str,
        data: bytes | bytearray,
        *,
        match: str | None = None,
        none_match: str | None = None,
        generation: str | None = None,
    ) -> Stored:
        """Put an object if the conditions hold, and return it; generation 0 is that of an object which isn't there."""
        with self.lock:
            self.check(key, match, none_match, generation)
            stored = Stored(data, self._tag(data), self.now(), next(self._numbers) + 1)
            self.objects[key] = stored
            return stored

    def check(self, key: str, match: str | None, none_match: str | None, generation: str | None = None) -> None:
        if self.ignores_conditions:
            return
        there = self.objects.get(key)
        if generation is not None and int(generation) != (0 if there is None else there.generation):
            raise Refused(412, "PreconditionFailed")
        if none_match is not None and there is not None:
            raise Refused(412, "PreconditionFailed")
        if match is not None and there is None:
            raise Refused(404, "NoSuchKey")
        if match is not None and there is not None and there.tag != match:
            raise Refused(412, "PreconditionFailed")

    def delete(self, key: str) -> None:
        with self.lock:
            self.objects.pop(key, None)

    def under(self, prefix: str) -> list[tuple[str, Stored]]:
        with self.lock:
            return sorted((key, one) for key, one in self.objects.items() if key.startswith(prefix))

    def start_upload(self, key: str) -> str:
        with self.lock:
            upload = f"upload-{next(self._numbers)}"
            self.uploads[upload] = (key, {})
            self.started[upload] = self.now()
            return upload

    def put_part(self, upload: str, number: int, data: bytes) -> str:
        with self.lock:
            self._upload(upload)[1][number] = data
        return self._tag(data)

    def complete(self, upload: str, **conditions: str | None) -> tuple[str, str]:
        """Make an object of an upload's parts; return its key and tag."""
        with self.lock:
            key, parts = self._upload(upload)
            stored = self.put(key, b"".join(parts[number] for number in sorted(parts)), **conditions)
            del self.uploads[upload]
            return key, stored.tag

    def abort(self, upload: str) -> None:
        with self.lock:
            self._upload(upload)
            del self.uploads[upload]

    def _upload(self, upload: str) -> tuple[str, dict[int, bytes]]:
        if upload not in self.uploads:
            raise Refused(404, "NoSuchUpload")
        return self.uploads[upload]

    def _tag(self, data: bytes | bytearray) -> str:
        # Of the length and a counter for large ones: MD5 would take longer than everything else.
        text = hashlib.md5(data).hexdigest() if len(data) < 2**20 else f"{len(data):x}-{next(self._numbers)}"
        return f'"{text}"'
