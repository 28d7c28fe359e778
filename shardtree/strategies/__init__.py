"""Strategies: the dispatch table, the signatures of its rows, and one package a format."""

from ._actions import PROTOCOLS as PROTOCOLS
from ._actions import Commit as Commit
from ._actions import Describe as Describe
from ._actions import Explain as Explain
from ._actions import ListFiles as ListFiles
from ._actions import LoadCommon as LoadCommon
from ._actions import LoadMetadata as LoadMetadata
from ._actions import LoadObjects as LoadObjects
from ._actions import LoadSharded as LoadSharded
from ._actions import Recognize as Recognize
from ._actions import RemoveSharded as RemoveSharded
from ._actions import SaveCommon as SaveCommon
from ._actions import SaveObjects as SaveObjects
from ._actions import SaveSharded as SaveSharded
from ._actions import Strategies as Strategies
from ._actions import Strategy as Strategy
from ._actions import StrategyAction as StrategyAction
from ._actions import StrategyTable as StrategyTable
from ._actions import VerifyFiles as VerifyFiles
from ._checks import IN_COMMON as IN_COMMON
from ._checks import check_fit as check_fit
from ._checks import misfit as misfit
from ._checks import old_unique_key as old_unique_key
from ._findings import Damage as Damage
from ._findings import Finding as Finding
from ._findings import Region as Region
from ._findings import Unchecked as Unchecked
from ._findings import VerifyReport as VerifyReport
from ._findings import by_reason as by_reason
from ._findings import stored_parts as stored_parts
from ._manifest import MANIFEST_FILE as MANIFEST_FILE
from ._manifest import manifest_findings as manifest_findings
from ._metadata import check_unchanged as check_unchanged
from ._metadata import check_unreplaced as check_unreplaced
from ._metadata import decode_metadata as decode_metadata
from ._metadata import encode_metadata as encode_metadata
from ._metadata import is_of_others as is_of_others
from ._metadata import metadata_bytes as metadata_bytes
from ._metadata import not_a_checkpoint as not_a_checkpoint
from ._metadata import read_metadata as read_metadata
from ._metadata import replace_metadata as replace_metadata
from ._metadata import unreplaced as unreplaced
from ._save_folders import OWNER_FILE as OWNER_FILE
from ._save_folders import disown as disown
from ._save_folders import is_left_over as is_left_over
from ._save_folders import is_save_file as is_save_file
from ._save_folders import is_save_folder as is_save_folder
from ._save_folders import make_save_folder as make_save_folder
from ._save_folders import owned as owned
from ._save_folders import remove_save as remove_save
from ._save_folders import save_is_alive as save_is_alive
from ._traits import METADATA_FILE as METADATA_FILE
from ._traits import FormatTraits as FormatTraits
from ._traits import Stamp as Stamp
from ._traits import is_deciding as is_deciding
from ._traits import stamp as stamp
from ._values import AsyncRequest as AsyncRequest
from ._values import Checkpoint as Checkpoint
from ._values import Exchange as Exchange
from ._values import Fields as Fields
from ._values import LoadOptions as LoadOptions
from ._values import PendingSave as PendingSave
from ._values import Replaced as Replaced
from ._values import SaveOptions as SaveOptions
from .base import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
from .base import deciding_files as deciding_files
from .base import default_strategies as default_strategies
from .base import find_strategy as find_strategy
from .base import get_default_strategy as get_default_strategy
from .base import register_default_strategy as register_default_strategy
from .base import table_of as table_of
from .base import traits_of as traits_of
from .index import Index as Index
from .index import RankFiles as RankFiles
from .index import StoredItem as StoredItem
from .index import build_index as build_index
from .index import item_buffers as item_buffers
from .index import rank_file as rank_file
from .index import rank_files as rank_files
from .index import read_index as read_index
from .index import rows_from_index as rows_from_index
from .index import rows_of_saves as rows_of_saves
from .index import save_with_index as save_with_index
from .index import stored_fingerprints as stored_fingerprints
from .index import write_file as write_file
from .index._mapping import PairItems as PairItems
from .index._mapping import PairValues as PairValues

__all__ = [
    "PROTOCOLS",
    "AsyncRequest",
    "Checkpoint",
    "Commit",
    "Damage",
    "Describe",
    "Exchange",
    "Explain",
    "Fields",
    "Finding",
    "FormatTraits",
    "Index",
    "ListFiles",
    "LoadCommon",
    "LoadMetadata",
    "LoadObjects",
    "LoadOptions",
    "LoadSharded",
    "PendingSave",
    "RankFiles",
    "Recognize",
    "Region",
    "RemoveSharded",
    "Replaced",
    "SaveCommon",
    "SaveObjects",
    "SaveOptions",
    "SaveSharded",
    "StoredItem",
    "Strategies",
    "Strategy",
    "StrategyAction",
    "StrategyTable",
    "Unchecked",
    "VerifyFiles",
    "VerifyReport",
    "build_index",
    "default_strategies",
    "find_strategy",
    "get_default_strategy",
    "item_buffers",
    "rank_file",
    "rank_files",
    "read_index",
    "register_default_strategy",
    "rows_from_index",
    "rows_of_saves",
    "save_with_index",
    "write_file",
]
