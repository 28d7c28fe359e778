"""Hypothesis strategies for sharded states, and laws to check functions against.

This package is for your own tests, and needs the extra ``testing``; ``import shardtree`` doesn't load it. Strategies
draw plain descriptions (a dtype, a tensor, a `Layout`), and functions make shards from them, so that drawing runs no
code under test. A broken law raises an AssertionError that names the difference.
"""

from ._bits import assemble, bits, first_difference, outline, refilled
from ._check_resume import check_resume, resume_problems
from ._check_storage import check_storage
from ._check_world import check_world
from ._law_factory import check_factory, factories, glu, lens_factories, transposed
from ._law_lens import LENS_CASES, LensCase, check_build_undoes_merge, check_layouts_agree, check_lens
from ._law_plans import (
    BufferOptions,
    buffer_options,
    check_buffer_plan,
    check_flat_shards,
    check_layout,
    check_load_plan,
    check_writes,
    packed_slices,
    shard_elements,
)
from ._law_purity import check_commutes, check_pure
from ._law_reshard import check_filled, check_reshard, check_reshard_plan
from ._law_resume import ResumeProblem
from ._law_schedules import check_moved, check_relayed, check_schedule, element_numbers, moved
from ._law_trace import check_quantised, check_trace
from ._layouts import (
    Layout,
    Piece,
    cut,
    even_layout,
    flat_layouts,
    irregular_layouts,
    layouts,
    regular_layouts,
    replicas,
)
from ._optimizer_states import (
    OptimizerState,
    check_held_once,
    check_optimizer_roundtrip,
    even_optimizer_layout,
    optimizer_layouts,
    optimizer_states,
    rank_optimizer,
)
from ._states import (
    GlobalState,
    ShardedTrees,
    check_roundtrip,
    common_states,
    global_states,
    rank_tree,
    sharded_trees,
    state_layouts,
    target_tree,
)
from ._tensors import (
    PRINTABLE_DTYPES,
    STORABLE_DTYPES,
    MeshCase,
    dtypes,
    mesh_cases,
    meshes,
    partition_specs,
    random_bits,
    shapes,
    tensors,
)
from ._watched import Call, watched
from ._ways import check_ways
from .conformance import RefusedCase, StrategyReport, check_strategy
from .conformance._row_cases import check_rows

__all__ = [
    "GlobalState",
    "OptimizerState",
    "Piece",
    "ResumeProblem",
    "assemble",
    "bits",
    "buffer_options",
    "check_buffer_plan",
    "check_commutes",
    "check_factory",
    "check_flat_shards",
    "check_layouts_agree",
    "check_lens",
    "check_load_plan",
    "check_optimizer_roundtrip",
    "check_pure",
    "check_quantised",
    "check_relayed",
    "check_reshard",
    "check_resume",
    "check_roundtrip",
    "check_rows",
    "check_schedule",
    "check_storage",
    "check_strategy",
    "check_trace",
    "check_ways",
    "check_world",
    "check_writes",
    "common_states",
    "cut",
    "dtypes",
    "even_layout",
    "factories",
    "first_difference",
    "flat_layouts",
    "global_states",
    "glu",
    "irregular_layouts",
    "layouts",
    "lens_factories",
    "meshes",
    "optimizer_layouts",
    "optimizer_states",
    "partition_specs",
    "regular_layouts",
    "replicas",
    "resume_problems",
    "shapes",
    "sharded_trees",
    "state_layouts",
    "tensors",
    "transposed",
]
