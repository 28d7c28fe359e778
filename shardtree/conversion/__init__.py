"""Conversion: a checkpoint of any format, streamed through a pure function to a checkpoint of another.

Plan (shards, their accounting and batches), write (batch by batch, recorded in a journal), commit, check.
"""

from ._convert import ConversionReport, convert
from ._source import left_out_keys
