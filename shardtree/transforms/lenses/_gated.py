"""A lens for gated layers (SwiGLU, GeGLU): gate and up rows lie together on each rank, and apart in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from ._axis_runs import AxisRuns, grouped_runs, joined_parts
from ._boxes import positive
from ._lens import Lens
from ._mapped import mapped_axis
from ._names import check_names


def gate_and_up(
    *, tensor_parallel: int, axis: int = 0, part: str | None = None, names: Sequence[str] | None = None
) -> Lens:
    """Return the lens of a gated layer's fused tensor, of which each tensor-parallel rank holds [gate; up] of its own.

    Cut as plain rows, such a tensor would come back with halves of other ranks in it where the ranks' number changes.

    Args:
        tensor_parallel: over how many ranks the layer is cut: so many times gate and up lie one after the other in what
            all ranks hold together. 1 where the layer isn't cut, whatever else (FSDP, ZeRO) cuts its rows.
        axis: along which gate and up lie.
        part: what of the key is replaced by the names, as ``"linear_fc1"``.
        names: of gate and of up, as ``("gate_proj", "up_proj")``. Without names both are stored in one tensor under the
            same key, all gate rows before all up rows, as Megatron-Core does.

    Raises:
        MetadataError: `tensor_parallel` is no integer of at least 1.
        TreeError: the names aren't sound, or the key has no such part.
        ShapeError: the axis can't be divided like that.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("mlp.fc1.weight", torch.arange(4), (0, 1, 2))  # rank 1 of 2
        >>> lens = gate_and_up(tensor_parallel=2, part="fc1", names=("gate_proj", "up_proj"))
        >>> [(part.key, part.global_shape, part.global_offset, part.data.tolist()) for part in lens(shard).shards]
        [('mlp.gate_proj.weight', (4,), (2,), [0, 1]), ('mlp.up_proj.weight', (4,), (2,), [2, 3])]

    References:
        Megatron-Core 0.16, `apply_swiglu_sharded_factory`.
    """
    ranks = positive("gate_and_up", "tensor_parallel", tensor_parallel)
    check_names("gate_and_up", part, names, 2)

    def runs(length: int) -> AxisRuns:
        both = grouped_runs(length, ranks, (length // (2 * ranks),) * 2)
        return both if names is not None else joined_parts(both)

    return mapped_axis(axis, runs, part=part, names=names, doing="gate_and_up")
