"""Running a plan in memory: whole trees from one layout into another, box by box."""

from .._convertible import convert as convert
from ._copy import CARRIERS as CARRIERS
from ._copy import Boxes as Boxes
from ._copy import Memories as Memories
from ._copy import Regions as Regions
from ._copy import copy_boxes as copy_boxes
from ._copy import copy_transfers as copy_transfers
from ._copy import memory_of as memory_of
from ._copy import shard_regions as shard_regions
from ._copy import target_regions as target_regions
from ._copy import write_boxes as write_boxes
from ._reshard import SourceTree as SourceTree
from ._reshard import TargetTree as TargetTree
from ._reshard import agreed_common as agreed_common
from ._reshard import complete as complete
from ._reshard import reshard as reshard
from ._reshard import take_source as take_source
from ._reshard import take_target as take_target
