"""Keys, tokens and signatures are shown nowhere: planted ones are looked for in all that is said and written."""

from __future__ import annotations

import itertools
import traceback

import fsspec
import pytest

import shardtree as st
from shardtree.shell.storage import storage_at
from shardtree.stores import _object_errors, object_storage
from shardtree.stores._fsspec import FsspecStorage
from tests.s3.environment import KEY, ROOT, SECRET, TOKEN, at
from tests.s3.jobs import tree
from tests.s3.server import Server

pytest.importorskip("obstore")

SIGNED = f"https://me:{SECRET.replace('/', '-')}@host/run?X-Amz-Credential={KEY}&X-Amz-Signature={TOKEN}"


ACTIONS = ("GetObject", "PutObject", "ListObjectsV2", "HeadObject", "DeleteObjects")


def check_shows_nothing(
    server: Server,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    actions: tuple[str, ...] = ACTIONS,
) -> None:
    """Let each kind of request fail in each way; assert that nothing which is said or stored has a secret."""
    caplog.set_level(0)
    texts = [repr(at()), repr(storage_at(ROOT)), repr(object_storage(ROOT, config={"secret_access_key": SECRET}))]
    st.save(tree(1.0), at())
    for action, fault in itertools.product(actions, ["expired", "refuse", "busy", "conflict", "cut"]):
        server.reset()
        server.fault = lambda request, action=action, fault=fault: fault if request.action == action else None
        for work in (
            lambda: st.save(tree(2.0), at(retries=0), overwrite=True),
            lambda: st.load(tree(0.0), at(retries=0)),
        ):
            try:
                work()
            except Exception as error:
                texts += ["".join(traceback.format_exception(error)), repr(error), str(error)]
    ours = (record for record in caplog.records if record.name.startswith("shardtree"))
    texts += [record.getMessage() + str(record.exc_info) for record in ours]
    texts += [bytes(one.data).decode("latin-1") for one in server.store.objects.values()]
    texts += list(capfd.readouterr())
    shown = [text.replace("Signature=…", "") for text in texts]
    for secret in (KEY, SECRET, TOKEN, "Signature="):
        assert [text for text in shown if secret in text] == []


@pytest.mark.slow
def test_secrets_are_shown_nowhere(
    server: Server, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    check_shows_nothing(server, caplog, capfd)


def test_the_law_of_secrets_catches_what_a_store_repeats(
    server: Server,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_object_errors, "without_secrets", lambda text, settings=None: text)
    with pytest.raises(AssertionError):
        check_shows_nothing(server, caplog, capfd, ("GetObject",))


class Refusing(fsspec.AbstractFileSystem):
    """A file system whose errors repeat what was asked for."""

    def info(self, path: str, **options: object) -> dict[str, object]:
        raise OSError(f"403 for {path}")


@pytest.mark.parametrize("url", [SIGNED, f"simplecache::{SIGNED}"])
def test_signed_urls_are_shown_without_what_signs_them(url: str) -> None:
    texts = []
    try:
        texts.append(repr(storage_at(url)))
    except st.errors.StorageError as error:  # where fsspec lacks what it needs for http
        texts += [str(error), repr(error.__cause__)]
    storage = FsspecStorage(Refusing(), url, "https://host/run")
    with pytest.raises(st.errors.StorageError) as failure:
        storage.length("a")
    texts += [repr(storage), "".join(traceback.format_exception(failure.value))]
    for secret in (KEY, TOKEN, SECRET.replace("/", "-")):
        assert [text for text in texts if secret in text] == []
