"""Attention over some of the rows in memory: runs of neighbouring rows, different ones for every query.

`reference.py` is the definition: all rows, with a mask. For few queries `gathered.py` first copies the rows that are
read next to one another. The form in C (`native/attention.c`) reads them where they lie, in one call with all else that
a query reads; `reading.py` chooses the form.
"""

from kvsketch.kernels.indexed_attention.gathered import indexed_attention
from kvsketch.kernels.sources import Segments

__all__ = ["Segments", "indexed_attention"]
