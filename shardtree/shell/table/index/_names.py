"""Names of a format's files in the folder of a save: those that the clean-up of replaced and failed saves knows."""

from __future__ import annotations

from ....errors import StrategyError, error_text
from .._save_folders import FORMAT_FILE
from .._values import PendingSave


def rank_file(pending: PendingSave, suffix: str, number: int = 0) -> str:
    """Return the name of a rank's data file, in the save's folder.

    Args:
        pending: the checkpoint.
        suffix: the format's, lower-case letters and digits.
        number: counts the rank's files.

    Raises:
        StrategyError: the suffix or the number can't be in the name of a file that the clean-up knows.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> rank_file(PendingSave(MemoryStorage(), "save-1", one_process()), "tar")
        'save-1/00000-of-00001.tar'
    """
    part = f"-{number}" if number else ""
    name = f"{pending.save_id}/{pending.world.rank:05d}-of-{pending.world.size:05d}{part}.{suffix}"
    return in_save_folder(name, pending.save_id)


def save_file(pending: PendingSave, name: str) -> str:
    """Return the name of a format's own file in the save's folder, such as its index: one that the clean-up knows.

    Args:
        pending: The checkpoint that is being written.
        name: Lower-case letters, digits, and of ``._-`` any after the first. A file "index.json" is taken for the
            index, which is removed after all others.

    Raises:
        StrategyError: The name has other characters.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> save_file(PendingSave(MemoryStorage(), "save-1", one_process()), "index.json")
        'save-1/own-index.json'
    """
    return in_save_folder(f"{pending.save_id}/own-{name}", pending.save_id)


def in_save_folder(name: str, folder: str) -> str:
    """Return the name of a format's file, if it is one that the clean-up of replaced and failed saves removes.

    Args:
        name: The file's name in the checkpoint.
        folder: The save's folder.

    Raises:
        StrategyError: it isn't.
    """
    above, _, last = name.rpartition("/") if isinstance(name, str) else ("", "", "")
    if above != folder or FORMAT_FILE.fullmatch(last) is None:
        expected = f"{folder}/<rank>-of-<ranks>.<suffix> or {folder}/own-<name>, of lower-case letters and digits"
        fix = (
            "Name data files by `rank_file(pending, suffix, number)`, and others by `save_file(pending, name)`; "
            "files with other names would stay when the save is replaced."
        )
        raise StrategyError(error_text("save: a data file with another name", found=name, expected=expected, fix=fix))
    return name
