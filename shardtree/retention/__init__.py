"""Retention: which steps of a series of checkpoints are kept, as pure functions over an immutable listing."""

from ._decide import NEWEST as NEWEST
from ._decide import PINNED as PINNED
from ._decide import retained as retained
from ._metric import best_step as best_step
from ._metric import keep_best as keep_best
from ._policy import Choose as Choose
from ._policy import RetentionPolicy as RetentionPolicy
from ._policy import keep_all as keep_all
from ._policy import keep_any as keep_any
from ._policy import keep_steps as keep_steps
from ._policy import sorted_steps as sorted_steps
from ._position import keep_every as keep_every
from ._position import keep_last as keep_last
from ._step import SavedStep as SavedStep
from ._time import keep_every_seconds as keep_every_seconds
from ._time import keep_for as keep_for
