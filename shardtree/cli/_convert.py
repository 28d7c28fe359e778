"""`shardtree convert`: conversion of a checkpoint into another format, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.text import Text

from ..conversion import ConversionReport, convert
from ..core.codec import dtype_from_name
from ..core.trees import bind, cast, compose
from ..errors import CheckpointingException, RemoteError, StrategyError, WorldError, error_text, plural, shorten
from ..formats import huggingface
from ..inspection import load_tensors_metadata, open_checkpoint
from ..interop.megatron_optimizer import model_space
from ..live import launched_world
from ..shell.table import LoadOptions, SaveOptions, Strategies, StrategyAction, default_strategies
from ..shell.world import World, on_rank_zero
from ..transforms import partial_rename
from ._command import INTERRUPTED, TROUBLE, complain, printed
from ._contents import contents_in_files
from ._output import Output, bar, json_text, pace, printable, show_verdict, size

# This is torch.distributed's own timeout: a round of a conversion to a slow disk takes minutes, and torchrun ends the
# other ranks by itself when one dies.
_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion, as the command line asks for it.

    Attributes:
        source: Path or URL of the source.
        destination: Path or URL of the destination.
        backend: Name of the format, or name and version.
        common_backend: Format of the common state; None for the default of `backend`.
        transforms: Functions of the tree of shards, which are applied first.
        transform_common: Function of the common state; None leaves it unchanged.
        names: New key by old key, as patterns.
        dtype: Dtype of floating-point tensors in the copy; None leaves them unchanged.
        leave_out: Patterns of keys that aren't converted.
        plain: Key patterns of FP8 tensors that may be cast without scales.
        prune: True to leave out tensors that the transforms drop.
        optimizer_in_model_space: True to write Megatron-Core's `dp_reshardable` optimizer as `fully_reshardable`.
        expert_parallel: True if the run that loads the converted optimizer has expert parallelism; None if it is as in
            the saved run.
        trusts_shapes: True to trust shapes that are computed from the pieces in the source's files, without proof that
            no piece is missing.
        most_bytes: Upper bound of the bytes of a batch.
        most_file_bytes: Upper bound of a file of a Hugging Face model, in bytes; None for the format's default.
        verify: True to read back and compare the written checkpoint.
        allow_pickle: True to unpickle pickled values.
    """

    source: str
    destination: str
    backend: str | tuple[str, int]
    common_backend: str | tuple[str, int] | None
    transforms: Sequence[Callable[[Any], Any]]
    transform_common: Callable[[Any], Any] | None
    names: Mapping[str, str]
    dtype: str | None
    leave_out: Sequence[str]
    plain: Sequence[str]
    prune: bool
    optimizer_in_model_space: bool
    expert_parallel: bool | None
    trusts_shapes: bool
    most_bytes: int
    most_file_bytes: int | None
    verify: bool
    allow_pickle: bool


def run_convert(conversion: Conversion, *, as_json: bool) -> int:
    """Convert on the ranks that torchrun has started, or in this process, print a report, and return the exit status.

    The first rank prints the report and draws the bar. It also prints the error, if all ranks fail; if a rank is lost,
    every other rank prints the error. All ranks return the same status.

    Args:
        conversion: Conversion, the same on every rank.
        as_json: True to print JSON.

    Raises:
        CheckpointingException: The conversion fails in a single process, or the ranks can't connect.
    """
    with launched_world(_TIMEOUT) as world:
        try:
            return _run_rank(conversion, world, as_json=as_json)
        except CheckpointingException as error:
            if world.size == 1:
                raise
            is_lost = isinstance(error, WorldError) and not isinstance(error, RemoteError)
            # The lost peer may be the rank that prints, so that every rank prints.
            if is_lost or not world.rank:
                complain("convert", error)
            if not is_lost:
                # torchrun ends the other ranks when one exits, which mustn't happen before the error is printed.
                with suppress(WorldError):
                    world.barrier()
            return TROUBLE
        except KeyboardInterrupt:
            if not world.rank:
                raise KeyboardInterrupt("interrupted; run the same command again to resume") from None
            return INTERRUPTED


def _run_rank(conversion: Conversion, world: World, *, as_json: bool) -> int:
    # One rank opens the checkpoint for all, since that may take long.
    optimizer, nbytes = on_rank_zero(world, "convert: look at the source", partial(_look, conversion))
    renames = [optimizer["transform"]] if "transform" in optimizer else []
    transforms = [*renames, *conversion.transforms]
    transform = transform_of(transforms, conversion.names, conversion.dtype, conversion.plain)
    steps = [step for step in (optimizer.get("transform_common"), conversion.transform_common) if step is not None]
    began = time.monotonic()
    # The bar shows this rank's share, since a rank only gets reports of its own bytes.
    with bar(Output(stderr=True), "convert", nbytes // world.size, is_shown=not world.rank) as advance:
        report = convert(
            conversion.source,
            conversion.destination,
            backend=conversion.backend,
            common_backend=conversion.common_backend,
            transform=transform,
            transform_common=compose(*steps) if steps else None,
            leave_out=[*conversion.leave_out, *optimizer.get("leave_out", ())],
            plain=conversion.plain,
            prune=conversion.prune,
            max_bytes_in_flight=conversion.most_bytes,
            verify=conversion.verify,
            strategies=strategies_of(conversion.backend, conversion.most_file_bytes),
            load_options=LoadOptions(allow_pickle=conversion.allow_pickle, shapes=_shapes(conversion, world)),
            save_options=SaveOptions(allow_pickle=conversion.allow_pickle, progress=advance),
            world=world,
        )
    show = partial(_show, conversion, report, time.monotonic() - began, world.size, as_json=as_json)
    return on_rank_zero(world, "convert: print", partial(printed, show))


def _shapes(conversion: Conversion, world: World) -> dict[str, tuple[int, ...]] | None:
    """Return the shape of each tensor by key, for `LoadOptions.shapes`; None unless the user trusts computed shapes.

    In a source without stored shapes, the shapes are computed from the stored pieces. They are too small if a piece is
    missing.
    """
    if not conversion.trusts_shapes:
        return None
    tensors = load_tensors_metadata(conversion.source, world=world)
    return {key: shard.global_shape for key, shard in tensors.items()}


def transform_of(
    transforms: Sequence[Callable[[Any], Any]], names: Mapping[str, str], dtype: str | None, plain: Sequence[str] = ()
) -> Callable[[Any], Any] | None:
    """Return the function from a checkpoint's shards to the shards to write; None if nothing changes.

    Args:
        transforms: Functions of a tree, in the order in which they are applied.
        names: New key by old key, as patterns; empty for no renaming.
        dtype: Dtype that floating-point tensors are cast to; None for no cast.
        plain: Key patterns of FP8 tensors that may be cast without scales.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> change = transform_of([], {"decoder.*": "model.*"}, "bfloat16")
        >>> shard = change({"": ShardedTensor.from_rank_offsets("decoder.w", torch.ones(2))})[""]
        >>> shard.key, shard.dtype
        ('model.w', torch.bfloat16)
    """
    steps = [*transforms]
    steps += [bind(partial_rename, names)] if names else []
    steps += [bind(cast, dtype_from_name(dtype), plain=plain)] if dtype is not None else []
    return compose(*steps) if steps else None


def strategies_of(backend: str | tuple[str, int], most_file_bytes: int | None) -> Strategies:
    """Return a dispatch table that limits the size of a Hugging Face model's files.

    Args:
        backend: Format of the destination.
        most_file_bytes: Upper bound of a file in bytes; None for the default table.

    Raises:
        StrategyError: A limit is given for another format than huggingface.

    Examples:
        >>> strategies_of("huggingface", 10**9) == default_strategies
        False
    """
    if most_file_bytes is None:
        return default_strategies
    name = backend if isinstance(backend, str) else backend[0]
    if name != "huggingface":
        expected = "--to huggingface"
        heading = "convert: --max-file-size works only with the format huggingface"
        raise StrategyError(error_text(heading, found=f"--to {name}", expected=expected))
    # The call gets a table of its own, and the process's table stays unchanged.
    row = (StrategyAction.SAVE_SHARDED, "huggingface", 1)
    return {**default_strategies, row: huggingface.save_sharded_up_to(most_file_bytes)}


def _look(conversion: Conversion) -> tuple[dict[str, Any], int]:
    """Return keyword arguments for `convert`, and the length of the progress bar.

    The arguments rewrite the optimizer, as `model_space` returns them; there are none unless `optimizer_in_model_space`
    is set. The length is the approximate number of bytes that will be written and read back.
    """
    tree = open_checkpoint(conversion.source, options=LoadOptions(allow_pickle=conversion.allow_pickle))
    changes = {}
    if conversion.optimizer_in_model_space:
        changes = model_space(tree, expert_parallel=conversion.expert_parallel)
    length = sum(row.length for row in contents_in_files(tree).tensors)
    # Bytes are written, and maybe read back.
    return changes, length * (2 if conversion.verify else 1)


def _show(conversion: Conversion, report: ConversionReport, seconds: float, processes: int, *, as_json: bool) -> int:
    if as_json:
        fields = asdict(report)
        # Fingerprints are hexadecimal text, since many readers of JSON take numbers for floats, which have 53 bits.
        fields["fingerprints"] = {key: f"{number:016x}" for key, number in report.fingerprints.items()}
        record = {"bytes" if name == "nbytes" else name.replace("nbytes", "bytes"): fields[name] for name in fields}
        print(json_text({"destination": conversion.destination, **record}))
        return 0
    console = Output()
    amounts = [plural(report.tensors, "tensor"), size(report.nbytes), plural(report.objects, "object")]
    by = f", by {processes} processes" if processes > 1 else ""
    show_verdict(console, True, f"{conversion.destination}: {', '.join(amounts)}, {pace(report.nbytes, seconds)}{by}")
    for line in _remarks(report):
        console.print(Text(f"  {printable(line)}", style="dim"))
    return 0


def _remarks(report: ConversionReport) -> list[str]:
    lines = []
    if report.resumed:
        batches = plural(report.batches, "batch").replace("batchs", "batches")
        lines.append(f"resumed: {report.resumed} of {batches} had been written by an earlier run")
    if report.verified_nbytes is None:
        lines.append("not read back, as --no-verify asks")
    else:
        lines.append("read back and compared, by fingerprint")
    if report.left_out:
        lines += [f"left out: {plural(len(report.left_out), 'key')}", *(f"  {key}" for key in shorten(report.left_out))]
    return lines
