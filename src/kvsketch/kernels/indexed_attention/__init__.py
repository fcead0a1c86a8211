"""Attention over some of the rows in memory: runs of neighbours, other ones for every query.

`reference.py` is the definition, over all rows with a mask; `gathered.py` copies the rows that are read side by side,
where queries are few. The form in C, which reads them where they lie together with all else that a query reads, is in
`native/attention.c`; `reading.py` decides.
"""

from kvsketch.kernels.indexed_attention.gathered import indexed_attention
from kvsketch.kernels.sources import Segments

__all__ = ["Segments", "indexed_attention"]
