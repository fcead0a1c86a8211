// How much attention entries got from many queries whose denominators are known: products of a block of queries with a
// panel of entries, of which only sums, or the largest, are kept. `weights.c` does it for few queries.
#include "tiles.h"  // and `weights.c` before this, for what becomes of a note

#define PANELS 16     // of a piece, which one thread takes
#define ASKING 256    // queries that stay in the second cache while all panels of a piece meet them
#define HIDDEN INT32_MAX  // the rank of an entry that nobody sees

struct looking {  // as kernels/native/weights.py writes it; strides count numbers
    int64_t lanes, heads, rows, asked, count, width, kind, query_kind, key_lane, key_step, got_lane, got_step, how;
    float scale;
};

struct panel {  // of entries that lie beside each other: number by number, or pair by pair
    float *numbers;
    int32_t rank[IN_PANEL], first;  // the lowest
};

struct found {  // about the entries of a panel, from some queries
    vf of[ABREAST];
};

// Whether queries and entries are multiplied pair by pair.
#define PAIRS_OF(in) (IN_PAIRS_OF((in)->kind) && (in)->query_kind == BF16 && (in)->width % 2 == 0)

// A panel of the entries from `first` on, as many as there are; the places after them get nothing.
static void lay_out(const struct looking *in, const char *keys, const int32_t *ranks, int64_t first, int in_pairs,
                    struct panel *to) {
    int64_t count = in->count - first < IN_PANEL ? in->count - first : IN_PANEL;
    const char *own = keys + first * in->key_step * bytes_of((int)in->kind);
    to->first = HIDDEN;
    for (int64_t j = 0; j < IN_PANEL; j++) {
        to->rank[j] = j >= count ? HIDDEN : ranks ? ranks[first + j] : 0;
        to->first = to->rank[j] < to->first ? to->rank[j] : to->first;
    }
    lay_abreast(own, (int)in->kind, in->key_step, count, in->width, NULL, in_pairs, to->numbers);
}

// A query's products with a panel's entries.
INLINE void see(const struct looking *in, const vf *products, float less, int32_t own, const struct panel *panel,
                struct found *found, const int largest) {
    UNROLL for (int v = 0; v < ABREAST; v++) {
        vi rank, seen;
        memcpy(&rank, panel->rank + v * W, sizeof rank);
        seen = rank <= own + (vi){0};
        vf x = products[v] * SPLAT(in->scale) - SPLAT(less);
        x = choose(seen, x, SPLAT(-INFINITY));
        if (largest) found->of[v] = larger(x, found->of[v]);
        else found->of[v] += weight_of(x);
    }
}

// Some queries look at a panel. Places after the last query repeat it, and add nothing.
INLINE void look(const struct looking *in, const char *queries, const float *less, const int32_t *ranks, int count,
                 const struct panel *panel, struct found *found, const int in_pairs, const int largest) {
    vf sums[ASKED][ABREAST];
    const char *at[ASKED];
    int64_t bytes = bytes_of((int)in->query_kind);
    UNROLL for (int r = 0; r < ASKED; r++) {
        at[r] = queries + (r < count ? r : count - 1) * in->width * bytes;
        UNROLL for (int v = 0; v < ABREAST; v++) sums[r][v] = SPLAT(0.0f);
    }
    multiply(at, panel->numbers, IN_PANEL, steps_of(in->width, in_pairs), sums, in_pairs);
    UNROLL for (int r = 0; r < ASKED; r++)
        if (r < count) see(in, sums[r], less[r], ranks[r], panel, found, largest);
}

// TALL queries do.
INLINE void look_tall(const struct looking *in, const char *queries, const float *less, const int32_t *ranks,
                      const struct panel *panel, struct found *found, const int largest) {
    vf sums[TALL][ABREAST];
    int64_t steps = in->width / 2;
    times_panel((const float *)queries, steps, panel->numbers, IN_PANEL, steps, (float *)sums, IN_PANEL, 0);
    for (int r = 0; r < TALL; r++) see(in, sums[r], less[r], ranks[r], panel, found, largest);
}

INLINE void panels_got(const struct looking *in, const char *queries, const float *less, const int32_t *ranks,
                       struct panel *panels, int64_t count, double *got, const enum form form, const int largest) {
    int64_t bytes = bytes_of((int)in->query_kind), block;
    for (int64_t start = 0; start < in->rows; start += ASKING) {
        int64_t stop = start + ASKING < in->rows ? start + ASKING : in->rows;
        int32_t own[ASKING] = {0};
        for (int64_t r = start; ranks && r < stop; r++) own[r - start] = ranks[r % in->asked];
        for (int64_t p = 0; p < count; p++) {
            struct found found;
            UNROLL for (int v = 0; v < ABREAST; v++) found.of[v] = SPLAT(largest ? -INFINITY : 0.0f);
            for (int64_t r = start; r < stop; r += block) {
                int tall = form == IN_TILES && stop - r >= TALL, any = 0;
                const int32_t *those = own + r - start;
                block = tall ? TALL : stop - r < ASKED ? stop - r : ASKED;
                for (int k = 0; k < block; k++) any |= those[k] >= panels[p].first;
                const char *asking = queries + r * in->width * bytes;
                if (any && tall) look_tall(in, asking, less + r, those, panels + p, &found, largest);
                else if (any) look(in, asking, less + r, those, (int)block, panels + p, &found, form != ONE_BY_ONE, largest);
            }
            for (int v = 0; v < ABREAST; v++)
                for (int i = 0; i < W; i++) {
                    double *to = got + p * IN_PANEL + v * W + i, x = found.of[v][i];
                    if (largest) *to = x > *to ? x : *to;
                    else *to += x;
                }
        }
    }
}

// How a call multiplies: in tiles only where keys are whole tiles wide.
INLINE enum form form_of_looks(const struct looking *in) {
    if (!PAIRS_OF(in)) return ONE_BY_ONE;
    return in->width % (2 * IN_TILE) ? PAIR_BY_PAIR : form_of(BF16);
}

#define PANELS_GOT(largest)                                                                                        \
    {                                                                                                              \
        if (form == ONE_BY_ONE) panels_got(in, asking, less, ranks, panels, count, own, ONE_BY_ONE, largest);      \
        else if (form == PAIR_BY_PAIR) panels_got(in, asking, less, ranks, panels, count, own, PAIR_BY_PAIR, largest);     \
        else panels_got(in, asking, less, ranks, panels, count, own, IN_TILES, largest);                           \
    }

// Note in got [lanes, count] how much attention entries got from queries [lanes, rows, width] with these logs of
// denominators [lanes, rows]: row r of a lane is query r % asked. Queries see entries whose ranks [batch, count] are not
// above their own [batch, asked]; without ranks they see all. 0, or 1 where there is no memory left.
int kvs_look(const struct looking *in, const char *queries, const char *keys, const float *lse,
             const int32_t *key_ranks, const int32_t *query_ranks, double *got, int64_t threads) {
    int64_t pieces = (in->count + PANELS * IN_PANEL - 1) / (PANELS * IN_PANEL), all = in->lanes * pieces;
    const enum form form = form_of_looks(in);
    int64_t bytes = bytes_of((int)in->kind), steps = steps_of(in->width, PAIRS_OF(in));
    int failed = 0, team = use_threads(threads, all);
    PRAGMA(omp parallel for num_threads(team) schedule(dynamic) reduction(|:failed) if (team > 1))
    for (int64_t n = 0; n < all; n++) {
        int64_t lane = n / pieces, first = n % pieces * PANELS * IN_PANEL, row = lane / in->heads;
        int64_t here = in->count - first < PANELS * IN_PANEL ? in->count - first : PANELS * IN_PANEL;
        int64_t count = (here + IN_PANEL - 1) / IN_PANEL;
        float *room = kept_memory(2, sizeof(float) * PANELS * IN_PANEL * steps);
        if (!room) {
            failed = 1;
            continue;
        }
        struct panel panels[PANELS];
        double own[PANELS * IN_PANEL];
        const char *asking = queries + lane * in->rows * in->width * bytes_of((int)in->query_kind);
        const float *less = lse + lane * in->rows;
        const int32_t *ranks = query_ranks ? query_ranks + row * in->asked : NULL;
        for (int64_t p = 0; p < count; p++) {
            panels[p].numbers = room + p * IN_PANEL * steps;
            lay_out(in, keys + lane * in->key_lane * bytes, key_ranks ? key_ranks + row * in->count : NULL,
                    first + p * IN_PANEL, PAIRS_OF(in), panels + p);
        }
        for (int64_t j = 0; j < count * IN_PANEL; j++) own[j] = in->how == ADDED ? 0 : -INFINITY;
        struct tile_state before;
        if (form == IN_TILES) begin_tiles(&before);
        if (in->how == ADDED) PANELS_GOT(0)
        else PANELS_GOT(1)
        if (form == IN_TILES) end_tiles(&before);
        for (int64_t j = 0; j < here; j++) {
            double *to = got + lane * in->got_lane + (first + j) * in->got_step;
            double weight = in->how == ADDED ? own[j] : exp(own[j] > MOST_LOG ? MOST_LOG : own[j]);
            if (in->how == ADDED) *to += weight;
            else if (weight > *to) *to = weight;
        }
    }
    return failed;
}
