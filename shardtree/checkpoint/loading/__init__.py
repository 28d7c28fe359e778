"""Loading: a target is taken apart, checked against what is stored, filled, and put together."""

from ._explain import explain as explain
from ._explain import explain_ranks as explain_ranks
from ._load import load as load
from ._load import load_plain_tensors as load_plain_tensors
from ._strict import StrictHandling as StrictHandling
