"""The public names: what `shardtree` exports, what this list says and what docs/api.md shows are the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import shardtree

PAGE = Path(__file__).parents[2] / "docs" / "api.md"

PUBLIC = """
ShardedTensor
ShardedObject
ShardedTensorFactory
LocalNonpersistentObject
ShardedBase
is_main_replica
StateDict
CommonStateDict
ShardedStateDict
ReplicaId
FactoryBuildFn
FactoryMergeFn
map_shards
map_data
lazy_map
leaves_with_paths
shard_leaves
partition
combine
merge
diff
Difference
rename
prefix
select
cast
narrow
unbox
rebox
without_data
extract_sharded
extract_nonpersistent
extract_metadata
apply_factories
apply_factory_merges
compose
bind
join
common_with_holes
without_holes
Hole
HOLE
partial_rename
split_tensor
merge_tensors
stack_layers
unstack_layers
unpad_tensors
pad_tensors
transpose_tensors
as_factory
factories_by_pattern
compose
Lens
Built
AxisRuns
attention_qkv
expert_keys
expert_stack
gate_and_up
grouped_runs
joined_parts
by_pattern
mapped_axis
padded_axis
rearranged
renamed
rotary_halves
rotary_pairs
stacked_layers
tied
transposed
unstacked_layers
PADDING
plan_buffers
BufferPlan
BufferPlace
BufferRange
flat_shards
flat_targets
buffer_slices
slice_views
boxes_of
flat_of
get_param_id_to_sharded_param_map
get_param_id_to_name_map
sharded_params_by_name
optim_state_to_sharding_state
sharding_state_to_optim_state
abstract_optim_state
abstract_optim_state_from_metadata
optim_state_by_name
optim_state_by_id
regroup_optim_state
make_sharded_optimizer_tensor
per_parameter
OptimizerRule
adafactor_rules
reduced_axis
block_scales
one_per_parameter
one_per_shard
ShardColumns
shard_columns
join_columns
access_problems
sharding_problems
object_columns
common_problems
check_access
Problem
Reshaped
Mesh
PartitionSpec
Split
shard
shard_at
from_local
abstract
abstract_at
layout_of
specs_by_pattern
unshard
coverage
Coverage
mesh_columns
mesh_shards
Part
RankBox
rank_leaf
tree_columns
ObjectArray
ObjectRule
reshard_objects
replicate_objects
replicate_cell
concatenate_objects
redistribute_objects
fold_objects
drop_objects
rules_by_field
PartialFingerprint
partial_fingerprints
add_fingerprints
fingerprint
Explanation
FailedCheck
Gap
LoadPlan
Mismatch
RankReads
ReadCost
Refused
Undecided
Unexpected
plan_load
level_writes
main_writes
plan_reshard
reshard
ReshardPlan
Transfers
Schedule
relayed
peak_bytes
Provenance
Origin
World
one_process
simulate
distributed
current_world
redistribute
Exchange
save
explain
explain_ranks
load
load_common_state_dict
load_tensors_metadata
load_sharded_metadata
load_plain_tensors
load_content_metadata
remove_sharded_tensors
is_checkpoint
verify
Damage
Region
Unchecked
VerifyReport
open_checkpoint
OpenCheckpoint
LazyTensor
Record
StrictHandling
convert
ConversionReport
compare
CheckpointDifference
KindDifference
ValueDifference
StrategyAction
Strategies
default_strategies
get_default_strategy
find_strategy
register_default_strategy
Checkpoint
PendingSave
AsyncRequest
AsyncCallsQueue
async_calls
CheckpointSeries
Removal
StepFiles
SavedStep
RetentionPolicy
retained
keep_all
keep_any
keep_best
keep_every
keep_every_seconds
keep_for
keep_last
keep_steps
best_step
Storage
LocalStorage
MemoryStorage
ReadReport
CheckpointingException
MetadataError
ShapeError
TreeError
KeyMismatch
IntegrityError
UnsupportedValue
UnsafeFile
StrategyError
NotACheckpoint
AlreadyACheckpoint
CorruptCheckpoint
CheckpointReplaced
StorageError
WorldError
RemoteError
""".split()

EXPORTED = dir(shardtree)
FUNCTIONS = [name for name in EXPORTED if inspect.isfunction(getattr(shardtree, name))]
CLASSES = [name for name in EXPORTED if inspect.isclass(getattr(shardtree, name))]


def documented(page: str) -> list[str]:
    return re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)$", page, re.MULTILINE)


def test_the_public_names_are_these() -> None:
    assert sorted(EXPORTED) == sorted(PUBLIC)


def test_the_page_shows_every_public_name_once() -> None:
    assert sorted(documented(PAGE.read_text())) == sorted(PUBLIC)


@pytest.mark.parametrize("name", FUNCTIONS + CLASSES)
def test_a_docstring_begins_with_a_sentence(name: str) -> None:
    text = inspect.getdoc(getattr(shardtree, name)) or ""
    assert re.match(r"[A-Z`].*?[.:](\s|$)", text, re.DOTALL)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"distributed"}))  # which needs processes
def test_a_function_shows_an_example_that_runs(name: str) -> None:
    text = inspect.getdoc(getattr(shardtree, name)) or ""
    assert re.search(r"^Examples:\n +>>> ", text, re.MULTILINE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_typed(name: str) -> None:
    function = getattr(shardtree, name)
    untyped = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
    assert untyped == []
    assert "return" in function.__annotations__
