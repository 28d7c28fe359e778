"""Looking at whole checkpoints: compare, verify, explain, replicas, fingerprints, and what a folder is that is none."""

import typing

if typing.TYPE_CHECKING:
    from ._comparison import (
        MOST_BYTES,
        BoxReader,
        CheckpointDifference,
        KindDifference,
        compare,
        group_bytes,
        plain_difference,
        value_differences,
    )
    from ._differences import ValueDifference, boxes, boxes_within, joint_difference
    from ._explain import explain, explain_ranks
    from ._fingerprint import fingerprint, in_usual_threads
    from ._no_checkpoint import step_prefix
    from ._opened import OpenCheckpoint, StoredBoxes, index_of, largest_tensors, open_checkpoint, tree_of
    from ._replicas import check_replicas
    from ._verify import verify
    from ._whole_tensors import load_plain_tensors
else:
    from ..core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "BoxReader": "._comparison",
            "CheckpointDifference": "._comparison",
            "KindDifference": "._comparison",
            "MOST_BYTES": "._comparison",
            "OpenCheckpoint": "._opened",
            "StoredBoxes": "._opened",
            "ValueDifference": "._differences",
            "boxes": "._differences",
            "boxes_within": "._differences",
            "check_replicas": "._replicas",
            "compare": "._comparison",
            "explain": "._explain",
            "explain_ranks": "._explain",
            "fingerprint": "._fingerprint",
            "group_bytes": "._comparison",
            "in_usual_threads": "._fingerprint",
            "index_of": "._opened",
            "joint_difference": "._differences",
            "largest_tensors": "._opened",
            "load_plain_tensors": "._whole_tensors",
            "open_checkpoint": "._opened",
            "plain_difference": "._comparison",
            "step_prefix": "._no_checkpoint",
            "tree_of": "._opened",
            "value_differences": "._comparison",
            "verify": "._verify",
        },
    )
