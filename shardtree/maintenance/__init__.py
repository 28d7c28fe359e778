"""Maintenance of stored checkpoints: verification of their bytes, and removal of keys."""

import typing

if typing.TYPE_CHECKING:
    from ._findings import check_taken, gaps, refused_findings, span_findings, untaken_findings
    from ._opened import RequestReader, fetch_ahead, opened
    from ._removal import remove_sharded, without_prefix
    from ._stored_parts import stored_parts
    from ._verify_index import (
        bounding_box,
        file_contents,
        file_regions,
        files_findings,
        regions_between,
        verify_index,
        whole_file_findings,
    )
    from ._verify_native import verify_files
else:
    from ..core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._findings": "check_taken gaps refused_findings span_findings untaken_findings",
            "._opened": "RequestReader fetch_ahead opened",
            "._removal": "remove_sharded without_prefix",
            "._stored_parts": "stored_parts",
            "._verify_index": (
                "bounding_box file_contents file_regions files_findings regions_between verify_index "
                "whole_file_findings"
            ),
            "._verify_native": "verify_files",
        },
    )
