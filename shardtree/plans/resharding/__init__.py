"""Resharding plans: which bytes go from which rank to which, in which order, when tensors change their layout."""

from ._plan import ReshardPlan as ReshardPlan
from ._plan import peak_bytes as peak_bytes
from ._plan import plan_reshard as plan_reshard
from ._relay import with_relays as with_relays
from ._schedule import BYTES_IN_FLIGHT as BYTES_IN_FLIGHT
from ._schedule import Schedule as Schedule
from ._summary import Origin as Origin
from ._summary import Provenance as Provenance
from ._transfers import Transfers as Transfers
