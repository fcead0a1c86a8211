"""The methods that are recommended, see docs/methods.md."""

RECOMMENDED = "kvzip(keep=0.25)"  # where questions come later
READ_ONCE = "keydiff(keep=0.25)"  # and the prompt cannot be read a second time
