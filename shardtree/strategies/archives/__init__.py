"""Formats that consist of torch.save's files, one for each rank: where each tensor's bytes are, and what follows."""

from ._contents import (
    Contents,
    Piece,
    RankPart,
    Tensors,
    check_rank,
    contents_of,
    local_part,
    piece_columns,
    place_parts,
    state_key,
)
from ._files import ArchiveFile, ValueAt, filled, hyperparameters, read_archives
from ._rows import ACTIONS, rows_from_contents, rows_of_archives
