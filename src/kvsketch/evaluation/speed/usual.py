"""The defaults of `kvsketch bench speed`, in a module that is quick to import."""

LENGTHS = (4096, 32768, 131072, 171000, 500000)
END_TO_END = (32768, 131072)
PROMPTS = 32768  # longer prompts are not read: caches are filled, and a piece is read after them
METHODS = (
    "uniform(keep=0.25)",
    "balancekv(keep=0.25)",
    "keydiff(keep=0.25)",
    "keydiff(keep=0.25, heads='profile')",
    "h2o(keep=0.25)",
    "saap",
)
EVERY = "all"  # names all methods
