"""Whether ranks' shards, objects and common states fit together; problems are returned as values."""

from ._integrity import (
    access_problems,
    check_access,
    check_stored_shards,
    common_problems,
    join_checked,
    join_columns,
    raise_problems,
    sharding_problems,
    write_problems,
)
from ._objects import ObjectColumns, join_objects, kind_problems, object_columns, object_problems
from ._problems import (
    Faults,
    Problem,
    doubled_faults,
    fault_problems,
    place_text,
    problem_lines,
    select_faults,
    sharding_faults,
)
