// Whole tiles of pairs of bfloat16 (AMX of Intel's processors): sixteen rows of sixteen pairs times as many of a panel, as
// `panels.h` lays it, in sixteen clock cycles. By hand it is slow, and there to test on any machine all that uses tiles.
#ifndef KVS_TILES
#define KVS_TILES

#include "panels.h"
#include "processor.h"

#if PAIRED && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define TILES 0
#endif

enum form { ONE_BY_ONE, PAIR_BY_PAIR, IN_TILES };  // how numbers are multiplied

#define IN_TILE 16             // rows, and pairs or sums of a row
#define TALL (2 * IN_TILE)     // rows that meet a panel together
#define TILE_DATA 18           // what a process asks the system for before it may use tiles
#define REQUEST_PERMISSION 0x1023

static int tiles_wanted = -1;  // by `kvs_ask_tiles`: 0: none, 1: by hand

// Whether the processor has tiles, and the system lets us use them.
static int has_tiles(void) {
    static int known;  // 1: no, 2: yes
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
#if TILES
        found = processor_is(AMX_BF16) && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? 2 : 1;
#else
        found = 1;
#endif
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == 2;
}

INLINE int by_hand(void) { return __atomic_load_n(&tiles_wanted, __ATOMIC_RELAXED) > 0; }

// How numbers of a kind are multiplied where many rows meet many entries.
INLINE enum form form_of(int kind) {
    if (!IN_PAIRS_OF(kind)) return ONE_BY_ONE;
    return by_hand() || (__atomic_load_n(&tiles_wanted, __ATOMIC_RELAXED) && has_tiles()) ? IN_TILES : PAIR_BY_PAIR;
}

struct tile_state {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

#if TILES
// GCC's own intrinsics do not say that all of a state is read and written, nor do its loads of tiles say that they read
// memory: the compiler may still delay what was written just before. So `NOW` stands where all of it has to be there.
#define STORE_STATE(to) __asm__ volatile("sttilecfg %0" : "=m"(*(to)))
#define LOAD_STATE(from) __asm__ volatile("ldtilecfg %0" : : "m"(*(from)))
#define NOW __asm__ volatile("" : : : "memory")

// A thread's tiles are ours from here on, and afterwards set up as they were for whoever used them before.
__attribute__((target("amx-tile"))) static void begin_tiles(struct tile_state *before) {
    struct tile_state ours = {.palette = 1};
    for (int i = 0; i < 8; i++) ours.bytes[i] = 4 * IN_TILE, ours.rows[i] = IN_TILE;
    if (by_hand()) return;
    STORE_STATE(before);
    LOAD_STATE(&ours);
}
__attribute__((target("amx-tile"))) static void end_tiles(const struct tile_state *before) {
    if (!by_hand()) LOAD_STATE(before);
}

__attribute__((target("amx-tile,amx-bf16"))) static void times_panel_in_tiles(
    const float *rows, int64_t apart_rows, const float *panel, int64_t apart, int64_t steps, int64_t times, float *sums,
    int64_t apart_sums, int add) {
    float *lower = sums + IN_TILE * apart_sums;
    NOW;
    if (add) {
        _tile_loadd(0, sums, 4 * apart_sums);
        _tile_loadd(1, sums + W, 4 * apart_sums);
        _tile_loadd(2, lower, 4 * apart_sums);
        _tile_loadd(3, lower + W, 4 * apart_sums);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t n = 0; n < times; n++, panel += steps * apart)
        for (int64_t i = 0; i < steps; i += IN_TILE) {
            _tile_loadd(6, panel + i * apart, 4 * apart);
            _tile_loadd(4, rows + i, 4 * apart_rows);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + i * apart + W, 4 * apart);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, rows + IN_TILE * apart_rows + i, 4 * apart_rows);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    _tile_stored(0, sums, 4 * apart_sums);
    _tile_stored(1, sums + W, 4 * apart_sums);
    _tile_stored(2, lower, 4 * apart_sums);
    _tile_stored(3, lower + W, 4 * apart_sums);
    NOW;
}

// How this thread's tiles are set up; 0, or 1 where there are none.
__attribute__((target("amx-tile"))) static int state_of_tiles(struct tile_state *now) {
    if (has_tiles()) STORE_STATE(now);
    return !has_tiles();
}
#else
static int state_of_tiles(struct tile_state *now) { return !now || !has_tiles(); }
static void begin_tiles(struct tile_state *before) { (void)before; }
static void end_tiles(const struct tile_state *before) { (void)before; }
#define times_panel_in_tiles times_panel_by_hand
#endif

static void times_panel_by_hand(const float *rows, int64_t apart_rows, const float *panel, int64_t apart, int64_t steps,
                                int64_t times, float *sums, int64_t apart_sums, int add) {
    for (int r = 0; r < TALL; r++)
        for (int c = 0; c < IN_PANEL; c += W) {
            vf sum = add ? load_f32(sums + r * apart_sums + c) : SPLAT(0.0f);
            for (int64_t i = 0; i < steps * times; i++) {
                const uint16_t *x = (const uint16_t *)(rows + r * apart_rows + i % steps);
                vf of[2];
                load_bf16_by_turns((const uint16_t *)(panel + i * apart + c), of);
                sum += SPLAT(one_bf16(x[0])) * of[0] + SPLAT(one_bf16(x[1])) * of[1];
            }
            store_f32(sums + r * apart_sums + c, sum);
        }
}

// Sums of products of TALL rows with the columns of so many panels, which follow one another: the rows' pairs times those
// of each panel, added up over panels.
INLINE void times_panels(const float *rows, int64_t apart_rows, const float *panels, int64_t apart, int64_t steps,
                         int64_t times, float *sums, int64_t apart_sums, int add) {
    if (by_hand()) times_panel_by_hand(rows, apart_rows, panels, apart, steps, times, sums, apart_sums, add);
    else times_panel_in_tiles(rows, apart_rows, panels, apart, steps, times, sums, apart_sums, add);
}

// Sums of products of TALL rows with a panel's columns, pair by pair, added to what is there or not. `steps` is a multiple
// of IN_TILE; what lies after the end of rows and panel is finite in both, and 0 in one.
INLINE void times_panel(const float *rows, int64_t apart_rows, const float *panel, int64_t apart, int64_t steps,
                        float *sums, int64_t apart_sums, int add) {
    times_panels(rows, apart_rows, panel, apart, steps, 1, sums, apart_sums, add);
}

#endif
