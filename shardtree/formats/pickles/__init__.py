"""Pickles without `pickle`: a reader that calls nothing except constructors that its caller lists, and a writer."""

from ._machine import Constructor, Irregular, Machine, Run, Stub, contents, inert
from ._read import read_pickle
from ._write import Global, New, Pairs, Persistent, PickleWriter, Reduced, reference, write_pickle
