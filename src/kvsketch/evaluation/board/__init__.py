"""A leaderboard: methods, each with every way to share a budget among heads, at equal bytes, on one page.

plan.py       which specs are compared
speed.py      seconds to compress, decode speed and peak memory, beside exact in the same process; peak.py
prompts.py    what was asked, for other packages
lines.py      whose results stand in a line; columns.py: what the columns say of each line, from rows
ranking.py    who is best in a column, and who cannot be told from the best
page.py       the page
"""
