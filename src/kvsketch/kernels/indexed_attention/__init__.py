"""Attention over some of the rows in memory: runs of neighbours, other ones for every query.

`reference.py` is the definition, over all rows with a mask; `gathered.py` copies the rows that are read side by side,
where queries are few. A form that reads them where they lie (C, Triton) is one more file here, and a line in
`indexed_attention`.
"""

from kvsketch.kernels.indexed_attention.gathered import indexed_attention
from kvsketch.kernels.indexed_attention.segments import Segments

__all__ = ["Segments", "indexed_attention"]
