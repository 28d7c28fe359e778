"""Maintenance of stored checkpoints: whether bytes are what was saved, and the removal of keys."""

from ._findings import gaps, refused_findings, span_findings, untaken_findings
from ._removal import remove_sharded, unused_files, without_prefix
from ._stored_parts import stored_parts
from ._verify_index import (
    bounding_box,
    file_contents,
    files_findings,
    regions_between,
    verify_index,
    whole_file_findings,
)
from ._verify_native import verify_files
