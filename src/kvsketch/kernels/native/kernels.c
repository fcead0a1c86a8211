// All kernels as one library: one file to compile.
#include "attention.c"
#include "router.c"

void kvs_forked(void) { alone = 1; }

const char *kvs_instructions(void) { return INSTRUCTIONS; }
