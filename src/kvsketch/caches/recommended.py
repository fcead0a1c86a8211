"""The methods that are recommended, see docs/methods.md."""

RECOMMENDED = "kvzip(keep=0.25)"  # where questions come later
GOES_ON = "kvzip(keep=0.25, window=0.25)"  # where the text itself goes on
READ_ONCE = "keydiff(keep=0.25, heads='profile')"  # where the prompt cannot be read a second time
READ_ONCE_WITHOUT_PROFILE = "keydiff(keep=0.25)"  # and nobody has measured a profile of the model
