"""How far a model's predictions of a text move when its cache is compressed.

plan.py       which texts, windows, methods and budgets
measure.py    a row for each window and method
summary.py    means, intervals, and pairs of methods over the same windows
pictures.py   divergence against bytes
"""
