"""Loading: a target is taken apart, checked against what is stored, filled, and put together."""

from ._explain import explain, explain_ranks
from ._load import load, load_plain_tensors
from ._strict import StrictHandling
