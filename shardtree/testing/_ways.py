"""The law that every way to reshard, in memory, between ranks or by files, gives the same bits and follows its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from ..core.trees import diff
from ..errors import render_path, shorten
from ..inspection import explain_ranks
from ..live import redistribute, simulate
from ..live.resharding import plan_reshard, reshard, with_relays
from ..shell.checkpoint import load as st_load
from ..shell.checkpoint import save as st_save
from ..shell.storage import Directory, ReadReport
from ..shell.table import LoadOptions, Strategies
from ..shell.world import World
from ..stores import MemoryStorage
from ..transforms import unbox
from ._bits import outline
from ._law_reshard import check_reshard

Way = Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Any, Any]]
"""Function from all ranks' trees and targets to all results, the moved bytes, and the bytes of the plan."""

Send = Callable[[World, Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]], None]


def check_ways(
    trees: Sequence[Any],
    targets: Sequence[Any],
    /,
    *,
    backend: str | None = None,
    version: int = 1,
    strategies: Strategies | None = None,
    directory: Callable[[], Directory] = MemoryStorage,
    transport: Send | None = None,
    ways: Mapping[str, Way] | None = None,
) -> None:
    """Raise unless every way to reshard trees gives the same bits, and moves as many bytes as its plan says.

    - *Memory to memory*: `reshard`, which `check_reshard` compares element by element.
    - *Ranks to ranks*: `redistribute`, also in small steps, and with relays. The bytes between each pair of ranks are
      those of the plan, and their sum is the lower bound.
    - *Memory to file to memory*: `save` and `load`, also with a save in the background, and with ranks that read for
      each other. Each rank sends and receives as many bytes as `explain_ranks` predicts.

    Values are converted to the dtypes of the targets. The trees together must hold whole tensors; keep shapes small.

    Args:
        trees: Tree of each rank.
        targets: Target tree of each rank, for any number of ranks.
        backend: Format of the files; the native one by default.
        version: Version of the format.
        strategies: Dispatch table with the format's rows; None for the process's.
        directory: Function that returns a new place for a checkpoint at each call: a path, a URL or a `Storage`.
        transport: Function that exchanges buffers of bytes by peer, called as ``transport(world, outgoing, incoming)``
            on each rank once a step; ``world.exchange`` by default.
        ways: Other ways by name, to try instead: functions of the trees and targets that return all ranks' results, the
            bytes that moved, and the bytes that a plan predicted. The last two may have any form that `==` can compare.

    Raises:
        AssertionError: A way gives other bits or moves other bytes; the error names the way, and the rank and the paths
            that differ, or both counts of bytes.

    Examples:
        >>> from shardtree.layouts import Mesh, PartitionSpec, abstract, shard
        >>> tree = {"w": torch.arange(24).view(6, 4)}
        >>> by_rows = shard(tree, Mesh(dp=3), PartitionSpec("dp"))
        >>> by_columns = abstract(tree, Mesh(tp=2), PartitionSpec(None, "tp"))
        >>> check_ways(by_rows, by_columns, backend="zarr", version=3)
        >>> def losing_a_bit(world, outgoing, incoming):
        ...     world.exchange(outgoing, incoming)
        ...     for got in incoming.values():
        ...         got[0] ^= 1
        >>> check_ways(by_rows, by_columns, transport=losing_a_bit)
        Traceback (most recent call last):
        ...
        AssertionError: ranks to ranks: rank 0 gets other values than by a reshard in memory at tree['w']
    """
    if ways is None:
        ways = own_ways((backend, version) if backend else None, strategies, directory, transport)
    expected = reshard(trees, targets, cast=True)
    for name, way in ways.items():
        results, moved, plan_bytes = way(trees, targets)
        assert len(results) == len(targets), f"{name}: results of {len(results)} ranks, expected {len(targets)}"
        for rank, (left, right) in enumerate(zip(results, expected, strict=True)):
            _check_same(f"{name}: rank {rank}", unbox(left), unbox(right))
        assert moved == plan_bytes, f"{name}: {moved} bytes moved, and the plan says {plan_bytes}"


def _check_same(where: str, found: Any, expected: Any) -> None:
    if outline(found) == outline(expected):
        return
    apart = diff(found, expected)
    paths = [render_path(path) for path in (*apart.mismatch, *apart.only_left, *apart.only_right)]
    at = ", ".join(shorten(paths, shown=3)) or "no path, but in another order or containers of another class"
    raise AssertionError(f"{where} gets other values than by a reshard in memory at {at}")


def own_ways(
    save_format: tuple[str, int] | None = None,
    strategies: Strategies | None = None,
    directory: Callable[[], Directory] = MemoryStorage,
    transport: Send | None = None,
) -> dict[str, Way]:
    """Return the library's ways to reshard trees, by name.

    Args:
        save_format: Backend and version of the files; the native format by default.
        strategies: Dispatch table, as in `check_ways`.
        directory: Function that returns a new place for a checkpoint, as in `check_ways`.
        transport: Function that exchanges buffers between ranks, as in `check_ways`.
    """
    ranks = partial(_between_ranks, transport)
    files = partial(_through_files, save_format, strategies, directory)
    return {
        "memory to memory": _through_memory,
        "ranks to ranks": ranks,
        "in small steps": partial(ranks, bound=40),
        "ranks that pass on": partial(ranks, relay=True),
        "memory to file to memory": files,
        "saved in the background": partial(files, later=True),
        "ranks that read for each other": partial(files, exchange="always"),
    }


def _through_memory(trees: Sequence[Any], targets: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
    check_reshard(trees, targets, reshard=partial(reshard, cast=True))
    return reshard(trees, targets, cast=True), None, None


def _between_ranks(
    transport: Send | None, trees: Sequence[Any], targets: Sequence[Any], *, relay: bool = False, bound: int = 2**20
) -> tuple[Sequence[Any], Any, Any]:
    links: Counter[tuple[int, int]] = Counter()

    def on_rank(world: World) -> Any:
        send = partial(transport, world) if transport else world.exchange

        def counted(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
            links.update({(world.rank, to): data.numel() for to, data in outgoing.items()})
            send(outgoing, incoming)

        tree, target = ((side[world.rank : world.rank + 1] or [None])[0] for side in (trees, targets))
        options: dict[str, Any] = {"relay": relay, "max_bytes_in_flight": bound, "transport": counted}
        return redistribute(tree, target, cast=True, world=world, **options)

    results = simulate(max(len(trees), len(targets)), on_rank)
    plan = plan_reshard(trees, targets, cast=True)
    least = plan.lower_bound
    plan = with_relays(plan) if relay else plan
    return results[: len(targets)], (dict(links), plan.bytes_moved), (plan.links, least)


def _through_files(
    save_format: tuple[str, int] | None,
    strategies: Strategies | None,
    directory: Callable[[], Directory],
    trees: Sequence[Any],
    targets: Sequence[Any],
    *,
    later: bool = False,
    exchange: Literal["never", "always"] = "never",
) -> tuple[Sequence[Any], Any, Any]:
    place, reports = directory(), dict[int, ReadReport]()

    def save(world: World) -> None:
        tree = trees[world.rank]
        request = st_save(tree, place, save_format, world=world, async_sharded_save=later, strategies=strategies)
        if request is not None:
            request.execute_sync()

    def load(world: World) -> Any:
        options = LoadOptions(exchange=exchange, verify=None, report=partial(reports.__setitem__, world.rank))
        return st_load(targets[world.rank], place, world=world, cast=True, strategies=strategies, options=options)

    simulate(len(trees), save)
    options = LoadOptions(exchange=exchange, verify=None)
    prediction = explain_ranks(targets, place, cast=True, strategies=strategies, options=options)
    assert prediction.ok is not False, f"the load is predicted to fail: {prediction}"  # None if only values can tell
    results = simulate(len(targets), load)
    moved = [(report.bytes_sent, report.bytes_received) for _, report in sorted(reports.items())]
    return results, moved, [(read.sent, read.received) for read in prediction.reads]
