"""Pickles without `pickle`: a reader that calls nothing except constructors that its caller lists, and a writer."""

from ._machine import read_pickle
from ._state import Constructor, Irregular, Machine, Run, Scan, Stub, inert
from ._write import Global, New, Pairs, Persistent, PickleWriter, Reduced, reference, write_pickle
