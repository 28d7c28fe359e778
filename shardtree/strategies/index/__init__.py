"""The index: what is in a checkpoint and where, in columns. Formats fill it; loads plan on it."""

from ._build import build_index as build_index
from ._columns import COLUMNS as COLUMNS
from ._columns import Index as Index
from ._damage import file_damage as file_damage
from ._load import load_from_index as load_from_index
from ._load import plan_shards as plan_shards
from ._load import read_planned as read_planned
from ._mapping import IndexMetadata as IndexMetadata
from ._problems import index_problem as index_problem
from ._rows import chunks_of as chunks_of
from ._rows import file_at as file_at
from ._rows import kind_at as kind_at
from ._rows import whole_shard as whole_shard
from ._texts import find_texts as find_texts
from ._texts import text_at as text_at
from ._texts import text_columns as text_columns
from ._texts import texts as texts
from ._without import without_prefix as without_prefix
