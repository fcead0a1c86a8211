"""How long a step takes beside exact and stock, what of that is reading memory, and when a method pays.

plan.py      what is timed, and what makes rows the same; usual.py: unless told otherwise
made.py      what is made up for it: keys and values, a model, an index, a profile of heads
checks.py    what an answer reads, and whether it is right; a wrong one is not timed
clock.py     times in turn, with a pass over other memory between two of them
layer.py     one layer
whole.py     whole models: prompts, and tokens one by one
summary.py   from which context on a method is faster than exact; pictures.py: how times grow
"""
