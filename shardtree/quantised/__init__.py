"""Quantised weights: values and scales as one tensor, cut together, in the forms in which they are stored."""

from ._form import Form
from ._forms import FORMS
from ._part import Part
from ._recode import recode

__all__ = ["FORMS", "Form", "Part", "recode"]
