"""Saving: a tree is taken apart, written by all ranks to a folder, and committed, or replaces an old checkpoint."""

import typing

if typing.TYPE_CHECKING:
    from ._commit import save_request
    from ._parts import take_apart
    from ._replace import is_live, own_files
    from ._start import (
        RunningSave,
        SaveStart,
        in_save_folder,
        inspect_folder,
        make_folder,
        named_file,
        pending_save,
    )
    from ._typed import save
else:
    from ....core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._commit": "save_request",
            "._parts": "take_apart",
            "._replace": "is_live own_files",
            "._start": "RunningSave SaveStart in_save_folder inspect_folder make_folder named_file pending_save",
            "._save": "save",
        },
    )
