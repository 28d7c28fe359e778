"""Object stores beside an independent implementation of S3: moto's server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shardtree as st
from shardtree.storage import SizedBuffers, storage_at

pytest.importorskip("obstore")
moto = pytest.importorskip("moto.server")
pytestmark = [pytest.mark.slow, pytest.mark.peers]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    import boto3

    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "a-key-for-moto")
        patch.setenv("AWS_REGION", "us-east-1")
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="moto")
        yield "s3://moto/run"
    server.stop()


def tree(value: float, rows: int = 64) -> dict[str, object]:
    whole = torch.full((rows, 32), value)
    return {"w": st.ShardedTensor.from_rank_offsets("w", whole), "step": int(value)}


def test_saves_overwrites_loads_and_series(bucket: str) -> None:
    st.save(tree(1.0), bucket)
    st.save(tree(2.0), bucket, overwrite=True)
    found = st.load(tree(0.0), bucket)
    assert found["step"] == 2 and bool((found["w"] == 2.0).all()) and st.verify(bucket) == ()
    with pytest.raises(st.errors.AlreadyACheckpoint):
        st.save(tree(3.0), bucket)
    series = st.CheckpointSeries(f"{bucket}/series")
    for step in (1, 2, 3):
        series.save(tree(float(step)), step)
    assert series.remove(series.plan_removal(st.retention.keep_last(1))) == (1, 2)
    assert [each.number for each in series.steps()] == [3]


def test_of_two_savers_one_wins(bucket: str) -> None:
    both = [st.save(tree(value), f"{bucket}/race", async_sharded_save=True) for value in (1.0, 2.0)]
    both[1].execute_sync()
    with pytest.raises(st.errors.AlreadyACheckpoint):
        both[0].execute_sync()
    assert st.load(tree(0.0), f"{bucket}/race")["step"] == 2


def test_a_large_file_goes_in_parts(bucket: str) -> None:
    storage = storage_at(f"{bucket}/large")
    block = memoryview(bytes(range(256)) * 4096 * 9)  # 9 MiB: more than a part
    assert storage.write("file", SizedBuffers(block.nbytes, iter([block])), durable=True) == block.nbytes
    assert storage.length("file") == block.nbytes and storage.read("file") == block
