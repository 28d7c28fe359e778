"""A save imports nothing: in a signal handler it may come into an import, and an import there finds half of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.quick_python.command import quick_python

BEGIN = """
import signal, sys, torch
import shardtree as st
from shardtree.storage import MemoryStorage
from shardtree.retention import keep_last

st.save, st.simulate  # all that a save needs is imported here
comparing = st.SaveOptions(check_replicas=True)  # and what options ask for, as they are made
root, imported = sys.argv[1], []

class Noted:
    def find_spec(self, name, path=None, target=None):
        imported.append(name)

def noted(what, call):
    imported.clear()
    call()
    if imported:
        print(what, *imported)

def tree(rank=0, ranks=1, plain=True):
    leaf = st.ShardedTensor.from_rank_offsets("w", torch.arange(12.0).reshape(3, 4), (0, rank, ranks))
    item = st.ShardedObject("o", {"a": torch.ones(2)}, (ranks,), (rank,))
    return {"w": leaf, "o": item, "step": 3, "rng": torch.arange(9)} if plain else {"w": leaf}

sys.meta_path.insert(0, Noted())
"""

NATIVE = """
def among_others():
    storage = MemoryStorage()
    storage.write("notes.txt", [memoryview(b"x")], durable=False)
    st.save(tree(), storage)

def by_ranks(world):
    st.save(tree(world.rank, world.size), f"{root}/ranks", world=world, options=comparing)

noted("the first save", lambda: st.save(tree(), f"{root}/step"))
noted("an overwrite", lambda: st.save(tree(), f"{root}/step", overwrite=True))
noted("beside other files", among_others)
noted("several ranks", lambda: st.simulate(2, by_ranks))
queue, series = st.AsyncCallsQueue(), st.CheckpointSeries(f"{root}/run", keep=keep_last(1))
request = st.save(tree(), MemoryStorage(), async_sharded_save=True)
queue.schedule_async_request(request)
noted("the commit of an asynchronous save", queue.close)
noted("a step of a series", lambda: [series.save(tree(), step) for step in (1, 2)])
st.load
noted("the first load", lambda: st.load(tree(), f"{root}/step"))
"""

OTHER_FORMATS = """
for name in ("torch_dist", "dcp", "zarr", "huggingface"):
    def save(place, **options):
        st.save(tree(plain=name != "huggingface"), place, (name, 3 if name == "zarr" else 1), **options)

    save(MemoryStorage())  # what docs/series.md says of other formats than ours
    noted(name, lambda: save(f"{root}/{name}"))
    noted(f"{name}, overwritten", lambda: save(f"{root}/{name}", overwrite=True))
"""

IN_A_HANDLER = """
def save_at_once(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    st.save(tree(), f"{root}/at-once")

class Told(Noted):
    def find_spec(self, name, path=None, target=None):
        signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGTERM, save_at_once)
sys.meta_path[0] = Told()  # the worst moment; without any import, it comes as bytes are written
told = []
options = st.SaveOptions(progress=lambda size: told or (told.append(size), signal.raise_signal(signal.SIGTERM)))
st.save(tree(), f"{root}/first", options=options)
for name in ("first", "at-once"):
    assert st.verify(f"{root}/{name}") == ()
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [NATIVE, OTHER_FORMATS, IN_A_HANDLER], ids=["ours", "others", "in a handler"])
def test_a_save_imports_nothing_once_its_name_was_touched(code: str, tmp_path: Path) -> None:
    command = [*quick_python(), "-c", BEGIN + code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
