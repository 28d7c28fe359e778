"""Pickles without `pickle`: a reader that calls nothing except constructors that its caller lists, and a writer."""

from ._constructors import Constructor, Stub, inert
from ._limits import contents
from ._machine import Irregular, Machine, Run, Scan
from ._read import read_pickle
from ._write import Global, New, Pairs, Persistent, PickleWriter, Reduced, reference, write_pickle
