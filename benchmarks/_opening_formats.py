"""Opening and writing other formats' metadata of very many chunks, beside ``pickle`` and the torch classes in it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

import shardtree as st
from shardtree.codec import Entry, encode_header
from shardtree.strategies.torch_dist._metadata_write import Stored, encode_index_file

from ._bars import Bar, Settings
from ._opening_keys import row_shards
from ._turns import in_turns, ratio

KINDS = ((1_000, 100), (100_000, 1))
"""How many tensors, of how many chunks each."""

MILLION = (10_000, 100)
MOST_OF_PICKLE, MOST_SECONDS = 1.0, 1.0
MODEL = 50_000, 200
"""Tensors and files of a Hugging Face model."""

OPEN, LOADS = "open_checkpoint", "pickle.loads of the same file"
WRITE, DUMPS = "write", "pickle.dumps of torch's Metadata"
_FILES = 64


def metadata_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bars of `.metadata`: opened beside ``pickle.loads``, and written beside ``pickle.dumps``."""
    found = []
    for tensors, chunks in ((4, 5), (20, 1)) if settings.quick else (*KINDS, MILLION):
        place = folder / f"{tensors}-{chunks}"
        place.mkdir()
        stored = stored_chunks(tensors, chunks)
        write = partial(encode_index_file, stored, "save", None, {key: (key,) for key in stored.columns.keys})
        metadata = pickle.loads(write())
        # As torch writes it, whose objects have numbers that ours needn't give them.
        (place / ".metadata").write_bytes(pickle.dumps(metadata))
        actions: dict[str, Callable[[], object]] = {
            OPEN: partial(_opened, place, tensors),
            LOADS: partial(_unpickled, place),
            WRITE: write,
            DUMPS: partial(pickle.dumps, metadata),
        }
        several = tensors * chunks < 1_000_000 and not settings.quick
        seconds = in_turns(actions, rounds=3 if several else 1, tries=2 if several else 1)
        what = f".metadata of {tensors * chunks:,} chunks of {tensors:,} tensors"
        for ours, theirs in ((OPEN, LOADS), (WRITE, DUMPS)):
            taken, other = median(seconds[ours]), median(seconds[theirs])
            times = ratio(seconds, ours, theirs)
            found.append(Bar(f"{what}: {ours}", theirs, taken, other, times, MOST_OF_PICKLE))
    return found


def stored_chunks(tensors: int, chunks: int) -> Stored:
    """Return what a `.metadata` says of so many tensors of so many chunks each."""
    row = np.arange(tensors * chunks)
    files = tuple(f"__{number}_0.distcp" for number in range(_FILES))
    length = np.full(row.size, 1024)
    return Stored(row_shards(tensors, chunks), files, row % _FILES, row // _FILES * 1024, length, {})


def _opened(place: Path, tensors: int) -> st.checkpoint.OpenCheckpoint:
    tree = st.open_checkpoint(place)
    if len(tree) != tensors:
        raise ValueError(f"{len(tree)} tensors where {tensors} were written")
    return tree


def _unpickled(place: Path) -> object:
    return pickle.loads((place / ".metadata").read_bytes())


def model_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bar of opening a Hugging Face model of very many tensors in many files, which have no content."""
    tensors, files = (40, 4) if settings.quick else MODEL
    write_model(folder, tensors, files)
    rounds, tries = (1, 1) if settings.quick else (5, 3)
    taken = median(in_turns({OPEN: partial(_opened, folder, tensors)}, rounds=rounds, tries=tries)[OPEN])
    what = f"a Hugging Face model of {tensors:,} tensors in {files} files: open"
    return [Bar(what, "", taken, None, taken, MOST_SECONDS)]


def write_model(folder: Path, tensors: int, files: int) -> None:
    """Write a Hugging Face model of so many tensors, in files that are holes."""
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        keys = [f"model.layers.{number}.experts.{expert}.weight" for expert in range(tensors // files)]
        size = 128 * 64 * 2
        header = encode_header(
            [Entry(key, "BF16", (128, 64), at * size, (at + 1) * size) for at, key in enumerate(keys)]
        )
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + len(keys) * size)
        weight_map |= dict.fromkeys(keys, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
