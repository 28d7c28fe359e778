"""Plans: who writes which shard, and which stored bytes go where, in columns that every rank computes alike."""

from ._exchange import ExchangePlan as ExchangePlan
from ._exchange import plan_exchange as plan_exchange
from ._load import LoadPlan as LoadPlan
from ._load import Runs as Runs
from ._load import StoredChunks as StoredChunks
from ._load import Strided as Strided
from ._load import plan_load as plan_load
from ._load import runs_plan as runs_plan
from ._save import level_writes as level_writes
from ._save import main_writes as main_writes
