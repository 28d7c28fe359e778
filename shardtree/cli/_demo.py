"""The demo: save a training state from several processes, load it in another layout, and show that nothing changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import RawArray
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
from torch import Tensor

from ..layouts import join_columns, shard_columns
from ..mapping import ShardedTensor
from ..plans import level_writes
from ..world import World, run_processes
from ._layout import BY_HIDDEN, BY_UNITS, Layout
from ._printer import Printer
from ._ranks import Counts, load_rank, save_rank
from ._state import held_bytes, meta, shards_of, training_state
from ._verdict import verdict
from ._weights import Source, find_source, weights_of

DRAWN = "embeddings.word_embeddings.weight"

T = TypeVar("T")


def run_demo(*, ranks: int, load_ranks: int, keep: Path | None, small: bool) -> bool:
    """Print the demo, and return whether everything that was loaded is what was saved.

    Args:
        ranks: how many processes save.
        load_ranks: how many load.
        keep: the checkpoint's folder; None for one that is removed in the end.
        small: whether to take a tiny encoder of made-up weights.

    Raises:
        CheckpointingException: a save or load failed.
    """
    began, source, printer = time.monotonic(), find_source(small=small), Printer()
    whole = meta(weights_of(source))
    before, after = (_states(whole, *cut, source) for cut in ((BY_UNITS, ranks), (BY_HIDDEN, load_ranks)))
    with _folder(keep) as folder:
        printer.introduction(source, whole, before[0], folder)
        expected = _bytes_by_writer(before)
        task = partial(save_rank, source=source, folder=folder)
        saved = _run(printer, "save", task, expected)
        printer.saved(saved, _files(folder))
        task_load = partial(load_rank, source=source, folder=folder)
        results = _run(printer, "load", task_load, [held_bytes(state) for state in after])
        loaded, embeddings = [result[0] for result in results], results[0][1]
        printer.loaded(loaded)
    printer.layouts(_drawn(before), _drawn(after))
    findings = verdict(before[0], loaded, embeddings)
    printer.findings(findings, embeddings, pretrained=source.folder is not None)
    printer.goodbye(time.monotonic() - began, keep)
    return all(finding.holds for finding in findings)
