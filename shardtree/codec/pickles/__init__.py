"""Pickles without `pickle`: a reader that calls nothing except constructors that its caller lists, and a writer."""

from ._machine import read_pickle as read_pickle
from ._state import Constructor as Constructor
from ._state import Stub as Stub
from ._state import inert as inert
from ._write import Global as Global
from ._write import New as New
from ._write import Persistent as Persistent
from ._write import Reduced as Reduced
from ._write import write_pickle as write_pickle
