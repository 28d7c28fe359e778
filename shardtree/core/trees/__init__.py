"""Pure functions over trees: maps, paths, partitions and unions, differences, edits, factories.

A tree is any nesting of dicts, lists, tuples, namedtuples, deques and classes that users registered. No function here
changes its argument; results have new containers where something changed, and share tensors.
"""

import typing

from ._at_paths import deepest, nodes_at, unfilled
from ._checks import (
    check_is_tree,
    holds_tensors,
    is_plain_tensor,
    megatron_kind,
    refuse_hidden,
    refuse_shapeless,
    refuse_too_deep,
    refuse_without_elements,
    refuse_wrappers,
)
from ._common import United, common_with_holes, comparable, restrict, unite, united, values_only, without_holes
from ._difference import Difference, NumericDifference, WorstElement, diff, value_at
from ._edit import (
    cast,
    empty_data,
    full_data,
    join_data,
    narrow,
    padding_like,
    prefix,
    rename,
    torch_converts,
    without_data,
)
from ._factories import (
    MergeOne,
    apply_factories,
    apply_factory_merges,
    build_factories,
    extract_metadata,
    held_tensors,
    merge_anew,
    merge_into_held,
)
from ._hidden import flatten_visible, hides_shards
from ._join import Record, is_hollow, join, left_out, misfits
from ._key_forms import FormPiece, KeyForm, one_of, text_piece
from ._key_patterns import (
    check_patterns_fit,
    check_stars,
    checked_keys,
    checked_patterns,
    differing_prefix,
    fill_key,
    key_form,
    key_matcher,
    match_key,
    match_keys,
    near_names,
    near_patterns,
    shell_differences,
    stars,
    with_guesses,
)
from ._maps import (
    bind,
    call_at,
    check_function,
    compose,
    described_kind,
    map_data,
    map_shards,
    map_sharing,
    register_nodes,
    with_data,
)
from ._nodes import (
    HOLE,
    NAMESPACE,
    Field,
    Hole,
    Tree,
    describe,
    entries,
    fields_of,
    flatten_with_paths,
    is_dict,
    is_sequence,
    is_subclass,
    leaves_with_paths,
    like,
    namedtuple_types,
    path_key,
    refusing_depth,
    same_kind,
    shard_leaves,
)
from ._partition import (
    chooser,
    combine,
    extract_nonpersistent,
    extract_sharded,
    is_function,
    merge,
    names_of,
    partition,
    prune,
    select,
)
from ._wrappers import factory_of, has_factories, unwrap

if typing.TYPE_CHECKING:
    from ._prefixes import broadcast_prefix, place_above, prefix_places
    from ._register import node_data, register_dataclass
    from ._scaled import BY_SCALES, SCALED_DTYPES, plain_matcher, refuse_scaled, scaled_values, scaled_what, those_of
    from ._transform import Transform, target_through
else:
    from ..deferred import later

    __getattr__ = later(
        __name__,
        {
            "._prefixes": "broadcast_prefix place_above prefix_places",
            "._register": "node_data register_dataclass",
            "._scaled": "BY_SCALES SCALED_DTYPES plain_matcher refuse_scaled scaled_values scaled_what those_of",
            "._transform": "Transform target_through",
        },
    )

register_nodes()
