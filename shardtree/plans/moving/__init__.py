"""Running a plan in memory: whole trees from one layout into another, box by box."""

from .._convertible import convert as convert
from ._copy import copy_transfers as copy_transfers
from ._copy import write_boxes as write_boxes
from ._ends import SourceTree as SourceTree
from ._ends import TargetTree as TargetTree
from ._ends import agreed_common as agreed_common
from ._ends import complete as complete
from ._ends import take_source as take_source
from ._ends import take_target as take_target
from ._regions import CARRIERS as CARRIERS
from ._regions import Boxes as Boxes
from ._regions import Memories as Memories
from ._regions import Regions as Regions
from ._regions import copy_boxes as copy_boxes
from ._regions import memory_of as memory_of
from ._regions import shard_regions as shard_regions
from ._regions import target_regions as target_regions
from ._reshard import reshard as reshard
