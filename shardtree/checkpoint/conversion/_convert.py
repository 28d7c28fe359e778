"""convert: a checkpoint of any format streamed to any other, in bounded memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..._deferred import notebook_html
from ...codec import canonical_json, dtype_name, encode_tree, row_major_bits
from ...errors import (
    AlreadyACheckpoint,
    CheckpointingException,
    IntegrityError,
    RemoteError,
    error_text,
    plural,
    shorten,
)
from ...lazy import LazyTensor
from ...mapping import ShardedObject, ShardedTensor
from ...plans import size_text
from ...storage import Directory, Storage, digest, in_larger_requests, listed, storage_at, takes_late_requests
from ...strategies import (
    METADATA_FILE,
    Checkpoint,
    LoadOptions,
    SaveOptions,
    Strategies,
    StrategyAction,
    disown,
    owned,
    remove_unless_committed,
    table_of,
)
from ...trees import HOLE
from .._dispatch import Backends, backends_of
from .._lazy_tree import OpenCheckpoint, open_checkpoint
from .._open import read_fields, recognized
from ..comparison._compare import MOST_BYTES
from ..saving._start import SaveStart, inspect_folder, make_folder, pending_save
from ._check import Checked, check_written
from ._journal import Journal, abort_uploads, begin_journal, begun_save, forget, has_files, journal_at, remove_others
from ._passage import Passage, passage_from
from ._plan import Batch, Cutting, Plan, Transform, plan_conversion
from ._source import StoredObject
from ._write import Destination, Turn, rehearse_common, rehearse_tensors, write_batches

# The identity of a conversion: the source's bytes, the format, and how each piece is made of the source

_VERSION = 1  # of the journal and of what is hashed here


def conversion_digest(source: Checkpoint, backends: Backends, batches: Sequence[Batch], *, allow_pickle: bool) -> str:
    """Return the hash of a conversion: two with the same one write the same files.

    Tensors and objects that a transform has made itself are hashed by value.

    Args:
        source: what is converted.
        backends: of the destination.
        batches: what is written.
        allow_pickle: whether values are pickled.
    """
    known: dict[int, str] = {}
    listed = [
        [_tensor(shard, known) for shard in batch.tensors] + [_object(item, allow_pickle) for item in batch.objects]
        for batch in batches
    ]
    return digest(canonical_json([_VERSION, _identity(source), backends, allow_pickle, listed]))


def _identity(source: Checkpoint) -> Any:
    """Return a checkpoint's own digest, or else the names, lengths and times of change of its files."""
    known = source.fields.get("digest")
    return known if isinstance(known, str) else [source.storage.where(), *_files(source.storage, "")]


def _files(storage: Storage, name: str) -> Iterator[Any]:
    length = storage.length(name)
    if length is not None:
        yield name, length, str(storage.changed(name))
        return
    for child in storage.names(name):
        yield from _files(storage, f"{name}/{child}" if name else child)


def _tensor(shard: ShardedTensor, known: dict[int, str]) -> Any:
    place = (shard.global_shape, shard.global_offset, shard.local_shape, shard.prepend_axis_num)
    fragments = shard.axis_fragmentations
    return [shard.key, dtype_name(shard.dtype), place, fragments, _data(shard.data, known)]


def _data(data: Any, known: dict[int, str]) -> Any:
    if isinstance(data, LazyTensor):
        return [tuple(data.place), [dtype_name(cast) for cast in data.casts], _source(data.source, known)]
    return digest(memoryview(row_major_bits(data).numpy()))


def _source(source: Any, known: dict[int, str]) -> str:
    """Return the hash of what a lazy tensor is a view of, computed once for all views."""
    if id(source) not in known:
        made_of = source.made_of
        # A caller's function can't be hashed: such a conversion begins anew each time.
        made = [secrets.token_hex()] if made_of is None else [_part(part, known) for part in made_of]
        known[id(source)] = digest(canonical_json([source.shape, dtype_name(source.dtype), *made, *_origin(source)]))
    return known[id(source)]


def _part(part: Any, known: dict[int, str]) -> Any:
    return _data(part, known) if isinstance(part, LazyTensor) else part


def _origin(source: Any) -> list[Any]:
    """Return the identity of another checkpoint, if a transform reads this tensor from one."""
    reader = getattr(source, "reader", None)
    opened = reader.args[0] if isinstance(reader, partial) and reader.args else None
    return [_identity(opened.checkpoint)] if isinstance(opened, OpenCheckpoint) else []


def _object(item: ShardedObject, allow_pickle: bool) -> Any:
    if isinstance(item.data, StoredObject):
        return [item.unique_key, item.data.unique_key]
    try:
        return [item.unique_key, digest(encode_tree(item.data, allow_pickle=allow_pickle))]
    except CheckpointingException:
        return [item.unique_key, secrets.token_hex()]  # can't be hashed: equal to nothing, so it's written anew


_LEAST_BYTES = 1024 * 1024  # of memory for reading back: less would be a read for every few elements


@dataclass(frozen=True, slots=True, repr=False)
class ConversionReport:
    """What a conversion did.

    Attributes:
        tensors: how many were written.
        objects: how many were written.
        nbytes: the tensors' length in bytes.
        left_out: keys and unique keys of the source that were left out, and ``"common"`` if that was.
        unused: (key, elements) of tensors of which only a part was used.
        batches: how many there were.
        resumed: how many of them an earlier call had written.
        verified_nbytes: bytes of tensors that were read back and compared; None if that was skipped.
        fingerprints: of the tensors that were read back, by key, as `fingerprint` gives them.
    """

    tensors: int
    objects: int
    nbytes: int
    left_out: tuple[str, ...]
    unused: tuple[tuple[str, int], ...]
    batches: int
    resumed: int
    verified_nbytes: int | None
    fingerprints: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        objects = f" and {plural(self.objects, 'object')}" if self.objects else ""
        batches = f"{self.batches} batch" if self.batches == 1 else f"{self.batches} batches"
        resumed = f", {self.resumed} of them by an earlier call" if self.resumed else ""
        if self.verified_nbytes is None:
            checked = "not read back"
        else:
            checked = f"{size_text(self.verified_nbytes)} read back and compared, by fingerprint"
        lines = [
            f"{plural(self.tensors, 'tensor')}{objects}, {size_text(self.nbytes)}, in {batches}{resumed}; {checked}",
            *_listed("left out", self.left_out),
            *_listed("used in part", (f"{key}: {count:,} elements" for key, count in self.unused)),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"ConversionReport({plural(self.tensors, 'tensor')}, {size_text(self.nbytes)})"

    def _repr_html_(self) -> str:
        return notebook_html(self)


def _listed(name: str, each: Iterable[str]) -> list[str]:
    shown = ", ".join(shorten(each))
    return [f"{name}: {shown}"] if shown else []


def convert(
    source: Directory,
    destination: Directory,
    *,
    backend: str | tuple[str, int],
    transform: Transform | None = None,
    transform_common: Callable[[Any], Any] | None = None,
    common_backend: str | tuple[str, int] | None = None,
    layout: Cutting = None,
    leave_out: Sequence[str] = (),
    prune: bool = False,
    max_bytes_in_flight: int = 256 * 1024 * 1024,
    verify: bool = True,
    strategies: Strategies | None = None,
    load_options: LoadOptions | None = None,
    save_options: SaveOptions | None = None,
) -> ConversionReport:
    """Write a checkpoint of any format as one of another, and return what was done; not collective.

    Tensors stream in batches of bounded size. After a call that was killed, the same call resumes: finished batches
    aren't written again. The destination becomes a checkpoint only when all of it is written; then it is read back, and
    each tensor's fingerprint compared with that of the elements that were written.

    Args:
        source: where the checkpoint is.
        destination: a folder without a checkpoint, made if it isn't there.
        backend: the format, as (backend, version) or a name, which means its latest version.
        transform: a pure function from the flat dict of whole shards, by key and with lazy data, to the tree of shards
            that is written. The keys of the dict don't matter, those of the shards do. It records what it does to lazy
            data; elements that it reads itself stay in memory.
        transform_common: a pure function from the common state, with holes where shards were, to the one that is
            written.
        common_backend: the format of the common state; the one that a save would choose by default.
        layout: how whole tensors are cut: a function from a shard to counts of pieces along its axes, or patterns of
            keys to such counts. What it leaves open is cut only where it is larger than a batch.
        leave_out: patterns (``*``, ``?``, ``[seq]``) of keys that aren't converted; ``"common"`` is the common state.
            Whatever else isn't in the output is an error.
        prune: whether what the transform doesn't pass on is left out too, as by a transform that keeps some layers.
        max_bytes_in_flight: the most bytes that a batch holds. A format that can't stream has one batch in memory.
        verify: whether the destination is read back and compared.
        strategies: the dispatch table; None for the process's.
        load_options: how the source is read, and the destination when it is compared.
        save_options: how the destination is written; `progress` is called with the bytes that were written, and later
            compared, since the last call.

    Raises:
        NotACheckpoint: there is no source.
        AlreadyACheckpoint: the destination has a checkpoint.
        KeyMismatch: a key of the source is neither used nor left out nor pruned, or a pattern names nothing.
        IntegrityError: the output's shards don't tile their tensors, or the destination isn't what was written.
        UnsupportedValue: the format can't hold something.
        StrategyError: the format can't be written.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> source, destination = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "step": 7}, source)
        >>> half = st.bind(st.cast, torch.bfloat16)
        >>> report = convert(source, destination, backend="safetensors", transform=half)
        >>> report.nbytes, st.load_plain_tensors(destination)
        (8, {'w': tensor([0., 1., 2., 3.], dtype=torch.bfloat16)})
    """
    load_options, save_options = load_options or LoadOptions(), save_options or SaveOptions()
    opened = open_checkpoint(in_larger_requests(storage_at(source)), strategies=strategies, options=load_options)
    most = max_bytes_in_flight
    plan = plan_conversion(
        opened, transform, transform_common, leave_out=leave_out, prune=prune, layout=layout, most_bytes=most
    )
    choices = _latest(backend, strategies), None if common_backend is None else _latest(common_backend, strategies)
    backends = backends_of(*choices, strategies)
    target = Destination(in_larger_requests(storage_at(destination)), choices, backends, strategies, save_options)
    digest = conversion_digest(opened.checkpoint, backends, plan.batches, allow_pickle=save_options.allow_pickle)
    journal = journal_at(target.storage, digest, strategies)
    passage = passage_from(plan.reader, fingerprints=verify)
    resumed, may_be_others = _written(target, journal, plan, passage)
    checked = None
    if verify or may_be_others:
        checked = _checked(target, journal, plan, passage, min(max(most, _LEAST_BYTES), MOST_BYTES), load_options)
    save_id = begun_save(journal) if resumed == len(plan.batches) else None
    if save_id is not None:
        # A call that was killed right after its commit left its note there, and what it had moved from its folder.
        disown(target.storage, save_id)
        if takes_late_requests(target.storage):
            remove_unless_committed(target.storage, save_id)
    forget(journal)
    return _report(plan, resumed, checked)


def _checked(
    target: Destination, journal: Journal, plan: Plan, passage: Passage, most_bytes: int, options: LoadOptions
) -> Checked:
    """Read back what was written, and return what was found equal; what isn't is never gone on with."""
    try:
        written = open_checkpoint(target.storage, strategies=target.strategies, options=options)
        passed = passage.fingerprints(plan.tensors)
        return check_written(written, plan, passed, most_bytes, target.options.progress)
    except IntegrityError:
        forget(journal)
        raise


def _report(plan: Plan, resumed: int, checked: Checked | None) -> ConversionReport:
    return ConversionReport(
        tensors=len({shard.key for shard in plan.tensors}),
        objects=len(plan.objects),
        nbytes=sum(batch.nbytes for batch in plan.batches),
        left_out=plan.left_out,
        unused=plan.unused,
        batches=len(plan.batches),
        resumed=resumed,
        verified_nbytes=None if checked is None else checked.nbytes,
        fingerprints={} if checked is None else checked.fingerprints,
    )


def _latest(backend: str | tuple[str, int], strategies: Strategies | None) -> tuple[str, int]:
    """Return the backend and version that a bare name means: the latest that can save."""
    if not isinstance(backend, str):
        return backend
    versions = [
        version
        for action, name, version in table_of(strategies)
        if action is StrategyAction.SAVE_SHARDED and name == backend
    ]
    return backend, max(versions, default=1)  # if there is none, the save's error lists the backends


def _written(target: Destination, journal: Journal, plan: Plan, passage: Passage) -> tuple[int, bool]:
    """Write what isn't written yet, and return how many batches were, and whether an existing checkpoint isn't ours.

    Raises:
        AlreadyACheckpoint: there is one that this conversion hasn't begun.
    """
    storage = target.storage
    save_id, start, is_there = _look(target, journal)
    if is_there:
        # An earlier call was killed after its commit, or another save has committed since: a comparison decides.
        return len(plan.batches), read_fields(storage, target.strategies).get("save_id") != save_id
    common = {} if plan.common is HOLE else plan.common
    # What the format can't hold should fail now, not after hours of writing.
    rehearse_tensors(target, plan.tensors)
    rehearse_common(target, common)
    if not takes_late_requests(storage):  # else after the commit, which turns away what they may have sent
        remove_others(journal)
    if start is not None:
        _begin(target, journal, start)
    else:
        abort_uploads(journal)  # of the call that is gone on with
    try:
        with owned(storage, save_id, durable=target.options.durable, has_note=start is not None):
            return write_batches(target, journal, save_id, plan, common, passage.watched), False
    except Exception as error:
        # One process plays all ranks: its own error says more than a RemoteError around it.
        own = error.__cause__ if isinstance(error, RemoteError) and error.__cause__ is not None else error
        _clean_or_explain(storage, journal, save_id, own)
        if own is not error:
            raise own from None
        raise


def _look(target: Destination, journal: Journal) -> tuple[str, SaveStart | None, bool]:
    """Return the name of the save, how it starts unless an earlier call has begun it, and if it may be committed.

    Raises:
        AlreadyACheckpoint: there is a checkpoint that this conversion hasn't begun.
    """
    with listed(target.storage, deep=False) as seen:  # one look for all questions
        begun = begun_save(journal) if journal.folder in seen.names() else None
        is_there = seen.length(METADATA_FILE) is not None or recognized(seen, target.strategies) is not None
        if begun is not None:
            return begun, None, is_there
        if is_there:
            what = f"convert: {target.storage.where()!r} already holds a checkpoint"
            raise AlreadyACheckpoint(error_text(what, fix="Convert to another folder."))
        start = inspect_folder(seen, target.backends, target.strategies, overwrite=False)
        return start.save_id, start, False


def _begin(target: Destination, journal: Journal, start: SaveStart) -> None:
    """Make the folder and the journal of a new conversion."""
    pending = pending_save(start, target.storage, Turn(0, 1), target.options)
    make_folder(pending, target.backends, target.strategies)
    if "folder" in pending.memo:
        pending.memo["folder"].wait()  # here, since each batch has a pending save of its own without this memo
    begin_journal(journal, pending.save_id, durable=target.options.durable)


def _clean_or_explain(storage: Storage, journal: Journal, save_id: str, error: BaseException) -> None:
    if has_files(journal):
        error.add_note("convert: what was written stays there, and the same call resumes from it")
        return
    forget(journal)
    disown(storage, save_id)
