"""What object stores do alike: S3 of the tests' own server, Google's generations, and moto's S3, which isn't ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

import pytest

import shardtree as st
from shardtree.core import limits
from shardtree.shell.storage import storage_at
from shardtree.storage import SizedBuffers
from shardtree.testing import check_storage
from tests.s3.environment import ROOT, s3
from tests.s3.jobs import tree, value_of
from tests.s3.server import serving

pytest.importorskip("obstore")


def google(patch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving() as running:
        key = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({"gcs_base_url": running.url, **key}))
        patch.setenv("GOOGLE_BASE_URL", running.url)
        yield "gs://bucket/runs"


def our_s3(patch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3(patch):
        yield ROOT


BUCKETS = count()


def moto(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a bucket of an independent implementation; its servers share what a process has, so it is a new one."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "a-key-for-moto")
    patch.setenv("AWS_REGION", "us-east-1")
    bucket = f"moto-{next(BUCKETS)}"
    pytest.importorskip("boto3").client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    yield f"s3://{bucket}/run"
    server.stop()


@pytest.fixture(params=[our_s3, google, pytest.param(moto, marks=[pytest.mark.slow, pytest.mark.peers])])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from request.param(monkeypatch)


@pytest.mark.slow
def test_storages_there_keep_their_promises(root: str) -> None:
    names = count(1)
    check_storage(lambda: storage_at(f"{root}/{next(names)}"))


def test_saves_overwrites_and_series(root: str) -> None:
    st.save(tree(1.0), root)
    st.save(tree(2.0), root, overwrite=True)
    assert value_of(root) == 2.0 and st.verify(root) == ()
    with pytest.raises(st.errors.AlreadyACheckpoint):
        st.save(tree(3.0), root)
    series = st.CheckpointSeries(f"{root}/series")
    for step in (1, 2, 3):
        series.save(tree(float(step)), step)
    assert series.remove(series.plan_removal(st.retention.keep_last(1))) == (1, 2)
    assert [each.number for each in series.steps()] == [3] and value_of(series.at()) == 3.0
    folders = {name for name in storage_at(f"{root}/series").names() if name.startswith("step")}
    assert folders == {"step_00000003"}


@pytest.mark.parametrize("there", [False, True])
def test_of_two_savers_one_wins_and_the_other_is_told(root: str, there: bool) -> None:
    if there:
        st.save(tree(1.0), root)
    both = [st.save(tree(value), root, async_sharded_save=True, overwrite=there) for value in (2.0, 3.0)]
    both[1].execute_sync()
    with pytest.raises(st.errors.CheckpointReplaced if there else st.errors.AlreadyACheckpoint):
        both[0].execute_sync()
    assert value_of(root) == 3.0


def test_a_large_file_goes_in_parts(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not root.startswith("s3://moto"):  # S3 itself takes no smaller parts than 5 MiB
        monkeypatch.setattr(limits, "UPLOAD_PART_BYTES", 1000)
    storage, data = storage_at(root), bytes(range(256)) * 4096 * 9
    data = data if root.startswith("s3://moto") else data[:10_240]
    assert storage.write("x/file", SizedBuffers(len(data), iter([memoryview(data)])), durable=True) == len(data)
    assert storage.length("x/file") == len(data) and storage.read("x/file") == data
    storage.move("x/file", "y")
    assert storage.names() == ("y",) and storage.read("y") == data
