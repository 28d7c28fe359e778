"""Lazy tensors: views, casts and arithmetic on stored tensors, recorded now and computed when they are read."""

from __future__ import annotations

from ._bits import INTEGERS, as_integers, flat_bytes
from ._filled import has_no_elements, memory_beside, only_filled
from ._make import computed, frozen_values, lazy_map, stored, stored_each
from ._operations import is_view
from ._sources import Box, Boxwise, Concatenated, Fetch, Recipe, Source, Stored, Strided, covering, dense
from ._steady import EXACT, INEXACT, is_exact, steady
from ._tensor import LazyTensor, of_source
