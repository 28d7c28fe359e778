"""Two saves to one folder: the second has to wait for the first one's commit."""

from __future__ import annotations

from ...errors import CheckpointReplaced, error_text
from ...storage import Directory, is_same_place, storage_at
from ._exit import on_their_way


def refuse_overlap(directory: Directory, rank: int) -> None:
    """Raise where a save of this rank to the same folder is on its way.

    Whichever of the two is committed last would find another checkpoint than the one that it was to replace. That is
    noticed then too, but after everything was written.

    Raises:
        CheckpointReplaced: names the save.
    """
    # Simulated ranks are in one process, and each answers for itself alone.
    own = [call for call in on_their_way() if call.request.world.rank == rank]
    for call in own:
        if call.request.folder is not None and is_same_place(call.request.folder, storage_at(directory)):
            fix = "Finalize it first, with maybe_finalize_async_calls(blocking=True), or save to another folder."
            raise CheckpointReplaced(error_text(f"save: {call} isn't committed yet", fix=fix))
