"""What a save does to the file system, call by call: everything is on the medium before the checkpoint counts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.sampling import usually

SAVE = """
import sys
import torch
import shardtree as st

folder, before, form, ranks, durable = *sys.argv[1:4], *map(int, sys.argv[4:])
native = ("safetensors", 1)
CHOICES = {
    "native": (native, None), "torch_dist": (("torch_dist", 1), None), "dcp": (("dcp", 1), None),
    "zarr": (("zarr", 3), None), "huggingface": (("huggingface", 1), None), "both": (("huggingface", 1), native),
}


def save(world, form):
    shard = st.ShardedTensor.from_rank_offsets("w", torch.ones(2, 300), (0, world.rank, ranks))
    copied = st.ShardedTensor.from_rank_offsets("norm", torch.ones(5), replica_id=world.rank)
    tree = {"w": shard, "norm": copied} | ({} if form == "huggingface" else {"step": 1})
    options = st.SaveOptions(durable=bool(durable))
    st.save(tree, folder, *CHOICES[form], world=world, overwrite=bool(before), options=options)


if before:
    st.simulate(ranks, lambda world: save(world, before))
    open(folder + "/config.json", "w").close()
open(folder + ".begin", "w").close()
st.simulate(ranks, lambda world: save(world, form))
open(folder + ".end", "w").close()
"""

CALLS = "openat,open,creat,write,writev,pwrite64,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync"
MORE = "rename,renameat,renameat2,mkdir,mkdirat,link,linkat,unlink,unlinkat,rmdir"
COMMITS = re.compile(r"(metadata\.json|\.metadata|zarr\.json|model\.safetensors(\.index\.json)?)")


@dataclass(frozen=True)
class Event:
    """One thing that was done: data written to a file, an entry made in a folder, a wait for a file or folder."""

    kind: str
    path: str
    source: str = ""


def parse_trace(text: str) -> list[Event]:
    """Return what a trace of strace says, in order; ``-f -y``, so that each descriptor comes with its path."""
    events: list[Event] = []
    unfinished: dict[str, str] = {}
    for line in text.splitlines():
        found = re.match(r"(?:\[pid\s+)?(\d+)\]?\s+(.*)", line)
        if found is None:
            continue
        pid, rest = found.groups()
        if rest.endswith("<unfinished ...>"):
            unfinished[pid] = rest.removesuffix("<unfinished ...>").rstrip()
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
            rest = unfinished.pop(pid, "") + resumed[1]
        events += _events(rest)
    return events


def _events(call: str) -> Iterable[Event]:
    if re.search(r"= -1 E\w+", call):
        return
    name = call.partition("(")[0]
    held = re.match(r"\w+\(\d+<([^>]*)>", call)
    quoted = [bytes(path, "ascii").decode("unicode_escape") for path in re.findall(r'"((?:[^"\\]|\\.)*)"', call)]
    if name in ("write", "writev", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate") and held:
        yield Event("write", held[1])
    elif name in ("fsync", "fdatasync") and held:
        yield Event("sync", held[1])
    elif name in ("openat", "open", "creat") and "O_CREAT" in call and quoted and not quoted[0].endswith(".new"):
        yield Event("make", os.path.abspath(quoted[0]))
    elif name in ("mkdir", "mkdirat") and quoted:
        yield Event("make folder", os.path.abspath(quoted[0]))
    elif name in ("link", "linkat") and len(quoted) == 2 and not _is_apart(quoted[1]):
        yield Event("link", os.path.abspath(quoted[1]), os.path.abspath(quoted[0]))
    elif name.startswith("rename") and len(quoted) == 2:
        kind = "exchange" if "RENAME_EXCHANGE" in call else "rename"
        yield Event(kind, os.path.abspath(quoted[1]), os.path.abspath(quoted[0]))


@dataclass
class Medium:
    """What isn't on the medium yet: files with data, and folders with entries."""

    data: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)

    def take(self, event: Event) -> None:
        if event.kind == "write":
            self.data.add(event.path)
        elif event.kind == "sync":
            self.data.discard(event.path)
            self.entries.discard(event.path)
        else:
            left = event.source if event.kind in ("rename", "exchange") else event.path
            self.entries |= {os.path.dirname(path) for path in (event.path, left)}
        if event.kind in ("rename", "exchange"):
            self.data = {_renamed(path, event) for path in self.data}
            self.entries = {_renamed(path, event) for path in self.entries}


def _renamed(path: str, event: Event) -> str:
    pairs = [(event.source, event.path), *([(event.path, event.source)] if event.kind == "exchange" else [])]
    for old, new in pairs:
        if path == old or path.startswith(f"{old}/"):
            return new + path[len(old) :]
    return path


def check_order(events: Sequence[Event], folder: str, commit: int) -> None:
    """Raise unless all is on the medium before the event that commits, but what only says who saves, and after it too.

    Args:
        events: of the save alone.
        folder: that it goes to.
        commit: number of the event.
    """
    medium = Medium()
    above = os.path.dirname(folder)
    for event in events[:commit]:
        medium.take(event)
    loose = {path for path in (*medium.data, *medium.entries) if path.startswith(above) and not _is_apart(path)}
    assert not loose, f"not on the medium before {events[commit]}: {sorted(loose)}"
    late = [event for event in events[commit + 1 :] if event.kind in ("write", "make") and folder in event.path]
    assert not late, f"done after {events[commit]}: {late}"
    medium.take(events[commit])
    for event in events[commit + 1 :]:
        if event.kind == "sync":
            medium.take(event)
    within = {os.path.dirname(path) for path in (events[commit].path, events[commit].source)} & medium.entries
    assert not within, f"not on the medium after {events[commit]}: {sorted(within)}"


def _is_apart(path: str) -> bool:
    """Return whether a name is of no consequence to the checkpoint: who saves, and what it is tried with."""
    return os.path.basename(path).strip(".").startswith(("owner.json", "probe"))


def commit_of(events: Sequence[Event], folder: str) -> int:
    """Return the number of the event that makes a folder a checkpoint: an exchange, else the last rename that does."""
    for number, event in enumerate(events):
        if event.kind == "exchange" and event.path == folder:
            return number
    found = [
        number
        for number, event in enumerate(events)
        if event.kind == "rename" and os.path.dirname(event.path) == folder and COMMITS.fullmatch(Path(event.path).name)
    ]
    assert found, "no event commits"
    return found[-1]


def traced(tmp_path: Path, form: str, ranks: int, *, before: str = "", durable: bool = True) -> tuple[list[Event], str]:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    folder = str(tmp_path / "step")
    script = tmp_path / "save_once.py"
    script.write_text(SAVE)
    trace = tmp_path / "trace"
    command = [strace, "-f", "--seccomp-bpf", "-y", "-qq", "-s", "300", "-e", f"trace={CALLS},{MORE}", "-o", str(trace)]
    arguments = [folder, before, form, str(ranks), str(int(durable))]
    done = subprocess.run([*command, sys.executable, script, *arguments], timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = parse_trace(trace.read_text(errors="replace"))
    names = [event.path for event in events]
    return events[names.index(f"{folder}.begin") + 1 : names.index(f"{folder}.end")], folder


EVERY_FORMAT = [
    ("", form, n) for form in ("native", "torch_dist", "dcp", "zarr", "huggingface", "both") for n in (1, 2)
]
OVERWRITES = [("native", "native", 2), ("dcp", "torch_dist", 2), ("native", "zarr", 2), ("zarr", "huggingface", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "form", "ranks"), [("", "native", 2), *usually(EVERY_FORMAT, 1), *usually(OVERWRITES, 1)]
)
def test_all_is_on_the_medium_before_the_checkpoint_counts(tmp_path: Path, before: str, form: str, ranks: int) -> None:
    events, folder = traced(tmp_path, form, ranks, before=before)
    assert sum(event.kind == "sync" for event in events) > 5
    check_order(events, folder, commit_of(events, folder))


@pytest.mark.slow
def test_what_is_exchanged_is_on_the_medium_before(tmp_path: Path) -> None:
    events, folder = traced(tmp_path, "native", 1, before="dcp")
    commit = commit_of(events, folder)
    assert events[commit].kind == "exchange"
    check_order(events, folder, commit)


@pytest.mark.slow
def test_nothing_is_waited_for_without_durable(tmp_path: Path) -> None:
    events, _ = traced(tmp_path, "dcp", 1, durable=False, before="native")
    assert not [event for event in events if event.kind == "sync"]
    assert [event.kind for event in events].count("exchange") >= 1


STEP = "/runs/step"
SOUND = [
    Event("make folder", STEP),
    Event("sync", "/runs"),
    Event("make folder", f"{STEP}/save-1"),
    Event("sync", STEP),
    Event("make", f"{STEP}/save-1/data"),
    Event("write", f"{STEP}/save-1/data"),
    Event("sync", f"{STEP}/save-1/data"),
    Event("sync", f"{STEP}/save-1"),
    Event("write", f"{STEP}/.metadata.json.new"),
    Event("sync", f"{STEP}/.metadata.json.new"),
    Event("rename", f"{STEP}/metadata.json", f"{STEP}/.metadata.json.new"),
    Event("sync", STEP),
]


@pytest.mark.parametrize("left_out", [number for number, event in enumerate(SOUND) if event.kind == "sync"])
def test_the_check_of_the_order_sees_each_wait_that_is_left_out(left_out: int) -> None:
    events = [event for number, event in enumerate(SOUND) if number != left_out]
    with pytest.raises(AssertionError, match="not on the medium"):
        check_order(events, STEP, commit_of(events, STEP))


def test_the_check_of_the_order_sees_a_rename_that_comes_first() -> None:
    first = [*SOUND[:4], *SOUND[8:11], *SOUND[4:8], SOUND[11]]
    with pytest.raises(AssertionError, match="done after"):
        check_order(first, STEP, commit_of(first, STEP))


def test_a_trace_is_read_call_by_call() -> None:
    text = "\n".join(
        [
            '7 openat(AT_FDCWD</runs>, "/runs/a", O_WRONLY|O_CREAT|O_CLOEXEC, 0666) = 3</runs/a>',
            '7 writev(3</runs/a>, [{iov_base="x", iov_len=1}], 1 <unfinished ...>',
            "8 fsync(4</runs>) = 0",
            "7 <... writev resumed>) = 1",
            "7 fsync(3</runs/a>) = -1 EIO (Input/output error)",
            '7 renameat2(AT_FDCWD</runs>, "/runs/a", AT_FDCWD</runs>, "/runs/b", RENAME_EXCHANGE) = 0',
        ]
    )
    made = [Event("make", "/runs/a"), Event("sync", "/runs"), Event("write", "/runs/a")]
    assert parse_trace(text) == [*made, Event("exchange", "/runs/b", "/runs/a")]
