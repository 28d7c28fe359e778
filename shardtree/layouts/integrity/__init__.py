"""Whether ranks' shards, objects and common states fit together; problems are returned as values."""

from ._faults import Faults as Faults
from ._faults import doubled_faults as doubled_faults
from ._faults import select_faults as select_faults
from ._faults import sharding_faults as sharding_faults
from ._integrity import access_problems as access_problems
from ._integrity import check_access as check_access
from ._integrity import common_problems as common_problems
from ._integrity import join_agreed as join_agreed
from ._integrity import join_checked as join_checked
from ._integrity import join_columns as join_columns
from ._integrity import raise_problems as raise_problems
from ._integrity import sharding_problems as sharding_problems
from ._integrity import write_problems as write_problems
from ._objects import ObjectColumns as ObjectColumns
from ._objects import join_objects as join_objects
from ._objects import kind_problems as kind_problems
from ._objects import object_columns as object_columns
from ._objects import object_problems as object_problems
from ._problems import Problem as Problem
from ._problems import fault_problems as fault_problems
from ._problems import place_text as place_text
from ._problems import problem_lines as problem_lines
