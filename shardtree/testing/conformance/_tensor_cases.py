"""Cases about tensors: dtypes, strides, keys, partial loads, donated memory and mismatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ...core.geometry import slices
from ...core.lazy import stored
from ...core.mapping import ShardedTensor
from ...errors import CheckpointingException, KeyMismatch
from ...live import simulate
from ...shell.storage import ReadReport, Storage, storage_at
from ...shell.table import LoadOptions, SaveOptions, StrategyAction
from .._bits import bits, check_equal
from .._layouts import even_layout
from .._states import GlobalState
from .._tensors import STORABLE_DTYPES, random_bits
from ._files import file_names, is_not_owner_note
from ._layout_cases import COLUMNS, FLAT_ROWS, GRID, LOADS, ROWS, SHAPE, WHOLE, numbers
from ._subject import (
    Case,
    Promise,
    Subject,
    check_reloaded,
    check_there,
    load_trees,
    save_trees,
    saver,
    together_or_each,
    trees_of,
)

_EVERY_FORMAT_HOLDS = (torch.float32,)
# Keys that would climb out of the folder, collide on file systems that ignore case or normalise Unicode, are too long
# for a file's name, or are names that some format uses itself.
_KEYS = (
    "a.weight", "a/weight", "../w", "/w", "w w", "é\u4e2d", "metadata.json", "zarr.json", "w#1", "%41", "shard_0_1",
    "k" * 300, "W", "w/w", "w ", "w\n", "w:w", "w\\w", "e\u0301", "__metadata__",
)  # fmt: skip


def dtypes(subject: Subject) -> Iterator[Case]:
    """Yield a case for each dtype, with random bits: NaNs with payloads, signed zeros, numbers that a cast rounds."""
    kinds = sorted(STORABLE_DTYPES, key=lambda kind: kind not in _EVERY_FORMAT_HOLDS)
    each = (Case(str(kind)[6:], partial(_check_dtypes, subject, kind), kind in _EVERY_FORMAT_HOLDS) for kind in kinds)
    yield from together_or_each(partial(_check_dtypes, subject, *kinds), each)


def _check_dtypes(subject: Subject, *kinds: torch.dtype) -> None:
    whole = {f"{kind}.{len(shape)}": random_bits(shape, kind, 1) for kind in kinds for shape in (SHAPE, ())}
    layout = {key: even_layout(tuple(tensor.shape), 1) for key, tensor in whole.items()}
    check_reloaded(subject, GlobalState(whole, {}, {}), layout, layout)


def views(subject: Subject) -> Iterator[Case]:
    """Yield tensors whose memory isn't contiguous or is shared, and one that requires gradients."""
    whole = numbers((6, 4))
    wide = torch.stack([whole, whole + 100], dim=-1)
    kinds = {
        "a transposed view": whole.T,
        "every second element": wide[:, :, 0],
        "one row for all": whole[:1].expand(6, 4),
        "a parameter": torch.nn.Parameter(whole.clone()),
        "a conjugate that is not computed yet": torch.complex(whole, whole + 100).conj(),
    }
    for name, tensor in kinds.items():
        yield Case(name, partial(_check_view, subject, tensor))
    yield Case("several tensors of one memory", partial(_check_shared, subject))


def _check_view(subject: Subject, tensor: torch.Tensor) -> None:
    # The program goes on using a view's memory, so that a backend must not reorder it in place.
    before = bits(tensor)
    place = save_trees(subject, [{"w": ShardedTensor.from_rank_offsets("w", tensor)}])
    assert bits(tensor) == before, "the save changed the tensor"
    expected = GlobalState({"w": tensor.detach().resolve_conj().contiguous()}, {}, {})
    check_there(subject, expected, {"w": even_layout(tuple(tensor.shape), 1)}, place)


def _check_shared(subject: Subject) -> None:
    """Raise unless each of several tensors that share memory comes back with its own elements."""
    # The tensors begin at the same address: a backend that identifies tensors by address would mix them up.
    whole = numbers(SHAPE)
    state = GlobalState({"w": whole, "rows": whole[:2], "tied": whole, "columns": whole[:, :3]}, {}, {})
    layout = {key: even_layout(tuple(tensor.shape), 1) for key, tensor in state.tensors.items()}
    check_reloaded(subject, state, layout, layout)


def lazy_data(subject: Subject) -> Iterator[Case]:
    """Yield saves of lazy tensors, whose elements are read only during the save, like those of an open checkpoint."""
    kinds = {"a tensor of another checkpoint": lambda lazy: lazy, "a view of one": lambda lazy: lazy[1:, 2:].T}
    for name, view in kinds.items():
        yield Case(name, partial(_check_lazy, subject, view), required=True)


def _check_lazy(subject: Subject, view: Callable[[Any], Any]) -> None:
    whole = numbers(SHAPE)

    def read_box(offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return whole[slices(offset, shape)].clone()

    data = view(stored(read_box, SHAPE, whole.dtype, name="w"))
    place = save_trees(subject, [{"w": ShardedTensor.from_rank_offsets("w", data)}])
    expected = GlobalState({"w": view(whole).contiguous()}, {}, {})
    check_there(subject, expected, {"w": even_layout(tuple(data.shape), 1)}, place)


def keys(subject: Subject) -> Iterator[Case]:
    """Yield keys that can't be file names, or that are names of formats' own files."""
    each = (Case(repr(key[:20]), partial(_check_keys, subject, key, "w")) for key in _KEYS)
    yield from together_or_each(partial(_check_keys, subject, "w", *_KEYS), each)


def _check_keys(subject: Subject, *keys: str) -> None:
    state = GlobalState({key: numbers((2, 3), 10 * number) for number, key in enumerate(keys)}, {}, {})
    layout = dict.fromkeys(state.tensors, even_layout((2, 3), 1))
    check_reloaded(subject, state, layout, layout)


def parts(subject: Subject) -> Iterator[Case]:
    """Yield loads of a box or a flat range of a tensor that was saved in many chunks."""
    # The boxes cross the edges of stored chunks, where plans and formats go wrong.
    boxes = {
        "one element": ((1, 4), (1, 1), None),
        "a box across all chunks": ((1, 2), (2, 3), None),
        "a row": ((3, 0), (1, 6), None),
        "a column": ((0, 5), (4, 1), None),
        "a flat range across chunks": ((0, 0), SHAPE, (4, 15)),
    }
    state = GlobalState({"w": numbers(SHAPE), "other": numbers(SHAPE, 50)}, {}, {})
    for kind, layout in (("a grid", GRID), ("flat ranges", FLAT_ROWS)):
        place = save_trees(subject, trees_of(state, dict.fromkeys(state.tensors, layout)))
        for name, box in boxes.items():
            yield Case(f"{name} of {kind}", partial(_check_part, subject, state, place, *box))
        for verify in ("all", None):
            check = partial(_check_part, subject, state, place, *boxes["a column"], verify=verify)
            yield Case(f"a column of {kind}, with verify={verify!r}", check)


def _check_part(
    subject: Subject, state: GlobalState, place: Storage, offset: Any, shape: Any, flat: Any, *, verify: Any = "whole"
) -> None:
    part = None if flat is None else slice(*flat)
    size = shape if part is None else (part.stop - part.start,)
    target = ShardedTensor("w", None, torch.float32, shape, SHAPE, offset, None, flattened_range=part)
    box = state.tensors["w"][target.global_slice()]
    expected = box if part is None else box.reshape(-1)[part]
    read: list[ReadReport] = []
    options = LoadOptions(verify=verify, report=read.append)
    (found,) = load_trees(subject, [{"w": target}], place, validate_access_integrity=False, options=options)
    assert tuple(found["w"].shape) == size, f"has shape {tuple(found['w'].shape)}, expected {size}"
    check_equal("'w'", found["w"], expected)
    assert isinstance(read[0], ReadReport), f"load_sharded returned {read[0]!r}, expected a ReadReport"


def donated_memory(subject: Subject) -> Iterator[Case]:
    """Yield loads that fill the target's tensor in place (donated memory), also if it is larger than the stored one."""
    yield Case("donated tensors are filled in place", partial(_check_donated, subject, SHAPE))
    yield Case("what lies beyond the stored tensor stays", partial(_check_donated, subject, (6, 8)))


def _check_donated(subject: Subject, shape: tuple[int, int]) -> None:
    state = GlobalState({"w": numbers(SHAPE)}, {}, {})
    place = save_trees(subject, trees_of(state, {"w": ROWS}))
    # The memory has a value that isn't stored, so that every write shows.
    memory = torch.full(shape, -1.0, dtype=torch.float32, device="cpu")
    target = ShardedTensor("w", memory, torch.float32, shape, shape, (0, 0), None, allow_shape_mismatch=shape != SHAPE)
    # Without shapes=, a format whose files don't prove a shape refuses a padded target, which would hide missing files.
    options = LoadOptions(shapes={"w": SHAPE})
    (tree,) = load_trees(subject, [{"w": target}], place, donate=True, options=options)
    assert tree["w"].data_ptr() == memory.data_ptr(), "the donated tensor is not the one that was returned"
    check_equal("'w'", tree["w"][:4, :6], state.tensors["w"])
    beyond = bool((tree["w"][4:] == -1).all()) and bool((tree["w"][:, 6:] == -1).all())
    assert beyond, "wrote where nothing is stored"


def mismatched_targets(subject: Subject) -> Iterator[Case]:
    """Yield targets that don't match the stored tensor; loading them must be an error."""
    state = GlobalState({"w": numbers(SHAPE)}, {}, {})
    kinds = {
        "a key that is not stored": ("v", SHAPE, torch.float32),
        "another shape": ("w", (4, 7), torch.float32),
        "another dtype": ("w", SHAPE, torch.int32),
        "another number of axes": ("w", (24,), torch.float32),
    }
    for name, (key, shape, dtype) in kinds.items():
        target = ShardedTensor.from_rank_offsets(key, torch.zeros(shape, dtype=dtype, device="cpu"))
        yield Case(name, partial(_check_mismatch, subject, state, target))


def _check_mismatch(subject: Subject, state: GlobalState, target: ShardedTensor) -> None:
    place = save_trees(subject, trees_of(state, {"w": WHOLE}))
    try:
        (tree,) = load_trees(subject, [{"t": target}], place)
    except CheckpointingException as error:
        unknown = target.key not in state.tensors
        assert isinstance(error, KeyMismatch) == unknown, f"raised {type(error).__name__}: {error}"
        return
    raise AssertionError(f"it was loaded, as {tree['t']!r}")


def without_metadata_exchange(subject: Subject) -> Iterator[Case]:
    """Yield saves in which ranks don't exchange their layouts; these may be refused."""
    state = GlobalState({"w": numbers(SHAPE)}, {}, {})
    for name, layout in (("1 rank", WHOLE), ("2 ranks' rows", ROWS), ("4 ranks' flat ranges", FLAT_ROWS)):
        yield Case(name, partial(_check_without_metadata_exchange, subject, state, layout))


def _check_without_metadata_exchange(subject: Subject, state: GlobalState, layout: Any) -> None:
    place = save_trees(subject, trees_of(state, {"w": layout}), validate_access_integrity=False)
    check_there(subject, state, {"w": COLUMNS}, place)


def deferred_saves(subject: Subject) -> Iterator[Case]:
    """Yield saves that are prepared first and executed later; preparing must not write."""
    for ranks, layout in ((1, WHOLE), (2, ROWS)):
        yield Case(f"on {ranks} of {ranks} ranks", partial(_check_deferred, subject, ranks, layout))


def _check_deferred(subject: Subject, ranks: int, layout: Any) -> None:
    state, place = GlobalState({"w": numbers(SHAPE)}, {}, {}), subject.directory()
    trees, save = trees_of(state, {"w": layout}), saver(subject)
    options = SaveOptions(snapshot=False, durable=False)

    def on_rank(world: Any) -> None:
        request = save(trees[world.rank], place, world=world, async_sharded_save=True, options=options)
        names = file_names(storage_at(place))
        world.barrier()  # else another rank could begin to write before this one has looked
        # The folder and the owner's note may exist already, since other saves must see them.
        if any(map(is_not_owner_note, names)):
            request.abandon()
            raise AssertionError(f"preparing wrote {sorted(names)}")
        request.execute_sync()

    simulate(ranks, on_rank)
    check_there(subject, state, {"w": COLUMNS}, place)


PROMISES = (
    Promise("every dtype comes back bit for bit", LOADS, dtypes),
    Promise("any strides are saved", LOADS, views, saves=True),
    Promise("lazy tensors are saved", LOADS | {StrategyAction.SAVE_SHARDED}, lazy_data, saves=True),
    Promise("any key comes back", LOADS, keys),
    Promise("a part is loaded as it is in the whole", LOADS, parts),
    Promise("loads write what is asked for, and no more", LOADS, donated_memory),
    Promise("what does not fit is an error", LOADS, mismatched_targets),
    Promise("ranks need not know each other's shards", LOADS, without_metadata_exchange, saves=True),
    Promise(
        "nothing is written before the request runs", LOADS | {StrategyAction.SAVE_SHARDED}, deferred_saves, saves=True
    ),
)
