"""How long a step takes beside exact and stock, how much of that is reading memory, and when a method is faster.

plan.py      what is timed, and what makes rows the same; usual.py: the defaults
made.py      what is made up to be timed: keys and values, a model, an index, a profile of heads
checks.py    what an answer reads, and whether it is right; a wrong one is not timed
clock.py     steps timed by turns, with a pass over other memory before each
layer.py     one layer
whole.py     whole models: prompts, and decode steps; subjects.py: which models
summary.py   from which context on a method is faster than exact; pictures.py: how times grow
"""
