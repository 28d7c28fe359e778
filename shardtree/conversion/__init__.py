"""Conversion: a checkpoint of any format is streamed through a pure function to a checkpoint of another format.

The steps are: plan the shards and batches, and check that no key of the source is lost; write batch by batch, recorded
in a journal; commit; check the destination.
"""

from ._convert import ConversionReport, convert
from ._source import left_out_keys
