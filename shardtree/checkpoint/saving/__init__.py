"""Saving: a tree is taken apart, written by all ranks to a folder, and committed, or replaces an old checkpoint."""

import typing

if typing.TYPE_CHECKING:
    from ._typed import save
else:
    from ._save import save
