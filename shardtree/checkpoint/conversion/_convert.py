"""convert: a checkpoint of any format streamed to any other, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import AlreadyACheckpoint, IntegrityError, RemoteError, error_text
from ...storage import Directory, Storage, storage_at
from ...strategies import METADATA_FILE, SaveOptions, Strategies, StrategyAction, disown, owned, table_of
from ...trees import HOLE
from .._dispatch import backends_of
from .._lazy_tree import open_checkpoint
from .._open import read_fields, recognized
from ..comparison._compare import MOST_BYTES
from ..saving._begin import draft_of, look, make_folder
from ._check import Checked, check_written
from ._identity import conversion_digest
from ._journal import Journal, begin_journal, begun_save, forget, has_files, journal_at, remove_others
from ._pieces import Cutting
from ._plan import Plan, Transform, plan_conversion
from ._turn import Turn
from ._write import Destination, rehearse_common, rehearse_tensors, write_batches

_LEAST_BYTES = 1024 * 1024  # that reading back may take: less would be a read for every few elements


@dataclass(frozen=True, slots=True)
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
    max_bytes_in_flight: int = 256 * 1024 * 1024,
    verify: bool = True,
    durable: bool = True,
    allow_pickle: bool = False,
    types: tuple[type, ...] = (),
    strategies: Strategies | None = None,
    progress: Callable[[int], None] | None = None,
) -> ConversionReport:
    """Write a checkpoint of any format as one of another, and return what was done; not collective.

    Tensors stream in batches of bounded size. A call that was killed is gone on with by the same call: batches that are
    finished aren't written again. What is written counts as a checkpoint only when all of it is there; then it is read
    back and compared with the source, bit for bit.

    Args:
        source: where the checkpoint is.
        destination: a folder without a checkpoint, made if it isn't there.
        backend: the format, as (backend, version) or a name, which means its latest version.
        transform: a pure function from the flat dict of whole shards, by key and with lazy data, to the tree of shards
            that is written. The keys of the dict don't matter, those of the shards do. It records what it does to lazy
            data; what it reads it keeps in memory.
        transform_common: a pure function from the common state, with holes where shards were, to the one that is
            written.
        common_backend: the format of the common state; the one that a save would choose by default.
        layout: how whole tensors are cut: a function from a shard to counts of pieces along its axes, or patterns of
            keys to such counts. What it leaves open is cut only where it is larger than a batch.
        leave_out: patterns (``*``, ``?``, ``[seq]``) of keys that aren't converted; ``"common"`` is the common state.
            Whatever else isn't in the output is an error.
        max_bytes_in_flight: the most bytes that a batch holds. A format that can't stream has one batch in memory.
        verify: whether the destination is read back and compared.
        durable: whether everything is on the medium before the checkpoint counts.
        allow_pickle: whether pickled values may be unpickled, which can run any code, and pickled again.
        types: enum, dataclass and namedtuple classes that stored records become instances of.
        strategies: the dispatch table; None for the process's.
        progress: is told, now and then, how many bytes were written, and later compared, since the last time.

    Raises:
        NotACheckpoint: there is no source.
        AlreadyACheckpoint: the destination has a checkpoint.
        KeyMismatch: a key of the source is neither used nor left out, or a pattern names nothing.
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
    options: Any = {"allow_pickle": allow_pickle, "types": types, "strategies": strategies}
    opened = open_checkpoint(source, **options)
    most, tell = max_bytes_in_flight, progress or SaveOptions().progress
    plan = plan_conversion(opened, transform, transform_common, leave_out=leave_out, layout=layout, most_bytes=most)
    choices = _latest(backend, strategies), None if common_backend is None else _latest(common_backend, strategies)
    backends = backends_of(*choices, strategies)
    target = Destination(
        storage_at(destination), choices, backends, strategies, SaveOptions(durable, allow_pickle, progress=tell)
    )
    digest = conversion_digest(opened.checkpoint, backends, plan.batches, allow_pickle=allow_pickle)
    journal = journal_at(target.storage, digest, strategies)
    resumed, may_be_others = _written(target, journal, plan)
    checked = None
    try:
        if verify or may_be_others:
            written = open_checkpoint(target.storage, **options)
            checked = check_written(written, plan, min(max(most, _LEAST_BYTES), MOST_BYTES), tell)
    except IntegrityError:
        forget(journal)
        raise
    forget(journal)
    return _report(plan, resumed, checked)


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
    return backend, max(versions, default=1)  # where there is none, the save says which there are


def _written(target: Destination, journal: Journal, plan: Plan) -> tuple[int, bool]:
    """Write what isn't written, and return how many batches were, and whether a checkpoint that was there isn't ours.

    Raises:
        AlreadyACheckpoint: there is one that this conversion hasn't begun.
    """
    storage, save_id = target.storage, begun_save(journal)
    if storage.length(METADATA_FILE) is not None or recognized(storage, target.strategies) is not None:
        if save_id is None:
            raise AlreadyACheckpoint(
                error_text(f"convert: {storage.where()!r} already holds a checkpoint", fix="Convert to another folder.")
            )
        # It was killed after the commit.
        return len(plan.batches), read_fields(storage, target.strategies).get("save_id") != save_id
    common = {} if plan.common is HOLE else plan.common
    rehearse_tensors(target, plan.tensors)
    rehearse_common(target, common)
    remove_others(journal)
    if save_id is None:
        begun = look(storage, target.backends, target.strategies, overwrite=False)
        draft = draft_of(begun, storage, Turn(0, 1), target.options)
        make_folder(draft, target.backends, target.strategies)
        save_id = draft.save_id
        if "folder" in draft.memo:
            draft.memo["folder"].wait()  # each batch has a draft of its own, which knows nothing of this
        begin_journal(journal, save_id, durable=target.options.durable)
    try:
        with owned(storage, save_id, durable=target.options.durable):
            return write_batches(target, journal, save_id, plan, common), False
    except Exception as error:
        # There are no other ranks that the failure of one would have to be told of.
        own = error.__cause__ if isinstance(error, RemoteError) and error.__cause__ is not None else error
        _clean_or_tell(storage, journal, save_id, own)
        if own is not error:
            raise own from None
        raise


def _clean_or_tell(storage: Storage, journal: Journal, save_id: str, error: BaseException) -> None:
    if has_files(journal):
        error.add_note("convert: what was written stays there, and the same call goes on with it")
        return
    forget(journal)
    disown(storage, save_id)
