"""Which process group of torch.distributed coordinates, and the gloo groups made beside the caller's.

Those are made from gloo's own class: ``torch.distributed.new_group`` has to be called by every rank of the job, or,
with ``use_local_synchronization``, hangs where ranks belong to different numbers of groups. They have a process
group's methods, and ranks are ranks in the group.
"""

from __future__ import annotations

import atexit
from collections import Counter
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ..errors import WorldError, error_text

# A ProcessGroup or a ProcessGroupGloo, which share no typed base.
Gloo: TypeAlias = Any

# A gloo group that outlives the end of the interpreter aborts the process, so nothing else holds one for long: these go
# with the caller's group, or at exit.
_made: WeakKeyDictionary[torch.distributed.ProcessGroup, dict[str | None, Gloo]] = WeakKeyDictionary()
_times_made: Counter[str] = Counter()


def is_initialised() -> bool:
    """Return whether torch.distributed has a default process group."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def coordination_group(group: torch.distributed.ProcessGroup | None, timeout: float, purpose: str | None) -> Gloo:
    """Return a gloo group with the members of a group.

    It is the group itself where that is gloo for CPU tensors and has to serve no purpose of its own; else one that is
    made the first time that all members ask for it, and kept as long as the group.

    Raises:
        WorldError: if there is no such group, or this process isn't in it.
    """
    import torch.distributed as dist

    group = _member_of(group)
    if purpose is None and "cpu:gloo" in dist.get_backend_config(group).split(","):
        return group
    made = _made.setdefault(group, {})
    if purpose not in made:
        made[purpose] = _make(group, timeout, purpose)
        atexit.unregister(_made.clear)
        atexit.register(_made.clear)
    return made[purpose]


def _member_of(group: torch.distributed.ProcessGroup | None) -> torch.distributed.ProcessGroup:
    """Return the group, or the default one, once sure that this process is in it."""
    import torch.distributed as dist

    if not is_initialised():
        fix = "Call torch.distributed.init_process_group first, or pass world=one_process()."
        raise WorldError(error_text("torch.distributed has no default process group", fix=fix))
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise WorldError(error_text(f"rank {dist.get_rank()} is not in the process group that it was given"))
    return group


def _make(group: torch.distributed.ProcessGroup, timeout: float, purpose: str | None) -> Gloo:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    ranks = dist.get_process_group_ranks(group)
    # The members make theirs in the same order, so they count alike; and what an earlier group left in the store
    # under its name isn't met again.
    name = f"shardtree/{purpose or ''}/{'_'.join(map(str, ranks))}"
    _times_made[name] += 1
    store = PrefixStore(f"{name}/{_times_made[name]}", _get_default_store())
    try:
        return dist.ProcessGroupGloo(store, group.rank(), group.size(), timedelta(seconds=timeout))
    except RuntimeError as error:
        what = f"the {len(ranks)} ranks of a process group couldn't make a gloo group beside it"
        raise WorldError(error_text(what, found=f"{type(error).__name__}: {error}")) from error
