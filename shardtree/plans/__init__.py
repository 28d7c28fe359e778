"""Plans: who writes which shard, and which stored bytes go where, as columns. Every rank computes the same plan."""

from ._convertible import convertible as convertible
from ._exchange import ExchangePlan as ExchangePlan
from ._exchange import grouped as grouped
from ._exchange import plan_exchange as plan_exchange
from ._exchange import read_rounds as read_rounds
from ._explain import Explanation as Explanation
from ._explain import FailedCheck as FailedCheck
from ._explain import Prospect as Prospect
from ._explain import RankReads as RankReads
from ._explain import ReadCost as ReadCost
from ._explain import Undecided as Undecided
from ._fit import Gap as Gap
from ._fit import Misfit as Misfit
from ._fit import Mismatch as Mismatch
from ._fit import Overlap as Overlap
from ._fit import PrefixDifference as PrefixDifference
from ._fit import Refusal as Refusal
from ._fit import Unexpected as Unexpected
from ._fit import find_gaps as find_gaps
from ._fit import find_mismatches as find_mismatches
from ._fit import find_unexpected as find_unexpected
from ._fit import misfit_lines as misfit_lines
from ._fit import overlaps as overlaps
from ._fit import prefix_difference as prefix_difference
from ._fit import stored_elements as stored_elements
from ._load import LoadPlan as LoadPlan
from ._load import Runs as Runs
from ._load import StoredChunks as StoredChunks
from ._load import Strided as Strided
from ._load import plan_load as plan_load
from ._load import runs_plan as runs_plan
from ._save import held_places as held_places
from ._save import level_writes as level_writes
from ._save import main_writes as main_writes
from ._text import differing_prefix as differing_prefix
from ._text import near_names as near_names
from .moving import SourceTree as SourceTree
from .moving import TargetTree as TargetTree
from .moving import agreed_common as agreed_common
from .moving import complete as complete
from .moving import reshard as reshard
from .moving import take_source as take_source
from .moving import take_target as take_target
from .resharding import Origin as Origin
from .resharding import Provenance as Provenance
from .resharding import ReshardPlan as ReshardPlan
from .resharding import Schedule as Schedule
from .resharding import Transfers as Transfers
from .resharding import peak_bytes as peak_bytes
from .resharding import plan_reshard as plan_reshard
from .resharding import with_relays as with_relays

__all__ = [
    "ExchangePlan",
    "Explanation",
    "FailedCheck",
    "Gap",
    "LoadPlan",
    "Misfit",
    "Mismatch",
    "Origin",
    "Provenance",
    "RankReads",
    "ReadCost",
    "Refusal",
    "ReshardPlan",
    "Runs",
    "Schedule",
    "StoredChunks",
    "Strided",
    "Transfers",
    "Undecided",
    "Unexpected",
    "level_writes",
    "main_writes",
    "peak_bytes",
    "plan_load",
    "plan_reshard",
    "reshard",
    "with_relays",
]
