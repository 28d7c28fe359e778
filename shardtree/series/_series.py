"""CheckpointSeries: the steps of a run under one root."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, overload

from ..core.deferred import notebook_html
from ..core.geometry import check_type, refuse
from ..errors import CheckpointingException, MetadataError, NotACheckpoint, error_text
from ..inspection import verify
from ..shell.checkpoint.async_saves import AsyncCallsQueue
from ..shell.checkpoint.loading import load
from ..shell.checkpoint.saving import save
from ..shell.storage import Directory, Storage, folder_in, storage_at
from ..shell.table import AsyncRequest, SaveOptions, Strategies
from ..shell.world import World, agree, current_world, on_rank_zero
from ._listing import StepRecord, check_names, checked_metrics, list_steps, newest_step
from ._progress import progress_check
from ._removal import STALE_AFTER, Removal
from ._remove import apply_policy, clean, drop_after, plan_removal, remove_steps
from ._save import (
    SavePlace,
    alike_step,
    change_record,
    check_save,
    checked_step,
    each_metric,
    folder_for,
    nothing,
    with_record,
)
from .policies import Choose, SavedStep

logger = logging.getLogger("shardtree")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointSeries:
    """The steps of a run, each a checkpoint in a folder of its own under one root.

    Nothing is cached: each call lists the storage. Every rank of the world calls each method; rank 0 lists
    and removes, and all ranks get the same answer. ``world=st.world.one_process()`` is for one process.

    Args:
        root: Path, URL or `Storage` of the folder of all steps; created by the first save.
        names: Format string of the steps' folder names; existing folders may have more or fewer leading zeros.
        world: World of the ranks that take part; by default torch.distributed's default group, or else this process
            alone.
        strategies: Dispatch table; None for the process's.
        keep: Policy to apply after each save, once it is committed. Steps that it doesn't keep are removed then; a
            failing removal is a warning in the log. None removes nothing by itself.
        queue: This rank's own `AsyncCallsQueue`, on which `save` schedules its request; None for no queue.

    Raises:
        StorageError: The root isn't a path, URL or storage.
        MetadataError: Step numbers can't be parsed from `names`, `keep` isn't a function, or `queue` isn't a queue.

    Examples:
        >>> import torch, shardtree as st
        >>> series = CheckpointSeries(st.storage.MemoryStorage())
        >>> for step in (100, 200, 300):
        ...     series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, step)
        >>> [step.number for step in series.steps()], series.latest().folder
        ([100, 200, 300], 'step_00000300')
        >>> series.remove(series.plan_removal(st.retention.keep_last(1)))
        (100, 200)
        >>> series = CheckpointSeries(series.root, keep=st.retention.keep_last(2))
        >>> series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, 400)
        >>> [step.number for step in series.steps()]
        [300, 400]
    """

    root: Directory
    names: str = "step_{:08d}"
    world: Any = None
    strategies: Strategies | None = field(default=None, repr=False)
    keep: Choose | None = field(default=None, kw_only=True)
    queue: AsyncCallsQueue | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        """Check the names, and make the root absolute, so that a later change of directory doesn't matter."""
        check_names(self.names)
        if self.keep is not None and not callable(self.keep):
            kind, fix = type(self.keep).__name__, "Pass a policy, such as st.retention.keep_last(3)."
            refuse("CheckpointSeries", "keep", kind, "a function of a listing", fix, error=MetadataError)
        if self.queue is not None:
            check_type("CheckpointSeries", "queue", self.queue, AsyncCallsQueue, "Pass an AsyncCallsQueue().")
        object.__setattr__(self, "root", storage_at(self.root))

    def steps(self) -> tuple[SavedStep, ...]:
        """Return the finished steps, in the order of their numbers; steps that are being removed are left out."""
        return on_rank_zero(self._ranks(), "series: list", self._list)

    def latest(self) -> SavedStep | None:
        """Return the finished step with the highest number, whenever it was saved; None if there is none.

        If a run went back to an earlier step, the later steps still count until `drop_after` removes them.
        """
        return on_rank_zero(self._ranks(), "series: list", self._newest)

    def latest_verified(self) -> SavedStep | None:
        """Return the newest finished step in which `verify` finds no damage; None if there is none.

        Rank 0 reads whole checkpoints, newest first, and logs why it rejects one; the others wait, up to the timeout.
        """
        return on_rank_zero(self._ranks(), "series: verify", self._latest_verified)

    def at(self, step: int | SavedStep | None = None) -> Storage:
        """Return the storage of a finished step, the newest by default, for `open_checkpoint`, `verify` and others.

        Raises:
            NotACheckpoint: There is no such step.
        """
        return folder_in(self._storage, self._alone("series: find", partial(self._find, step), step).folder)

    def load(self, sharded_state_dict: Any, step: int | SavedStep | None = None, **keywords: Any) -> Any:
        """Load a finished step, the newest by default.

        Args:
            sharded_state_dict: Target tree, as for `st.load`.
            step: The step; None for the newest.
            keywords: Further keyword arguments of `st.load`.

        Raises:
            NotACheckpoint: There is no such step.
        """
        arguments: dict[str, Any] = {"world": self.world, "strategies": self.strategies, **keywords}
        return load(sharded_state_dict, self.at(step), **arguments)

    @overload
    def save(
        self,
        sharded_state_dict: Any,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = ...,
        pinned: bool = ...,
        async_sharded_save: Literal[False] = ...,
        compare: bool = ...,
        **keywords: Any,
    ) -> None: ...
    @overload
    def save(
        self,
        sharded_state_dict: Any,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = ...,
        pinned: bool = ...,
        async_sharded_save: Literal[True],
        compare: bool = ...,
        **keywords: Any,
    ) -> AsyncRequest[Any]: ...
    @overload
    def save(
        self,
        sharded_state_dict: Any,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = ...,
        pinned: bool = ...,
        async_sharded_save: bool = ...,
        compare: bool = ...,
        **keywords: Any,
    ) -> AsyncRequest[Any] | None: ...
    def save(
        self,
        sharded_state_dict: Any,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        pinned: bool = False,
        async_sharded_save: bool = False,
        compare: bool = False,
        **keywords: Any,
    ) -> AsyncRequest[Any] | None:
        """Save a step, and apply the series' policy once it is committed; the policy never removes this step.

        Saving a step with a lower number than an existing one logs a warning: the run has gone back.

        With a queue, finished saves are committed, this save is scheduled, and its request is returned: its `result()`
        waits for the save. With `async_sharded_save` and no queue, the request is returned unscheduled.

        Args:
            sharded_state_dict: Sharded tree, as for `st.save`.
            step: Number of the step, 0 or more.
            metrics: Numbers by name, for policies, the same on every rank. `note` adds later measurements.
            pinned: Whether every policy keeps the step.
            async_sharded_save: Whether to return the request instead of running it; no effect if there is a queue.
            compare: Whether to log a warning if the saved tensors equal the previous step's, and one if they differ
                from those in memory at this call. This needs ``SaveOptions(fingerprint=True)``, and reads the tensors
                once more.
            keywords: Further keyword arguments of `st.save`.

        Raises:
            AlreadyACheckpoint: The step exists already, and `overwrite` isn't given.
            MetadataError: The step isn't a number, or the metrics aren't numbers by name.
            WorldError: Ranks passed different steps, names, metrics or pins, or only some have a queue or a policy.
            CheckpointingException: The save failed, as in `save`; or an earlier save of the queue failed: the error's
                notes name it, and this save isn't begun.
        """
        ranks = self._ranks()
        if self.queue is not None:
            # Earlier saves are committed first, so that their memory is free before this save takes as much.
            self.queue.maybe_finalize_async_calls()
        check = partial(check_save, step, metrics, keywords.get("options"))
        # Queues and policies are compared too: a rank that has one would wait for the others in vain.
        later = {"async_sharded_save": async_sharded_save, "queue": self.queue, "keep": self.keep}
        alike = {
            "step": alike_step(step),
            "names": self.names,
            "pinned": bool(pinned),
            "compare": bool(compare),
            **each_metric(metrics),
        }
        alike |= {name: value not in (None, False) for name, value in later.items()}
        number, values = agree(ranks, "series: check", check, given=alike)
        # Rank 0 chooses the folder for all, so that no two ranks write to different ones.
        folder = on_rank_zero(
            ranks, "series: find the step's folder", partial(folder_for, self._storage, self.names, number)
        )
        arguments: dict[str, Any] = {"world": self.world, "strategies": self.strategies, **keywords}
        if not async_sharded_save and self.queue is None:
            # The save runs before this returns, so the caller can't change the tensors meanwhile: a copy would be
            # wasted.
            arguments["options"] = replace(arguments.get("options") or SaveOptions(), snapshot=False)
        place = SavePlace(self._storage, folder, StepRecord(None, values, bool(pinned)), arguments["strategies"])
        # The check is prepared before the save begins, since the tensors may change afterwards.
        compared = progress_check(sharded_state_dict, place, self.names, number, ranks) if compare else nothing
        request = save(sharded_state_dict, folder_in(self._storage, folder), async_sharded_save=True, **arguments)
        noting = with_record(request, place)
        noting = noting.add_finalize_fn(compared if ranks.rank == 0 else nothing)
        if self.keep is not None:
            noting = noting.add_finalize_fn(self._apply(self.keep, number) if ranks.rank == 0 else nothing)
        if self.queue is not None:
            self.queue.schedule_async_request(noting)
            return noting
        if async_sharded_save:
            return noting
        noting.execute_sync()
        return None

    def note(self, step: int | SavedStep, metrics: Mapping[str, Any]) -> None:
        """Add rank 0's metrics to the record of a finished step.

        Raises:
            NotACheckpoint: There is no such step.
            MetadataError: The metrics aren't numbers by name.
            CorruptCheckpoint: The step's record can't be read.
        """
        # All ranks check, though rank 0's metrics count, so that a value that can't be stored is an error on all of
        # them.
        values = agree(self._ranks(), "series: check metrics", partial(checked_metrics, metrics))
        self._change(step, lambda record: replace(record, metrics={**record.metrics, **values}))

    def pin(self, step: int | SavedStep) -> None:
        """Pin a finished step: no policy removes it.

        Raises:
            NotACheckpoint: There is no such step.
        """
        self._change(step, lambda record: replace(record, pinned=True))

    def unpin(self, step: int | SavedStep) -> None:
        """Unpin a finished step: policies may remove it again.

        Raises:
            NotACheckpoint: There is no such step.
        """
        self._change(step, lambda record: replace(record, pinned=False))

    def plan_removal(self, policy: Choose | None = None) -> Removal:
        """Return the plan of a removal: the steps to remove, and the steps to keep with reasons. Print it as a dry run.

        Args:
            policy: Function from the finished steps to the numbers of those to keep, such as `keep_last(3)`; only rank
                0 calls it. The newest step and pinned steps stay anyway. None for the series' own policy.

        Raises:
            MetadataError: Neither this call nor the series has a policy.
        """
        policy = self.keep if policy is None else policy
        if policy is None:
            fix = "Pass a policy, such as st.retention.keep_last(3), or make the series with keep=."
            raise MetadataError(error_text("series: plan_removal has no policy", fix=fix))
        plan = partial(plan_removal, self._storage, self.names, policy, self.strategies)
        return on_rank_zero(self._ranks(), "series: plan a removal", plan)

    def remove(self, removal: Removal) -> tuple[int, ...]:
        """Finish interrupted removals, then execute a plan; return the numbers of the steps that this call removed.

        Only the planned files are removed. After a crash, each step is either whole or no longer listed, and the next
        removal removes the remaining files. A step stays if it was saved anew or pinned since the plan, if a save to it
        is in progress, or if it is the newest by now.

        Raises:
            StorageError: Some steps can't be removed; all others were removed.
            MetadataError: The argument isn't a plan.
        """
        check_type("series: remove", "removal", removal, Removal, "Pass the result of plan_removal.")
        run = partial(remove_steps, self._storage, self.names, removal, self.strategies)
        return on_rank_zero(self._ranks(), "series: remove", run)

    def drop_after(self, step: int | SavedStep) -> tuple[int, ...]:
        """Remove the finished steps with higher numbers than a given step; return their numbers.

        This is for a run that goes back: later steps would still count as the newest. The highest is removed first, so
        that a crash leaves no gap. Pinned steps stay.

        Raises:
            NotACheckpoint: There is no such step.
            StorageError: Some steps can't be removed; all others were removed.

        Examples:
            >>> import torch, shardtree as st
            >>> series = CheckpointSeries(st.storage.MemoryStorage())
            >>> for number in (100, 200, 300):
            ...     series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, number)
            >>> series.drop_after(100), series.latest().number
            ((300, 200), 100)
        """

        def run() -> tuple[int, ...]:
            return drop_after(self._storage, self.names, self._find(step).number, self.strategies)

        return self._alone("series: remove", run, step)

    def clean(self, *, stale_after: float = STALE_AFTER) -> tuple[str, ...]:
        """Finish interrupted removals, and remove orphaned files of steps that were never finished.

        Args:
            stale_after: Seconds without a change after which a save of another machine counts as interrupted. A save of
                this machine counts as interrupted once its process has ended.

        Returns:
            Names of unfinished steps' folders that were not removed.
        """
        run = partial(clean, self._storage, self.names, self.strategies, stale_after=stale_after)
        return on_rank_zero(self._ranks(), "series: clean", run)

    @property
    def _storage(self) -> Storage:
        return storage_at(self.root)

    def _repr_html_(self) -> str:
        # A listing takes all ranks: in a notebook on one of several ranks, its display would wait for the others.
        return notebook_html(self if self._ranks().size == 1 else repr(self))

    def _ranks(self) -> World:
        return current_world(self.world)

    def _apply(self, policy: Choose, number: int) -> Callable[[], None]:
        return partial(apply_policy, self._storage, self.names, policy, self.strategies, number)

    def _list(self) -> tuple[SavedStep, ...]:
        return list_steps(self._storage, self.names, self.strategies)

    def _newest(self) -> SavedStep | None:
        return newest_step(self._storage, self.names, self.strategies)

    def _find(self, step: int | SavedStep | None) -> SavedStep:
        number = None if step is None else checked_step(step.number if isinstance(step, SavedStep) else step)
        if number is None and (newest := self._newest()) is not None:
            return newest
        steps = self._list()
        matches = [one for one in steps if number is None or one.number == number]
        if not matches:
            listing = "no finished step" if not steps else f"only others, from {steps[0].number} to {steps[-1].number}"
            heading = f"series: no {'step' if number is None else f'step {number}'} under {self._storage.where()!r}"
            raise NotACheckpoint(error_text(heading, found=listing, fix="Pass one of steps()." * bool(steps)))
        return matches[-1]

    def _latest_verified(self) -> SavedStep | None:
        # The newest is verified first: usually it is whole, and then no other step is read.
        for step in reversed(self._list()):
            try:
                damage = verify(folder_in(self._storage, step.folder), strategies=self.strategies)
                wrong = str(damage[0]) if damage else ""
            except CheckpointingException as error:
                wrong = str(error)
            if not wrong:
                return step
            logger.warning("series: step %d is passed over: %s", step.number, wrong)
        return None

    def _change(self, step: int | SavedStep, change: Callable[[StepRecord], StepRecord]) -> None:
        def run() -> None:
            change_record(self._storage, self._find(step), change)

        self._alone("series: note", run, step)

    def _alone(self, phase: str, run: Callable[[], T], step: int | SavedStep | None) -> T:
        """Run a function on rank 0 alone, and return its result on all ranks; raise if they passed different steps."""
        return on_rank_zero(self._ranks(), phase, run, given={"step": alike_step(step)})
