"""How much a model's predictions of a text change when its cache is compressed.

plan.py       the windows, methods and budgets to measure
measure.py    a row for each window and method
summary.py    means, intervals, and pairs of methods over the same windows
pictures.py   divergence against bytes
"""
