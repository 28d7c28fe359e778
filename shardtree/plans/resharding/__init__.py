"""Resharding plans: which bytes go from which rank to which, in which order, when tensors change their layout."""

from ._plan import ReshardPlan, peak_bytes, plan_reshard
from ._relay import with_relays
from ._schedule import BYTES_IN_FLIGHT, Schedule
from ._summary import Origin, Provenance
from ._transfers import Transfers
