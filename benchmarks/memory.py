"""Memory beyond the tree's own that saves and loads take at their peak: ``python -m benchmarks.memory``.

A tree of 1 GB in 4 tensors, by turns float32 and bfloat16, in new processes that did the same with a tiny tree before.
The tree and what a load returns aren't counted, nor is the index, nor are pages of mapped files, which are the page
cache's; the note tells the figure with those.

Last, conversions through a cast of 280 MB to 2 GB, after numba has compiled what sums fingerprints, which it does once
in a process: their memory is not to grow with the checkpoint. What the compiler itself takes is a row of its own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardtree as st
from shardtree.core.fingerprints._sums import compiled_total

from ._measuring import Action, Bar, Settings, peak, print_bars, run

MIB = 1024 * 1024
MOST = 64.0
FORMATS = ("safetensors", "torch_dist")
TINY = 20_000
TENSORS = 4  # so large that a copy of one would be seen
BATCH = 32 * MIB
WINDOWS = 48  # MiB: of the formula, of the sum in it, and of the product in that
RANK = 16
CAST = (280_000_000, 560_000_000, 1_000_000_000, 2_000_000_000)
CAST_TENSOR = 28_000_000  # bytes: larger checkpoints have more tensors, not larger ones
GROWTH = 16.0  # MiB


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that is measured.

    Attributes:
        operation: its name.
        begin: from (backend, size, rank, ranks, source, destination) to the action.
        ranks: how many processes take part.
        source: which earlier case's checkpoint is read, "" if none is.
        kept: the name under which what was saved stays for later cases, "" if it is removed.
        most: the bar in MiB.
    """

    operation: str
    begin: Callable[..., Action]
    ranks: int = 1
    source: str = ""
    kept: str = ""
    most: float | None = MOST


def bars(settings: Settings) -> list[Bar]:
    """Return a bar for each format and case."""
    size, formats = (2_000_000, FORMATS[:1]) if settings.quick else (1_000_000_000, FORMATS)
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-memory-") as folder:
        found = [bar for backend in formats for bar in _format(backend, size, Path(folder))]
        found += _casts([size // TENSORS, size] if settings.quick else CAST, Path(folder), 1 if settings.quick else 3)
    print_bars(f"Peak extra memory, a tree of {size / 1e9:.3g} GB", found, settings.console)
    return found


def _format(backend: str, size: int, folder: Path) -> list[Bar]:
    (folder / backend).mkdir()
    found = [_measured(backend, size, folder / backend, case) for case in CASES]
    shutil.rmtree(folder / backend)
    return found


def _measured(backend: str, size: int, folder: Path, case: Case) -> Bar:
    source, destination = folder / case.source, folder / (case.kept or "removed")
    begin = partial(_prepare, case.begin, backend, size, source, destination)
    seen = peak(begin, folder, case.ranks)
    index = _index_bytes(source if case.source else destination)
    if not case.kept:
        shutil.rmtree(destination, ignore_errors=True)
    figure = (seen.own - index) / MIB
    note = f"{seen.mapped / MIB:.3g} with mapped pages; index {index / MIB:.2g}; {seen.samples} looks"
    return Bar(f"{backend}: {case.operation}", "", figure, None, figure, case.most, "MiB", note)


def _prepare(
    begin: Callable[..., Action], backend: str, size: int, source: Path, destination: Path, rank: int, ranks: int
) -> Action:
    """Do all of it with a tiny tree, for what is loaded and made once a process, and get ready for the real one."""
    tiny = source.with_name(f"{source.name}-tiny"), destination.with_name(f"{destination.name}-tiny")
    begin(backend, TINY, rank, ranks, *tiny)()
    if rank == 0 and tiny[1].name.startswith("removed"):
        shutil.rmtree(tiny[1], ignore_errors=True)
    return begin(backend, size, rank, ranks, source, destination)


def _index_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.name.startswith(("index-", ".metadata")))


# The tree: a rank's rows or columns of each tensor.


def _tensors(size: int, axis: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    return {f"layers.{number}": _part(_shape(size, number), number, axis, rank, ranks) for number in range(TENSORS)}


def _shape(size: int, number: int) -> tuple[int, int]:
    columns = 1024 if size > TINY else 16
    return max(2, size // TENSORS // _dtype(number).itemsize // columns // 2 * 2), columns


def _dtype(number: int) -> torch.dtype:
    return torch.bfloat16 if number % 2 else torch.float32


def _part(shape: tuple[int, int], number: int, axis: int, rank: int, ranks: int) -> torch.Tensor:
    places = [torch.arange(length) for length in shape]
    places[axis] = places[axis].chunk(ranks)[rank]
    rows, columns = places
    return (((rows * 31 + number) % 127)[:, None].to(torch.int16) + (columns % 101)).to(_dtype(number))


def _tree(tensors: dict[str, torch.Tensor], axis: int, rank: int, ranks: int) -> dict[str, st.ShardedTensor]:
    place = (axis, rank, ranks)
    return {name: st.ShardedTensor.from_rank_offsets(name, tensor, place) for name, tensor in tensors.items()}


def _empty(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def _check(loaded: dict[str, torch.Tensor], size: int, axis: int, rank: int, ranks: int) -> None:
    for number, tensor in enumerate(loaded.values()):
        if not torch.equal(tensor, _part(_shape(size, number), number, axis, rank, ranks)):
            raise ValueError(f"tensor {number} was loaded wrong")


# What is measured. A load's result is looked at in the warm-up alone: that takes memory.


def _save(backend: str, size: int, rank: int, ranks: int, source: Path, destination: Path) -> Action:
    return _saving(_tree(_tensors(size, 0, rank, ranks), 0, rank, ranks), backend, destination)


def _save_transposed(backend: str, size: int, rank: int, ranks: int, source: Path, destination: Path) -> Action:
    views = {name: tensor.t() for name, tensor in _tensors(size, 0, rank, ranks).items()}
    return _saving(_tree(views, 0, rank, ranks), backend, destination)


def _save_lazy(backend: str, size: int, rank: int, ranks: int, source: Path, destination: Path) -> Action:
    return _saving(dict(st.open_checkpoint(source)), backend, destination)


def _saving(tree: Any, backend: str, destination: Path) -> Action:
    def action() -> int:
        st.save(
            tree,
            destination,
            (backend, 1),
            options=st.SaveOptions(durable=False),
            overwrite=destination.name.endswith("-tiny"),
        )
        return 0

    return action


def _load(
    backend: str, size: int, rank: int, ranks: int, source: Path, destination: Path, *, axis: int, given: bool
) -> Action:
    tree = _tree(_empty(_tensors(size, axis, rank, ranks)), axis, rank, ranks)
    target = tree if given else st.without_data(tree)
    del tree

    def action() -> int:
        loaded = st.load(target, source, donate=given)
        if size == TINY:
            _check(loaded, size, axis, rank, ranks)
        return 0 if given else sum(tensor.nbytes for tensor in loaded.values())

    return action


def _convert(
    backend: str, size: int, rank: int, ranks: int, source: Path, destination: Path, *, most: int | None
) -> Action:
    (other,) = {*FORMATS} - {backend}
    options: dict[str, Any] = {} if most is None else {"max_bytes_in_flight": most}

    def action() -> int:
        st.convert(source, destination, backend=other, save_options=st.SaveOptions(durable=False), **options)
        return 0

    return action


def _compute(
    backend: str, size: int, rank: int, ranks: int, source: Path, destination: Path, *, formula: Callable[..., Any]
) -> Action:
    """Convert what is computed of the checkpoint, of others and of adapters of low rank; others are it, opened anew."""
    low_rank = source.with_name(f"{source.name}-adapter-{size}")
    if not low_rank.exists():
        st.save(_adapter(size), low_rank, options=st.SaveOptions(durable=False))
    others = [dict(st.open_checkpoint(source)) for _ in range(2)]
    adapter = dict(st.open_checkpoint(low_rank))

    def transform(tree: dict[str, Any]) -> dict[str, Any]:
        return {name: replace(one, data=formula(name, one.data, *others, adapter)) for name, one in tree.items()}

    def action() -> int:
        st.convert(
            source,
            destination,
            backend=backend,
            save_options=st.SaveOptions(durable=False),
            transform=transform,
            max_bytes_in_flight=BATCH,
        )
        return 0

    return action


def _adapter(size: int) -> dict[str, Any]:
    found = {}
    for number in range(TENSORS):
        (rows, columns), dtype = _shape(size, number), _dtype(number)
        factors = {"A": torch.ones(RANK, columns, dtype=dtype), "B": torch.ones(rows, RANK, dtype=dtype)}
        for which, tensor in factors.items():
            name = f"layers.{number}.{which}"
            found[name] = st.ShardedTensor.from_rank_offsets(name, tensor)
    return found


def _soup(name: str, data: Any, one: Any, other: Any, adapter: Any) -> Any:
    return (data + one[name].data + other[name].data) / 3


def _average(name: str, data: Any, one: Any, other: Any, adapter: Any) -> Any:
    return 0.9 * data + 0.1 * one[name].data


def _merged(name: str, data: Any, one: Any, other: Any, adapter: Any) -> Any:
    return data + 0.5 * (adapter[f"{name}.B"].data @ adapter[f"{name}.A"].data)


CASES = (
    Case("save", _save, kept="whole"),
    Case("save transposed views", _save_transposed),
    Case("save what is read lazily", _save_lazy, source="whole"),
    Case("load into given tensors", partial(_load, axis=0, given=True), source="whole"),
    Case("load new tensors", partial(_load, axis=0, given=False), source="whole"),
    Case("save, 2 processes", _save, ranks=2, kept="rows"),
    Case("load rows as columns, 2 processes", partial(_load, axis=1, given=True), ranks=2, source="rows"),
    Case("convert, 32 MiB in flight", partial(_convert, most=BATCH), source="whole"),
    Case("convert, 256 MiB in flight, the default", partial(_convert, most=None), source="whole", most=None),
    Case("convert a soup of three", partial(_compute, formula=_soup), source="whole", most=MOST + WINDOWS),
    Case("convert a moving average", partial(_compute, formula=_average), source="whole", most=MOST + WINDOWS),
    Case("convert a merged adapter", partial(_compute, formula=_merged), source="whole", most=MOST + WINDOWS),
)


# Conversions through a cast, of more and more.


def _casts(sizes: Sequence[int], folder: Path, tries: int) -> list[Bar]:
    found = []
    for size in sizes:
        source = folder / "float32"
        zeros = torch.zeros(1, 1024).expand(min(size, CAST_TENSOR) // 4096, 1024)
        tree = {
            f"layers.{number}": st.ShardedTensor.from_rank_offsets(f"layers.{number}", zeros)
            for number in range(max(1, size // CAST_TENSOR))
        }
        st.save(tree, source, options=st.SaveOptions(durable=False))
        # The middle one: a writer that the machine holds up leaves more to be written, once in a while.
        seen = sorted(peak(partial(_prepare_cast, source), folder).own / MIB for _ in range(tries))[tries // 2]
        shutil.rmtree(source)
        shutil.rmtree(folder / "bfloat16", ignore_errors=True)
        found.append(Bar(f"convert {size / 1e6:,.0f} MB through a cast", "", seen, None, seen, MOST, "MiB"))
    more = found[-1].ours - found[0].ours
    told = f"convert {sizes[-1] / 1e6:,.0f} MB through a cast, beside {sizes[0] / 1e6:,.0f} MB"
    found.append(Bar(told, "", found[-1].ours, found[0].ours, more, GROWTH, "MiB", "figure: MiB more"))
    return [*found, *_compiler(folder)]


def _prepare_cast(source: Path, rank: int, ranks: int) -> Action:
    tiny = source.with_name("tiny")
    st.save(_tree(_tensors(TINY, 0, 0, 1), 0, 0, 1), tiny, options=st.SaveOptions(durable=False), overwrite=True)
    _cast(tiny)
    if _has_numba():
        _compile()
    return partial(_cast, source)


def _cast(source: Path) -> int:
    destination = source.with_name("bfloat16")
    shutil.rmtree(destination, ignore_errors=True)
    st.convert(
        source,
        destination,
        backend="huggingface",
        save_options=st.SaveOptions(durable=False),
        transform=st.bind(st.cast, torch.bfloat16),
        max_bytes_in_flight=BATCH,
    )
    return 0


def _compiler(folder: Path) -> list[Bar]:
    if not _has_numba():
        return []
    seen = peak(_prepare_compiler, folder)
    note = f"{seen.mapped / MIB:.3g} with mapped pages; once in a process"
    return [Bar("numba, imported and compiling a sum", "", seen.own / MIB, None, seen.own / MIB, None, "MiB", note)]


def _prepare_compiler(rank: int, ranks: int) -> Action:
    return _compile


def _compile() -> int:
    compiled_total(np.zeros((2, 4), dtype=np.uint16), [np.ones(2, dtype=np.uint64), np.ones(4, dtype=np.uint64)])
    return 0


def _has_numba() -> bool:
    return find_spec("numba") is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark by its command."""
    return run(bars, arguments, "benchmarks.memory", __doc__)


if __name__ == "__main__":
    sys.exit(main())
