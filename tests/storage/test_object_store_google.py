"""Google Cloud Storage, as obstore speaks to it: objects have generations, which its conditions name."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

import shardtree as st
from shardtree.storage import SizedBuffers, _object_store, storage_at
from tests.s3.server import Server, serving

pytest.importorskip("obstore")

ROOT = "gs://bucket/runs"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving() as running:
        key = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({"gcs_base_url": running.url, **key}))
        monkeypatch.setenv("GOOGLE_BASE_URL", running.url)
        yield running


def tree(value: float) -> dict[str, object]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.full((64, 32), value)), "step": int(value)}


def value_of(place: object = ROOT) -> float:
    found = st.load(tree(0.0), place)
    assert bool((found["w"] == found["step"]).all())
    return float(found["step"])


def test_saves_overwrites_and_series(server: Server) -> None:
    st.save(tree(1.0), ROOT)
    st.save(tree(2.0), ROOT, overwrite=True)
    assert value_of() == 2.0 and st.verify(ROOT) == ()
    with pytest.raises(st.errors.AlreadyACheckpoint):
        st.save(tree(3.0), ROOT)
    series = st.CheckpointSeries(f"{ROOT}/series")
    for step in (1, 2, 3):
        series.save(tree(float(step)), step)
    assert series.remove(series.plan_removal(st.retention.keep_last(1))) == (1, 2)
    assert [each.number for each in series.steps()] == [3] and value_of(series.at()) == 3.0


@pytest.mark.parametrize("there", [False, True])
def test_of_two_savers_one_wins(server: Server, there: bool) -> None:
    if there:
        st.save(tree(1.0), ROOT)
    both = [st.save(tree(value), ROOT, async_sharded_save=True, overwrite=there) for value in (2.0, 3.0)]
    both[1].execute_sync()
    with pytest.raises(st.errors.CheckpointReplaced if there else st.errors.AlreadyACheckpoint):
        both[0].execute_sync()
    assert value_of() == 3.0


def test_a_large_file_goes_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_object_store, "_PART_BYTES", 1000)
    storage, data = storage_at(ROOT), bytes(range(256)) * 40
    assert storage.write("x/file", SizedBuffers(len(data), iter([memoryview(data)])), durable=True) == len(data)
    assert server.actions().count("UploadPart") == 11 and storage.read("x/file") == data
    storage.move("x/file", "y")
    assert storage.names() == ("y",)
