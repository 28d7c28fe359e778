"""Quantised weights: values and scales, cut and converted together, in the forms in which checkpoints store them."""

from ._form import Form
from ._forms import FORMS
from ._part import Part
from ._recode import recode

__all__ = ["FORMS", "Form", "Part", "recode"]
