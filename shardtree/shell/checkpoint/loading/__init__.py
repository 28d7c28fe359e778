"""Loading: a target is split into leaves, checked against the checkpoint, filled, and built into a tree again."""

import typing

if typing.TYPE_CHECKING:
    from ._ask import LoadRequest, matched_target, resolve
    from ._choice import ExchangeChoice, ReadPlace, bytes_wanted_twice, exchange_choice, place_of
    from ._fit import in_common_state, prospect, unexpected_keys
    from ._objects import ObjectsFit, fit_objects
    from ._omissions import RANK_VALUES, Omissions, join_common, leave_out, refuse_omissions
    from ._plain import asking_whole
    from ._read import (
        Destination,
        Reading,
        Shards,
        as_stored,
        by_dtype,
        convert_all,
        deliver,
        destination_of,
        groups_of,
        read_into,
        read_shards,
        stored_shard,
        traits_of_load,
    )
    from ._stored import Stored
    from ._strict import RAISING, StrictHandling, mismatched_keys, parse_strict, refuse_keys
    from ._targets import CPU, Kinds, Target, check_tensors, new_memory, take_apart, usable_device
    from ._typed import load
else:
    from ....core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._ask": "LoadRequest matched_target resolve",
            "._choice": "ExchangeChoice ReadPlace bytes_wanted_twice exchange_choice place_of",
            "._fit": "in_common_state prospect unexpected_keys",
            "._load": "load",
            "._objects": "ObjectsFit fit_objects",
            "._omissions": "Omissions RANK_VALUES join_common leave_out refuse_omissions",
            "._plain": "asking_whole",
            "._read": (
                "Destination Reading Shards as_stored by_dtype convert_all deliver destination_of groups_of read_into "
                "read_shards stored_shard traits_of_load"
            ),
            "._stored": "Stored",
            "._strict": "RAISING StrictHandling mismatched_keys parse_strict refuse_keys",
            "._targets": "CPU Kinds Target check_tensors new_memory take_apart usable_device",
        },
    )
