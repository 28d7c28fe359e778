"""Shared parts of formats that store torch.save files, one for each rank: an index of tensors, and strategies."""

from ._contents import Contents, Piece, Tensors, contents_of, piece_columns, piece_of, state_key
from ._files import ArchiveFile, ValueAt, filled, hyperparameters, is_whole_archive, read_archives
from ._masters import Comparison, first_difference
from ._parts import RankPart, check_rank, local_part, place_parts
from ._rows import rows_from_contents
from ._scattered import check_record
