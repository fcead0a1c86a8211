// All kernels as one library: one file to compile.
#include "choice.c"
#include "attention.c"
#include "router.c"
#include "walk.c"
#include "kcenter.c"
#include "draws.c"

void kvs_forked(void) { alone = 1; }

const char *kvs_instructions(void) { return INSTRUCTIONS; }
