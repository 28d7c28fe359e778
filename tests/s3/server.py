"""An S3 server on loopback: one bucket in memory, a log of requests, latency, bandwidth, and faults at any request.

It knows what Google Cloud Storage says otherwise in the requests that obstore makes: generations in place of ETags.

Run by itself, ``python -m tests.s3.server``, it prints its address; benchmarks start it so, for a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from .store import Refused, Store, Stored

BUCKET = "bucket"


@dataclass
class Request:
    """A request, and what became of it.

    Attributes:
        number: counts requests from 0, in the order in which they came.
        action: S3's name of it: GetObject, PutObject, UploadPart, …
        key: of the object, or the prefix that is listed.
        headers: with lower-case names.
        query: its parameters.
        status: of the answer, 0 for a connection that was cut.
        sent: bytes of the answer's body.
        begun: when it came, by the monotonic clock, in seconds.
        ended: when the answer was sent.
        received: bytes of its body.
    """

    number: int
    action: str
    key: str
    headers: dict[str, str]
    query: dict[str, str]
    status: int = 0
    sent: int = 0
    begun: float = 0.0
    ended: float = 0.0
    received: int = 0


Fault = str
"""What happens to a request:

refuse, busy: 500 or 503 "SlowDown", nothing done; conflict: 409; expired: 403 "ExpiredToken", whose text repeats the
key that signed it; cut: the connection is cut, nothing done; done-cut, done-500: done, then cut or 500; late: cut, and
done when `Server.apply_late` is called; short: the body ends early; truncate: a shorter body with a right length; flip:
one byte of the body differs."""


@dataclass
class Server:
    """A server in this process.

    Attributes:
        store: what it holds.
        log: every request.
        fault: returns what happens to a request, None for nothing.
        latency: of every answer, in seconds.
        bandwidth: of a connection, in bytes a second; None for no limit.
        ranges: whether it honours Range.
    """

    store: Store = field(default_factory=Store)
    log: list[Request] = field(default_factory=list)
    fault: Callable[[Request], Fault | None] = lambda _: None
    latency: float = 0.0
    bandwidth: float | None = None
    ranges: bool = True
    late: list[Callable[[], object]] = field(default_factory=list)
    port: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _connections: set[socket.socket] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def apply_late(self) -> None:
        """Do what the requests asked for whose connections were cut by "late"."""
        waiting, self.late = self.late, []
        for do in waiting:
            with suppress(Refused):
                do()

    def actions(self) -> list[str]:
        """Return the action of every request so far."""
        return [request.action for request in self.log]

    def reset(self) -> None:
        """Forget the log and the faults, and count requests from 0 again."""
        self.log.clear()
        self.fault = lambda _: None
        self._numbers = itertools.count()


@contextmanager
def serving(server: Server | None = None) -> Iterator[Server]:
    """Run a server on a port of loopback that the system chooses."""
    server = Server() if server is None else server
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server.port = listener.getsockname()[1]
    threading.Thread(target=_accept, args=(listener, server), daemon=True).start()
    try:
        yield server
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in list(server._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, server: Server) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server._connections.add(connection)
        threading.Thread(target=_converse, args=(connection, server), daemon=True).start()


def _converse(connection: socket.socket, server: Server) -> None:
    """Answer a connection's requests until it is closed."""
    with suppress(OSError, ValueError), connection, connection.makefile("rb", 256 * 1024) as stream:
        while _answer(connection, stream, server):
            pass
    server._connections.discard(connection)


def _answer(connection: socket.socket, stream: BinaryIO, server: Server) -> bool:
    """Answer one request; return whether the connection stays open."""
    line = stream.readline()
    if not line:
        return False
    method, target, _ = line.decode().split()
    headers = dict(_headers(stream))
    parts = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    key = unquote(parts.path).removeprefix("/").removeprefix(BUCKET).removeprefix("/")
    action = _action(method, key, headers, query)
    request = Request(next(server._numbers), action, key or query.get("prefix", ""), headers, query)
    request.begun = time.monotonic()
    server.log.append(request)
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = _body(stream, headers, server)
    request.received = len(body)
    fault = server.fault(request)
    if server.latency:
        time.sleep(server.latency)
    return _carry_out(connection, server, request, body, fault)


def _carry_out(connection: socket.socket, server: Server, request: Request, body: bytes, fault: Fault | None) -> bool:
    try:
        answer = _refusal(request, fault) or _do(server, request, body)
    except Refused as refused:
        answer = _Answer(refused.status, _error(refused.code, request.key))
    if fault == "late":
        server.late.append(lambda: _do(server, request, body))
    if fault in ("cut", "late", "done-cut"):
        connection.shutdown(socket.SHUT_RDWR)
        return False
    if fault == "done-500":
        answer = _Answer(500, _error("InternalError", request.key))
    data = memoryview(answer.body)
    if fault == "flip" and data.nbytes:
        flipped = bytearray(data)
        flipped[len(flipped) // 2] ^= 1
        data = memoryview(flipped)
    if fault == "truncate":
        data = data[: data.nbytes // 2]
    request.status = answer.status
    head = [f"HTTP/1.1 {answer.status} x", *(f"{name}: {value}" for name, value in answer.headers.items())]
    length = answer.length if answer.length is not None else data.nbytes
    if request.action == "HeadObject":
        data = data[:0]
    connection.sendall("\r\n".join([*head, f"Content-Length: {length}", "", ""]).encode())
    if fault == "short":
        connection.sendall(data[: data.nbytes // 2])
        connection.shutdown(socket.SHUT_RDWR)
        return False
    _send(connection, data, server.bandwidth)
    request.sent, request.ended = data.nbytes, time.monotonic()
    return request.headers.get("connection", "").lower() != "close"


def _send(connection: socket.socket, data: memoryview, bandwidth: float | None) -> None:
    if bandwidth is None:
        connection.sendall(data)
        return
    step, begun = 64 * 1024, time.monotonic()
    for at in range(0, data.nbytes, step):
        connection.sendall(data[at : at + step])
        time.sleep(max(0.0, begun + (at + step) / bandwidth - time.monotonic()))


def _headers(stream: BinaryIO) -> Iterator[tuple[str, str]]:
    while line := stream.readline().strip():
        name, _, value = line.decode("latin-1").partition(":")
        yield name.lower(), value.strip()


def _body(stream: BinaryIO, headers: dict[str, str], server: Server) -> bytes:
    begun = time.monotonic()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        data = b"".join(_chunks(stream))
    else:
        data = stream.read(int(headers.get("content-length", 0)))
    if server.bandwidth is not None:
        time.sleep(max(0.0, begun + len(data) / server.bandwidth - time.monotonic()))
    if "aws-chunked" in headers.get("content-encoding", ""):
        import io

        return b"".join(_chunks(io.BytesIO(data)))
    return data


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while size := int(stream.readline().split(b";")[0], 16):
        yield stream.read(size)
        stream.readline()
    while stream.readline().strip():  # trailers
        pass


_COPY_SOURCES = {"x-amz-copy-source", "x-goog-copy-source"}


def _action(method: str, key: str, headers: dict[str, str], query: dict[str, str]) -> str:
    for name, known in (
        ("uploads", {"POST": "CreateMultipartUpload", "GET": "ListMultipartUploads"}),
        ("uploadId", {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}),
        ("delete", {"POST": "DeleteObjects"}),
    ):
        if name in query and method in known:
            return known[method]
    if method == "GET" and not key:
        return "ListObjectsV2"
    if method == "PUT" and headers.keys() & _COPY_SOURCES:
        return "CopyObject"
    return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}[method]


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes | bytearray | memoryview = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


def _refusal(request: Request, fault: Fault | None) -> _Answer | None:
    if fault in ("refuse", "busy", "conflict", "expired"):
        status, code = {
            "refuse": (500, "InternalError"),
            "busy": (503, "SlowDown"),
            "conflict": (409, "ConditionalRequestConflict"),
            "expired": (403, "ExpiredToken"),
        }[fault]
        # S3 says whose signature it refuses; what it says must not reach a log.
        return _Answer(status, _error(code, request.key, request.headers.get("authorization", "")))
    return _Answer(0) if fault in ("cut", "late") else None


def _error(code: str, key: str, more: str = "") -> bytes:
    return f"<Error><Code>{code}</Code><Message>{escape(key)} {escape(more)}</Message></Error>".encode()


def _do(server: Server, request: Request, body: bytes) -> _Answer:
    return _ACTIONS[request.action](server, request, body)


def _get(server: Server, request: Request, _: bytes) -> _Answer:
    stored = server.store.get(request.key)
    headers = _object_headers(stored)
    if (wanted := request.headers.get("if-match")) is not None and wanted != stored.tag:
        raise Refused(412, "PreconditionFailed")
    span = request.headers.get("range")
    if request.action == "HeadObject":
        return _Answer(200, b"", headers, length=len(stored.data))
    if span is None or not server.ranges:
        return _Answer(200, stored.data, headers)
    first, _, last = span.removeprefix("bytes=").partition("-")
    size = len(stored.data)
    begin, end = (max(0, size - int(last)), size) if not first else (int(first), min(size, int(last or size) + 1))
    if begin >= size:
        raise Refused(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    return _Answer(206, memoryview(stored.data)[begin:end], headers)


def _object_headers(stored: Stored) -> dict[str, str]:
    changed = formatdate(stored.changed, usegmt=True)
    return {"ETag": stored.tag, "Last-Modified": changed, "x-goog-generation": str(stored.generation)}


def _conditions(request: Request) -> dict[str, str | None]:
    names = {"match": "if-match", "none_match": "if-none-match", "generation": "x-goog-if-generation-match"}
    return {name: request.headers.get(header) for name, header in names.items()}


def _put(server: Server, request: Request, body: bytes) -> _Answer:
    return _Answer(200, b"", _object_headers(server.store.put(request.key, body, **_conditions(request))))


def _copy(server: Server, request: Request, _: bytes) -> _Answer:
    (named,) = (request.headers[name] for name in _COPY_SOURCES & request.headers.keys())
    source = unquote(named).lstrip("/").removeprefix(BUCKET).lstrip("/")
    stored = server.store.put(request.key, server.store.get(source).data, **_conditions(request))
    return _Answer(200, f"<CopyObjectResult><ETag>{escape(stored.tag)}</ETag></CopyObjectResult>".encode())


def _delete(server: Server, request: Request, _: bytes) -> _Answer:
    server.store.delete(request.key)
    return _Answer(204)


def _delete_many(server: Server, request: Request, body: bytes) -> _Answer:
    keys = [node.text or "" for node in ElementTree.fromstring(body).iter() if node.tag.rpartition("}")[2] == "Key"]
    for key in keys:
        server.store.delete(key)
    gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
    return _Answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())


def _list(server: Server, request: Request, _: bytes) -> _Answer:
    prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
    most = int(request.query.get("max-keys", 1000))
    after = request.query.get("continuation-token") or request.query.get("start-after", "")
    rows: dict[str, Stored | None] = {}
    for key, stored in server.store.under(prefix):
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        name = prefix + head + delimiter if found else key
        if name > after and not (after.endswith("/") and name.startswith(after)):
            rows[name] = None if found else stored
    shown = dict(itertools.islice(rows.items(), most))
    text = [f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(shown)}</KeyCount>"]
    for name, one in shown.items():
        if one is None:
            text.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
        else:
            when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(one.changed)) + f".{int(one.changed % 1 * 1000):03d}Z"
            text.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
                f"<ETag>{escape(one.tag)}</ETag><Size>{len(one.data)}</Size></Contents>"
            )
    if len(rows) > most:
        text.append(
            f"<IsTruncated>true</IsTruncated><NextContinuationToken>{escape(list(shown)[-1])}</NextContinuationToken>"
        )
    return _Answer(200, f"<ListBucketResult>{''.join(text)}</ListBucketResult>".encode())


def _start_upload(server: Server, request: Request, _: bytes) -> _Answer:
    upload = server.store.start_upload(request.key)
    names = f"<Bucket>{BUCKET}</Bucket><Key>{escape(request.key)}</Key><UploadId>{upload}</UploadId>"
    return _Answer(200, f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>".encode())


def _put_part(server: Server, request: Request, body: bytes) -> _Answer:
    tag = server.store.put_part(request.query["uploadId"], int(request.query["partNumber"]), body)
    return _Answer(200, b"", {"ETag": tag})


def _complete(server: Server, request: Request, _: bytes) -> _Answer:
    key, tag = server.store.complete(request.query["uploadId"], **_conditions(request))
    names = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><ETag>{escape(tag)}</ETag>"
    return _Answer(200, f"<CompleteMultipartUploadResult>{names}</CompleteMultipartUploadResult>".encode())


def _abort(server: Server, request: Request, _: bytes) -> _Answer:
    server.store.abort(request.query["uploadId"])
    return _Answer(204)


def _list_uploads(server: Server, request: Request, _: bytes) -> _Answer:
    prefix, store = request.query.get("prefix", ""), server.store
    rows = "".join(
        f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
        f"<Initiated>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(store.started[upload]))}</Initiated></Upload>"
        for upload, (key, _) in list(store.uploads.items())
        if key.startswith(prefix)
    )
    text = f"<Bucket>{BUCKET}</Bucket><IsTruncated>false</IsTruncated>{rows}"
    return _Answer(200, f"<ListMultipartUploadsResult>{text}</ListMultipartUploadsResult>".encode())


_ACTIONS: dict[str, Callable[[Server, Request, bytes], Any]] = {
    "GetObject": _get,
    "HeadObject": _get,
    "PutObject": _put,
    "CopyObject": _copy,
    "DeleteObject": _delete,
    "DeleteObjects": _delete_many,
    "ListObjectsV2": _list,
    "CreateMultipartUpload": _start_upload,
    "UploadPart": _put_part,
    "CompleteMultipartUpload": _complete,
    "AbortMultipartUpload": _abort,
    "ListMultipartUploads": _list_uploads,
}


_NOTED_LATE = 0.05  # seconds: a client may have an answer, and ask again, before its end is noted


def in_a_row(log: list[Request]) -> int:
    """Return how many requests came one after the other: the longest chain in which each began after the last ended.

    For latencies of 0.1 s and more.
    """
    count, end = 0, 0.0
    for request in sorted(log, key=lambda each: each.ended):
        if request.begun >= end - _NOTED_LATE:
            count, end = count + 1, request.ended
    return count


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency", type=float, default=0.0, help="seconds")
    parser.add_argument("--bandwidth", type=float, default=None, help="bytes a second of a connection")
    options = parser.parse_args()
    with serving(Server(latency=options.latency, bandwidth=options.bandwidth)) as server:
        print(server.url, flush=True)  # noqa: T201
        for line in sys.stdin:  # "latency 0.05", "bandwidth 2e7", "requests"
            name, _, value = line.strip().partition(" ")
            if name == "requests":
                print(len(server.log), sum(each.sent for each in server.log), in_a_row(server.log), flush=True)  # noqa: T201
                server.log.clear()
            else:
                setattr(server, name, float(value) if value != "None" else None)
                print("ok", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
