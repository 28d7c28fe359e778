"""Loading: a target is taken apart, checked against what is stored, filled, and put together."""

import typing

if typing.TYPE_CHECKING:
    from ._ask import LoadRequest, listing, matched_target, resolve, stored_common
    from ._checks import CommonOf, Keys, Run, check_rank, in_common_state, unexpected_keys
    from ._choice import ExchangeChoice, Place, bytes_wanted_twice, exchange_choice, place_of
    from ._groups import Shards, by_dtype, groups_of, stored_shard, traits_of_load
    from ._objects import ObjectsFit, fit_objects, objects_metadata
    from ._plain import asking_whole
    from ._prospect import prospect
    from ._read import (
        Destination,
        Reading,
        as_stored,
        convert_all,
        deliver,
        destination_of,
        read_into,
        read_shards,
    )
    from ._strict import (
        RAISING,
        RANK_VALUES,
        Omissions,
        StrictHandling,
        log_untaken,
        mismatched_keys,
        parse_strict,
        refuse_omissions,
    )
    from ._targets import CPU, Kinds, Target, check_tensors, new_memory, take_apart, usable_device
    from ._typed import load
else:
    from ....core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "CPU": "._targets",
            "CommonOf": "._checks",
            "Destination": "._read",
            "ExchangeChoice": "._choice",
            "Keys": "._checks",
            "Kinds": "._targets",
            "LoadRequest": "._ask",
            "ObjectsFit": "._objects",
            "Omissions": "._strict",
            "Place": "._choice",
            "RAISING": "._strict",
            "RANK_VALUES": "._strict",
            "Reading": "._read",
            "Run": "._checks",
            "Shards": "._groups",
            "StrictHandling": "._strict",
            "Target": "._targets",
            "as_stored": "._read",
            "asking_whole": "._plain",
            "by_dtype": "._groups",
            "bytes_wanted_twice": "._choice",
            "check_rank": "._checks",
            "check_tensors": "._targets",
            "convert_all": "._read",
            "deliver": "._read",
            "destination_of": "._read",
            "exchange_choice": "._choice",
            "fit_objects": "._objects",
            "groups_of": "._groups",
            "in_common_state": "._checks",
            "listing": "._ask",
            "load": "._load",
            "log_untaken": "._strict",
            "matched_target": "._ask",
            "mismatched_keys": "._strict",
            "new_memory": "._targets",
            "objects_metadata": "._objects",
            "parse_strict": "._strict",
            "place_of": "._choice",
            "prospect": "._prospect",
            "read_into": "._read",
            "read_shards": "._read",
            "refuse_omissions": "._strict",
            "resolve": "._ask",
            "stored_common": "._ask",
            "stored_shard": "._groups",
            "take_apart": "._targets",
            "traits_of_load": "._groups",
            "unexpected_keys": "._checks",
            "usable_device": "._targets",
        },
    )
