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
            "._ask": "LoadRequest listing matched_target resolve stored_common",
            "._checks": "CommonOf Keys Run check_rank in_common_state unexpected_keys",
            "._choice": "ExchangeChoice Place bytes_wanted_twice exchange_choice place_of",
            "._groups": "Shards by_dtype groups_of stored_shard traits_of_load",
            "._load": "load",
            "._objects": "ObjectsFit fit_objects objects_metadata",
            "._plain": "asking_whole",
            "._prospect": "prospect",
            "._read": "Destination Reading as_stored convert_all deliver destination_of read_into read_shards",
            "._strict": (
                "Omissions RAISING RANK_VALUES StrictHandling log_untaken mismatched_keys parse_strict refuse_omissions"
            ),
            "._targets": "CPU Kinds Target check_tensors new_memory take_apart usable_device",
        },
    )
