"""Saving: all ranks write the shards of a tree to a folder, which is then committed or replaces an old checkpoint."""

import typing

if typing.TYPE_CHECKING:
    from ._formats import Formats, steps_of_formats
    from ._parts import take_apart
    from ._replace import is_live, own_files
    from ._saver import Saver
    from ._start import inspect_folder, make_folder, named_file, pending_save
    from ._typed import save
    from ._values import Start
else:
    from ....core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._formats": "Formats steps_of_formats",
            "._parts": "take_apart",
            "._replace": "is_live own_files",
            "._save": "save",
            "._saver": "Saver",
            "._start": "inspect_folder make_folder named_file pending_save",
            "._values": "Start",
        },
    )
