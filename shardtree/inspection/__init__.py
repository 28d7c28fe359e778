"""Inspection of whole checkpoints: comparison, verification, explanation, fingerprints, and foreign folders."""

import typing

if typing.TYPE_CHECKING:
    from ._comparison import (
        BoxReader,
        CheckpointDifference,
        KindDifference,
        compare,
        group_bytes,
        plain_difference,
        value_differences,
    )
    from ._contents import (
        load_common_state_dict,
        load_content_metadata,
        load_sharded_metadata,
        load_tensors_metadata,
    )
    from ._differences import ValueDifference, boxes, boxes_within, joint_difference
    from ._explain import explain, explain_ranks
    from ._explained import Explanation, FailedCheck, RankReads, Undecided
    from ._fingerprint import fingerprint, in_usual_threads
    from ._no_checkpoint import step_prefix
    from ._opened import (
        OpenCheckpoint,
        StoredBoxes,
        index_of,
        largest_tensors,
        open_checkpoint,
        refuse_unproven,
        tree_of,
        unproven_of,
    )
    from ._replicas import check_replicas
    from ._verify import verify
    from ._whole_tensors import load_plain_tensors
else:
    from ..core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._comparison": (
                "BoxReader CheckpointDifference KindDifference compare group_bytes plain_difference value_differences"
            ),
            "._contents": "load_common_state_dict load_content_metadata load_sharded_metadata load_tensors_metadata",
            "._differences": "ValueDifference boxes boxes_within joint_difference",
            "._explain": "explain explain_ranks",
            "._explained": "Explanation FailedCheck RankReads Undecided",
            "._fingerprint": "fingerprint in_usual_threads",
            "._no_checkpoint": "step_prefix",
            "._opened": (
                "OpenCheckpoint StoredBoxes index_of largest_tensors open_checkpoint refuse_unproven tree_of "
                "unproven_of"
            ),
            "._replicas": "check_replicas",
            "._verify": "verify",
            "._whole_tensors": "load_plain_tensors",
        },
    )
