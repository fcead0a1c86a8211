// Rows against panels: entries that lie side by side, number by number or pair by pair of bfloat16, so that one number of
// a row is multiplied with those of many entries at once.
#ifndef KVS_PANELS
#define KVS_PANELS

#include "rows.h"

#define ABREAST 2  // vectors of a panel
#define IN_PANEL (ABREAST * W)
#if W == 16
#define ASKED 8  // rows that meet a panel together
#else
#define ASKED 4
#endif

#if PAIRED
#define ADD_PAIR(sum, x, y) (vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(y))
#else
#define ADD_PAIR(sum, x, y) (sum)
#endif

#define IN_PAIRS_OF(kind) (PAIRED && (kind) == BF16)  // whether numbers of a kind are multiplied pair by pair

INLINE int64_t steps_of(int64_t width, int in_pairs) { return in_pairs ? (width + 1) / 2 : width; }

// sums of row r += Σ_i number (or pair) i of the row · those of the panel's step i; steps are `apart` numbers from each
// other.
INLINE void multiply(const char *const *rows, const float *panel, int64_t apart, int64_t steps, vf (*sums)[ABREAST],
                     const int in_pairs) {
    for (int64_t i = 0; i < steps; i++) {
        vf of[ABREAST];
        UNROLL for (int v = 0; v < ABREAST; v++) of[v] = load_f32(panel + i * apart + v * W);
        UNROLL for (int r = 0; r < ASKED; r++) {
            float number;
            memcpy(&number, rows[r] + 4 * i, 4);
            vf asked = SPLAT(number);
            UNROLL for (int v = 0; v < ABREAST; v++)
                sums[r][v] = in_pairs ? ADD_PAIR(sums[r][v], asked, of[v]) : sums[r][v] + asked * of[v];
        }
    }
}

// W numbers of an entry, or pairs of them, from its `at`-th on; zeros after its end.
INLINE vf steps_at(const char *entry, int kind, int64_t at, int64_t width, const int in_pairs) {
    if (in_pairs ? 2 * (at + W) <= width : at + W <= width)
        return in_pairs ? load_f32((const float *)(entry + 4 * at)) : load(entry, kind, at);
    float some[W] = {0};
    if (in_pairs) memcpy(some, entry + 4 * at, (size_t)(2 * width - 4 * at));
    else
        for (int64_t i = at; i < width; i++) some[i - at] = read_one(entry, kind, i);
    return load_f32(some);
}

// A row of bfloat16 as it came, and zeros after its end up to so many pairs.
INLINE void take_pairs(const void *from, int64_t width, int64_t pairs, float *to) {
    memset(to + width / 2, 0, sizeof(float) * (size_t)(pairs - width / 2));
    memcpy(to, from, sizeof(uint16_t) * (size_t)width);
}

// A form for each kind of numbers, and for pairs.
#define FOR_EACH_KIND(form, kind, in_pairs, ...)      \
    if (in_pairs) form(BF16, 1, __VA_ARGS__);         \
    else if ((kind) == F32) form(F32, 0, __VA_ARGS__); \
    else if ((kind) == BF16) form(BF16, 0, __VA_ARGS__); \
    else form(F16, 0, __VA_ARGS__);

INLINE void lay_kind_abreast(const int kind, const int in_pairs, const char *entries, int64_t step, int64_t count,
                             int64_t width, const char *there, float *to) {
    int64_t steps = steps_of(width, in_pairs), bytes = step * bytes_of(kind);
    for (int64_t j = 0; j < IN_PANEL; j += W)
        for (int64_t i = 0; i < steps; i += W) {
            vf x[W];
            UNROLL for (int n = 0; n < W; n++)
                x[n] = j + n < count && (!there || there[j + n]) ? steps_at(entries + (j + n) * bytes, kind, i, width, in_pairs)
                                                                 : SPLAT(0.0f);
            transpose(x);
            UNROLL for (int n = 0; n < W; n++)
                if (i + n < steps) store_f32(to + (i + n) * IN_PANEL + j, x[n]);
        }
}

// A panel of so many entries, filled up with zeros; `there`: which of them are laid out, or NULL for all.
static void lay_abreast(const char *entries, int kind, int64_t step, int64_t count, int64_t width, const char *there,
                        int in_pairs, float *to) {
    FOR_EACH_KIND(lay_kind_abreast, kind, in_pairs, entries, step, count, width, there, to)
}

#endif
