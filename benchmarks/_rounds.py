"""Alternating rounds: everybody saves and loads once a round, each time on the same warm memory, in another order."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from ._contenders import LOAD_COLUMNS, SAVE, Contender, contenders
from ._work import Tensors, Work, work

Seconds = dict[tuple[str, str], list[float]]
"""Of each round, by operation and row."""


def measure(
    ranks: int,
    folder: Path,
    *,
    size: int,
    tensors: int,
    rounds: int,
    tries: int,
    threads: int,
    everybody: Callable[[int], tuple[Contender, ...]] = contenders,
    make: Callable[..., Work] = work,
) -> tuple[int, Seconds]:
    """Return the bytes saved and the seconds that each operation took.

    Args:
        ranks: how many processes take part.
        folder: an existing folder, which is left empty.
        size: of all tensors together, in bytes.
        tensors: how many there are.
        rounds: that count; one before them warms everything up and checks what was loaded.
        tries: in a row, of which the fastest counts; more where it stands alone, fewer of what takes long.
        threads: that torch may use in each process.
        everybody: who takes part with that many processes.
        make: makes a rank's work of the rank, `ranks`, `folder`, `size` and `tensors`.
    """
    run = partial(
        _run,
        ranks=ranks,
        folder=folder,
        size=size,
        tensors=tensors,
        rounds=rounds,
        tries=tries,
        threads=threads,
        everybody=everybody,
        make=make,
    )
    if ranks == 1:
        return run(0)
    results = processes.get_context("spawn").SimpleQueue()
    processes.spawn(_process, (run, ranks, folder, results), nprocs=ranks)
    measured: tuple[int, Seconds] = results.get()
    return measured


def _process(rank: int, run: Callable[[int], Any], ranks: int, folder: Path, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    measured = run(rank)
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def _run(
    rank: int,
    *,
    ranks: int,
    folder: Path,
    size: int,
    tensors: int,
    rounds: int,
    tries: int,
    threads: int,
    everybody: Callable[[int], tuple[Contender, ...]],
    make: Callable[..., Work],
) -> tuple[int, Seconds]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    mine = make(rank, ranks, folder, size=size, tensors=tensors)
    taking_part = everybody(ranks)
    _round(mine, taking_part, check=True, tries=1)
    seconds: Seconds = {}
    for number in range(rounds):
        for place, value in _round(mine, _shuffled(taking_part, number), check=False, tries=tries).items():
            seconds.setdefault(place, []).append(value)
    torch.set_num_threads(before)
    return mine.nbytes, seconds


def _shuffled(everybody: tuple[Contender, ...], number: int) -> tuple[Contender, ...]:
    """Return everybody in an order that every rank knows, so that nobody always follows the same other one."""
    return tuple(Random(number).sample(everybody, len(everybody)))


def _round(mine: Work, everybody: tuple[Contender, ...], *, check: bool, tries: int) -> dict[tuple[str, str], float]:
    """Return the seconds of one round, each the fastest of some tries.

    A contender's files are removed before the next one begins: nobody overwrites, and only one contender's pages are
    waiting to reach the disk, too few for the system to slow down whoever writes.
    """
    seconds = {}
    for one in everybody:
        folder = mine.folder / "files"
        seconds[SAVE, one.name] = _saved(mine, one, folder, tries)
        for place, load in one.loads.items():
            if check:
                _clear(mine)
            seconds[place], loaded = _loaded(mine, partial(load, mine, folder), one.tidy_up, tries)
            if check:
                _check(mine, place, loaded)
            del loaded
        _on_rank_zero(mine, partial(shutil.rmtree, folder))
    return seconds


# A virtual machine gives free memory back to its host after a second or two, and getting a page again is up to ten
# times slower than writing to it, which would drown every difference between contenders. So everything is tried in a
# row, each save right after the files of the one before are gone, whose pages it gets, until the three fastest agree;
# the fastest counts.


def _saved(mine: Work, one: Contender, folder: Path, tries: int) -> float:
    """Return the seconds of the fastest save; the files of the last one stay."""
    seconds: list[float] = []
    while _goes_on(mine, seconds, tries):
        _on_rank_zero(mine, partial(shutil.rmtree, folder, ignore_errors=True))
        _on_rank_zero(mine, folder.mkdir)
        seconds.append(_timed(mine, partial(one.save, mine, folder))[0])
    return min(seconds)


def _loaded(mine: Work, load: Callable[[], Tensors], tidy_up: Callable[[], None], tries: int) -> tuple[float, Tensors]:
    """Return the seconds of the fastest load, and what the last one gave."""
    seconds: list[float] = []
    loaded: Tensors = {}
    while _goes_on(mine, seconds, tries):
        loaded = {}  # frees what the try before made
        tidy_up()
        taken, loaded = _timed(mine, load)
        seconds.append(taken)
    return min(seconds), loaded


_LONG = 5.0
"""Seconds of a try that isn't repeated: whether memory was cold is a small part of that."""

_MOST = 20.0
"""Seconds of all tries together after which there are no more."""

_ALIKE = 1.05
"""The most that the third fastest try of those in a row may take of the fastest one's time."""


def is_enough(seconds: Sequence[float], tries: int) -> bool:
    """Return whether nothing is tried again: the fastest ones agree in what they found, or it takes too long.

    Args:
        seconds: of the tries so far.
        tries: the least of what is quick; four times as many are the most. One is no reason to look for another.

    Examples:
        >>> is_enough([0.31, 0.30, 1.2, 0.3], 3), is_enough([0.30, 0.31, 1.2], 3), is_enough([5.5], 3)
        (True, False, True)
    """
    if not seconds or (len(seconds) < tries and min(seconds) < _LONG):
        return False
    fastest = sorted(seconds)[:3]
    differ = tries > 1 and fastest[-1] > _ALIKE * fastest[0]
    return not differ or fastest[0] >= _LONG or len(seconds) >= 4 * tries or sum(seconds) >= _MOST


def _goes_on(mine: Work, seconds: list[float], tries: int) -> bool:
    """Return whether there is another try, the same on all ranks."""
    wanted = torch.tensor(not is_enough(seconds, tries))
    if mine.ranks > 1:
        dist.broadcast(wanted, 0)
    return bool(wanted)


def _timed(mine: Work, action: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long the slowest rank took, and this rank's result."""
    gc.collect()  # so that nobody pays for what the one before has left
    _meet(mine)
    start = time.perf_counter()
    result = action()
    _meet(mine)
    return time.perf_counter() - start, result


def _meet(mine: Work) -> None:
    if mine.ranks > 1:
        dist.barrier()


def _on_rank_zero(mine: Work, action: Callable[[], Any]) -> None:
    _meet(mine)
    if mine.rank == 0:
        action()
    _meet(mine)


def _clear(mine: Work) -> None:
    for tensor in (*mine.targets.values(), *mine.columns.values()):
        tensor.zero_()


def _check(mine: Work, place: tuple[str, str], loaded: Tensors) -> None:
    expected = _expected_columns(mine) if place[0] == LOAD_COLUMNS else mine.rows
    for name, tensor in loaded.items():
        if not torch.equal(tensor, expected[name]):
            raise ValueError(f"{place}: {name!r} was loaded wrong")


def _expected_columns(mine: Work) -> Tensors:
    expected = {}
    for name, tensor in mine.rows.items():
        parts = [torch.empty_like(tensor) for _ in range(mine.ranks)]
        dist.all_gather(parts, tensor)
        expected[name] = torch.cat(parts).chunk(mine.ranks, 1)[mine.rank]
    return expected
