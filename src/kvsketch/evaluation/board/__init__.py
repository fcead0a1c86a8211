"""A leaderboard: methods, each with every way to share a budget among heads, at equal bytes, on one page.

plan.py       which specs are compared; equal.py: what each is given so that all hold the same
speed.py      seconds to compress, decode speed and peak memory (peak.py), beside exact; timed.py: of which document
prompts.py    what was asked, for other packages
gathering.py  rows of all these, and of other packages
lines.py      whose results stand in a line; columns.py: what the columns say of each line
ranking.py    who is best in a column, and who cannot be told from the best
content.py    all that stands on the page; page.py, board.html: the page
"""
