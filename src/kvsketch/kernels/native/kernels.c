// All kernels as one library: one file to compile.
#include "choice.c"
#include "attention.c"
#include "router.c"
#include "weights.c"
#include "step.c"
#include "walk.c"
#include "kcenter.c"
#include "draws.c"
#include "directions.c"
#include "places.c"
#include "looks.c"
#include "prompt.c"
#include "assign.c"
#include "merge.c"
#include "finite.c"

void kvs_forked(void) { alone = 1; }

// Prefetch like a processor that asks far (1) or like one that does not (0); -1: as this one does. For tests and timings of
// both. Returns which it is now.
int64_t kvs_ask_far(int64_t far) {
    __atomic_store_n(&asked_far, (int)far, __ATOMIC_RELAXED);
    return asks_far();
}

// Give out so many pieces of memory, and no more; -1: as many as there are. For tests of calls that get none.
void kvs_limit_memory(int64_t pieces) {
    __atomic_store_n(&pieces_left, pieces < 0 ? INT64_MAX : pieces, __ATOMIC_RELAXED);
}

// Multiply whole tiles by hand (1), or none (0); -1: as this processor does. For tests. Returns whether tiles are multiplied.
int64_t kvs_ask_tiles(int64_t wanted) {
    __atomic_store_n(&tiles_wanted, (int)wanted, __ATOMIC_RELAXED);
    return form_of(BF16) == IN_TILES;
}

// How the calling thread's tiles are set up now; returns 1 if there are none. To test that they are left as they were.
int kvs_tiles(struct tile_state *now) { return state_of_tiles(now); }

// Whether weights in bytes are multiplied faster than others.
int64_t kvs_bytes_pay(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

// Whether many numbers are multiplied at once, as by torch's own products.
int64_t kvs_is_wide(void) { return W > 4; }

// Whether bfloat16 is multiplied in pairs.
int64_t kvs_pairs(void) { return PAIRED; }

const char *kvs_instructions(void) { return INSTRUCTIONS; }
