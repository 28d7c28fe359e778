"""Hypothesis strategies for whole sharded states, and the laws that they are checked against.

For tests of one's own, with the extra ``testing``; ``import shardtree`` doesn't load it. Strategies draw plain
descriptions (a dtype, a tensor, a `Layout`), and functions make shards of them, so that drawing runs no code that is
under test. A law raises AssertionError and says what differs.
"""

from ._assemble import assemble as assemble
from ._assemble import refilled as refilled
from ._bits import bits as bits
from ._bits import first_difference as first_difference
from ._bits import outline as outline
from ._common import common_states as common_states
from ._dtypes import PRINTABLE_DTYPES as PRINTABLE_DTYPES
from ._dtypes import STORABLE_DTYPES as STORABLE_DTYPES
from ._dtypes import dtypes as dtypes
from ._factories import factories as factories
from ._factories import glu as glu
from ._factories import stacked as stacked
from ._factories import transposed as transposed
from ._law_factory import check_factory as check_factory
from ._law_plans import check_load_plan as check_load_plan
from ._law_plans import check_writes as check_writes
from ._law_purity import check_pure as check_pure
from ._law_reshard import check_reshard as check_reshard
from ._law_reshard_plans import check_filled as check_filled
from ._law_reshard_plans import check_reshard_plan as check_reshard_plan
from ._law_reshard_plans import shard_elements as shard_elements
from ._law_schedules import check_moved as check_moved
from ._law_schedules import check_relayed as check_relayed
from ._law_schedules import check_schedule as check_schedule
from ._law_schedules import element_numbers as element_numbers
from ._law_schedules import moved as moved
from ._layout import Layout as Layout
from ._layout import Piece as Piece
from ._layout import cut as cut
from ._layouts import even_layout as even_layout
from ._layouts import layouts as layouts
from ._meshes import meshes as meshes
from ._meshes import partition_specs as partition_specs
from ._roundtrip import check_roundtrip as check_roundtrip
from ._rows import check_rows as check_rows
from ._shapes import shapes as shapes
from ._states import GlobalState as GlobalState
from ._states import global_states as global_states
from ._states import rank_tree as rank_tree
from ._states import state_layouts as state_layouts
from ._states import target_tree as target_tree
from ._tensors import random_bits as random_bits
from ._tensors import tensors as tensors
from ._watched import Call as Call
from ._watched import WatchedStorage as WatchedStorage
