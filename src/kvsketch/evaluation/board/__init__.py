"""A leaderboard: methods, each with every way to share a budget among heads, at equal bytes, on one page.

plan.py       which specs are compared; equal.py: the budget given to each so that all hold the same
speed.py      seconds to compress, decode speed and peak memory (peak.py), beside exact; timed.py: on which document
prompts.py    the prompts that were asked, for other packages
gathering.py  rows of all these, and of other packages
lines.py      the method, heads and budget of a line; columns.py: what the columns say of each line
ranking.py    which line is best in a column, and which cannot be told from the best
content.py    all that stands on the page; page.py, board.html: the page
"""
