"""Lazy tensors: views, casts and arithmetic on stored tensors, recorded now and computed when they are read."""

from __future__ import annotations

from ._many import frozen_values as frozen_values
from ._many import stored_each as stored_each
from ._sources import Fetch as Fetch
from ._sources import Source as Source
from ._tensor import LazyTensor as LazyTensor
from ._tensor import lazy_map as lazy_map
from ._tensor import stored as stored
