// Attention of many queries over weighted entries, or among tokens that each see those up to themselves, as of a prompt.
//
// Some queries of a group go through a lane's entries, 64 at a time. For all of these queries keys are laid side by side
// and values one after another (`panels.h`); a block of `ASKED` queries then makes its logits, their shares, and sums of
// values, and none of it leaves the caches. Where processors multiply whole tiles (`tiles.h`), more queries meet more
// entries. As long as numbers are finite, a query's answer does not depend on the queries beside it; it never depends on
// threads.
#include "tiles.h"  // and `attention.c` before this: sums of a row, how they are scaled, and what is made of them at last

#define ENTRIES 64        // that queries meet at once
#define TALL_ENTRIES 256  // the same in tiles
#define IN_CROWD 512      // rows whose sums stay in the second cache
#define TALL_CROWD 1024   // in tiles: there is more to do with what is laid out
#define LEAST_CROWD 64    // or fewer, so that all threads have something to do until the end, but not fewer than these
#define CROWDS 4          // that a thread should have
#define PAIR_OF_ONES 0x3f803f80  // 1 and 1 in bfloat16

struct prompt {  // as kernels/native/prompt.py writes it; strides count numbers
    int64_t rows, heads, group, queries, count, key_width, value_width, kind;
    int64_t query_row, query_head, query_step, key_row, key_head, key_step, value_row, value_head, value_step;
    int64_t out_row, out_head, out_step, mass_row, mass_head, extra_row, extra_head, valid_row, causal;
    float scale, softcap;
};

struct tensors {  // the last three may be NULL
    const char *queries, *keys, *values;
    const float *log_mass, *log_value;
    const char *valid;
};

struct crowd {  // some queries of all heads of a group
    int64_t row, head, first, own;  // of the batch; KV head; the first query, and how many
    int64_t each, rows, whole;      // rows of a head, of all heads, and of whole blocks; some are padding, see `query_of`
    int64_t steps;                  // numbers, or pairs of them, that a row has; zeros after its end
    int64_t block, entries;         // rows that meet entries together, and how many entries
    struct shape of;
    struct sums sums;
    float *asking;         // the rows
    float *keys, *values;  // of the entries that are met
};

struct met {  // entries
    int64_t first, count;
    int biased, apart;  // whether some are not seen, or have weights; whether values have weights of their own
    float mass[TALL_ENTRIES], value[TALL_ENTRIES];
};

// Values one after another, as wide as whole panels: woven, where they are multiplied in pairs.
INLINE void lay_kind_behind(const int kind, const int in_pairs, const char *entries, int64_t step, int64_t count,
                            int64_t whole, int64_t width, int64_t wide, const char *there, float *to) {
    int64_t bytes = step * bytes_of(kind), each = in_pairs ? 2 : 1;
    for (int64_t j = 0; j < (whole + each - 1) / each; j++, to += wide)
        for (int64_t c = 0; c < wide; c += in_pairs ? IN_PANEL : W) {
            vf x[2];
            for (int n = 0; n < each; n++) {
                int64_t own = each * j + n;
                int is = own < count && (!there || there[own]);
                x[n] = is ? steps_at(entries + own * bytes, kind, c / each, width, in_pairs) : SPLAT(0.0f);
            }
#if PAIRED
            if (in_pairs) {
                store_f32(to + c, (vf)_mm512_unpacklo_epi16((__m512i)x[0], (__m512i)x[1]));
                store_f32(to + c + W, (vf)_mm512_unpackhi_epi16((__m512i)x[0], (__m512i)x[1]));
                continue;
            }
#endif
            store_f32(to + c, x[0]);
        }
}

// As many as there are, and zeros up to `whole` of them.
static void lay_behind(const char *entries, int kind, int64_t step, int64_t count, int64_t whole, int64_t width,
                       int64_t wide, const char *there, int in_pairs, float *to) {
    FOR_EACH_KIND(lay_kind_behind, kind, in_pairs, entries, step, count, whole, width, wide, there, to)
}

// Lay out the entries from `first` on, and what is to be added to their logits. Entries without weight are not read.
static void lay_out_entries(const struct prompt *in, const struct tensors *at, const struct crowd *crowd, int64_t first,
                            int64_t end, struct met *met) {
    int64_t bytes = bytes_of((int)in->kind), count = end - first < crowd->entries ? end - first : crowd->entries;
    const char *keys = at->keys + (crowd->row * in->key_row + crowd->head * in->key_head + first * in->key_step) * bytes;
    const char *values =
        at->values + (crowd->row * in->value_row + crowd->head * in->value_head + first * in->value_step) * bytes;
    const float *mass = at->log_mass ? at->log_mass + crowd->row * in->mass_row + crowd->head * in->mass_head + first : NULL;
    const float *extra =
        at->log_value ? at->log_value + crowd->row * in->extra_row + crowd->head * in->extra_head + first : NULL;
    const char *valid = at->valid ? at->valid + crowd->row * in->valid_row + first : NULL;
    char there[TALL_ENTRIES];
    met->first = first, met->count = count, met->apart = extra != NULL;
    met->biased = mass || extra || valid || (!in->causal && count < crowd->entries);  // causal rows end before the entries do
    for (int64_t j = 0; met->biased && j < padded(count, IN_PANEL); j++) {
        met->mass[j] = j >= count || (valid && !valid[j]) ? -INFINITY : mass ? mass[j] : 0.0f;
        met->value[j] = j >= count ? -INFINITY : extra ? extra[j] : 0.0f;
        there[j] = met->mass[j] != -INFINITY || (extra && met->value[j] != -INFINITY);
    }
    const char *those = mass || extra ? there : NULL;
    for (int64_t j = 0; j < count; j += IN_PANEL)
        lay_abreast(keys + j * in->key_step * bytes, (int)in->kind, in->key_step, count - j, in->key_width,
                    those ? those + j : NULL, IN_PAIRS_OF(in->kind), crowd->keys + j * crowd->steps);
    lay_behind(values, (int)in->kind, in->value_step, count, crowd->block == TALL ? padded(count, IN_PANEL) : count,
               in->value_width, crowd->of.value_width, those, IN_PAIRS_OF(in->kind), crowd->values);
}

// softcap · tanh(x / softcap), near 0 by a polynomial (that of Cephes), where a difference of exponentials loses its
// digits.
INLINE vf bent(vf x, float softcap) {
    vf u = x / SPLAT(softcap), square = u * u, twice = SPLAT(2.0f) * u;
    twice = choose(twice > SPLAT(40.0f), SPLAT(40.0f), twice);
    vf far = SPLAT(1.0f) - SPLAT(2.0f) / (SPLAT(1.0f) + exp_of(twice));
    vf near = SPLAT(-5.70498872745e-3f);
    near = near * square + SPLAT(2.06390887954e-2f);
    near = near * square + SPLAT(-5.37397155531e-2f);
    near = near * square + SPLAT(1.33314422036e-1f);
    near = near * square + SPLAT(-3.33332819422e-1f);
    near = near * square * u + u;
    return SPLAT(softcap) * choose(square < SPLAT(0.390625f), near, far);
}

// Whether logits are more than products times a scale, so that they must be worked out to know the largest one.
INLINE int is_weighted(const struct prompt *in, const struct tensors *at) {
    return at->log_mass || at->log_value || in->softcap > 0 || !(in->scale > 0);
}

// Logits of one row, in whole vectors, and beside them those of values. Entries that are not seen get -∞. Returns the largest
// of all. `own`: the place among these entries of the last one that the row sees. If not `weighted`, the logits left in place
// and what is returned are still to be scaled.
INLINE vf logits_of_row(const struct prompt *in, const struct met *met, float *logits, float *of_values, int64_t all,
                        int64_t own, vf top, const int weighted) {
    const int cut = own < all - 1;
    int64_t c = 0, plain = weighted || met->biased || own < 0 ? 0 : cut ? (own + 1) / W * W : all;
    for (; c < plain; c += W) top = larger(load_f32(logits + c), top);
    vi place;
    for (int i = 0; i < W; i++) place[i] = (int32_t)plain + i;
    for (; c < all; c += W, place += W) {
        vf x = weighted ? load_f32(logits + c) * SPLAT(in->scale) : load_f32(logits + c);
        if (weighted && in->softcap > 0) x = bent(x, in->softcap);
        if (weighted && met->apart) {  // then all queries see all entries
            vf of_value = x + load_f32(met->value + c);
            store_f32(of_values + c, of_value);
            top = larger(of_value, top);
        }
        vi self = place == (int32_t)own + (vi){0}, seen = place <= (int32_t)own + (vi){0};
        if (met->biased) {
            vf less = x + load_f32(met->mass + c);
            x = in->causal ? choose(self, x, less) : less;  // a token sees itself, even if it is padding
        }
        if (cut) x = choose(seen, x, SPLAT(-INFINITY));
        store_f32(logits + c, x);
        top = larger(x, top);
    }
    return top;
}

// Shares of values from a row's logits times `scale`, in place of these; pairs of shares as bfloat16 where pairs are
// multiplied.
INLINE void shares_of_row(const struct met *met, float *logits, const float *of_values, int64_t all, float scale,
                          float most, float *mass, const int in_pairs, const int weighted) {
    const int apart = weighted && met->apart;
    vf sum = load_f32(mass), meant = load_f32(mass + W), rounded = load_f32(mass + 2 * W);
    for (int64_t c = 0; c < all; c += IN_PANEL) {
        vf share[ABREAST];
        UNROLL for (int v = 0; v < ABREAST; v++) {
            vf x = load_f32(logits + c + v * W), one = exp_of((weighted ? x : x * SPLAT(scale)) - SPLAT(most));
            sum += one;
            share[v] = apart ? exp_of(load_f32(of_values + c + v * W) - SPLAT(most)) : one;
            if (in_pairs && apart) meant += share[v];
            if (!in_pairs) store_f32(logits + c + v * W, share[v]);
        }
#if PAIRED
        if (in_pairs) {
            vf pairs = (vf)_mm512_cvtne2ps_pbh((__m512)share[1], (__m512)share[0]);
            rounded = ADD_PAIR(rounded, pairs, (vf)_mm512_set1_epi32(PAIR_OF_ONES));
            store_f32(logits + c / 2, pairs);
        }
#endif
    }
    store_f32(mass, sum), store_f32(mass + W, apart ? meant : sum), store_f32(mass + 2 * W, rounded);
}

// Sums of products of ASKED rows with a panel's columns, added to what is there or not.
INLINE void times_block(const char *const *rows, const float *panel, int64_t apart, int64_t steps, float *to,
                        int64_t apart_to, const int add, const int in_pairs) {
    vf sums[ASKED][ABREAST];
    UNROLL for (int x = 0; x < ASKED; x++)
        UNROLL for (int v = 0; v < ABREAST; v++) sums[x][v] = add ? load_f32(to + x * apart_to + v * W) : SPLAT(0.0f);
    multiply(rows, panel, apart, steps, sums, in_pairs);
    UNROLL for (int x = 0; x < ASKED; x++)
        UNROLL for (int v = 0; v < ABREAST; v++) store_f32(to + x * apart_to + v * W, sums[x][v]);
}

// Which one of a head's queries its i-th row is: row r is the r % each-th one of head r / each. Padding rows are the last
// query again.
INLINE int64_t query_of(const struct crowd *crowd, int64_t i) { return i < crowd->own ? i : crowd->own - 1; }

// A row's logits, largest one and shares.
INLINE void share_out(const struct prompt *in, const struct crowd *crowd, const struct met *met, int64_t r, float *logits,
                      int64_t all, int64_t own, const int in_pairs, const int weighted) {
    float of_values[TALL_ENTRIES] __attribute__((aligned(64)));
    float *most = crowd->sums.most + r, *mass = crowd->sums.mass + r * MASSES;
    vf top = logits_of_row(in, met, logits, of_values, all, own, SPLAT(weighted ? *most : -INFINITY), weighted);
    if (!weighted) top *= SPLAT(in->scale);
    if (!met->first) *most = largest_above(top, NOWHERE);  // nothing was summed up so far
    else if (any_above(top, *most)) reach(top, &crowd->of, most, mass, crowd->sums.out + r * crowd->of.value_width);
    shares_of_row(met, logits, of_values, all, in->scale, *most, mass, in_pairs, weighted);
}

// A block of rows from r on meets some entries.
INLINE void meet(const struct prompt *in, const struct crowd *crowd, const struct met *met, int64_t r, int weighted,
                 const enum form form) {
    const int tiled = form == IN_TILES, in_pairs = form != ONE_BY_ONE, block = tiled ? TALL : ASKED;
    const int64_t apart = tiled ? TALL_ENTRIES : ENTRIES;
    float logits[TALL * TALL_ENTRIES] __attribute__((aligned(64)));
    const char *asking[ASKED], *shares[ASKED];
    int64_t own[TALL], upto = met->count, wide = crowd->of.value_width;
    if (in->causal) {  // rows follow one another, and are of one head
        int64_t first = r % crowd->each;
        for (int x = 0; x < block; x++) own[x] = crowd->first + query_of(crowd, first + x) - met->first;
        upto = own[block - 1] + 1 < upto ? own[block - 1] + 1 : upto;
    } else
        for (int x = 0; x < block; x++) own[x] = crowd->entries;
    if (upto <= 0) return;
    for (int x = 0; !tiled && x < ASKED; x++) {
        asking[x] = (const char *)(crowd->asking + (r + x) * crowd->steps);
        shares[x] = (const char *)(logits + x * apart);
    }
    int64_t all = padded(upto, IN_PANEL), entries = tiled ? all : upto;
    for (int64_t c = 0; c < all; c += IN_PANEL) {
        const float *panel = crowd->keys + c * crowd->steps, *rows = crowd->asking + r * crowd->steps;
        if (tiled) times_panel(rows, crowd->steps, panel, IN_PANEL, crowd->steps, logits + c, apart, 0);
        else times_block(asking, panel, IN_PANEL, crowd->steps, logits + c, apart, 0, in_pairs);
    }
    for (int x = 0; x < block; x++) {
        if (weighted) share_out(in, crowd, met, r + x, logits + x * apart, all, own[x], in_pairs, 1);
        else share_out(in, crowd, met, r + x, logits + x * apart, all, own[x], in_pairs, 0);
    }
    for (int64_t c = 0; c < wide; c += IN_PANEL) {
        const float *panel = crowd->values + c;
        float *out = crowd->sums.out + r * wide + c;
        const int add = met->first > 0;
        if (tiled) times_panel(logits, apart, panel, wide, steps_of(entries, 1), out, wide, add);
        else times_block(shares, panel, wide, steps_of(entries, in_pairs), out, wide, add, in_pairs);
    }
}

// A row's sums become its answer, and the log of its denominator.
static void end_row(const struct prompt *in, const struct crowd *crowd, int64_t r, char *out, float *lse) {
    const float *mass = crowd->sums.mass + r * MASSES;
    float *row = crowd->sums.out + r * crowd->of.value_width, all = sum_of(load_f32(mass)), most = crowd->sums.most[r];
    int64_t head = crowd->head * in->group + r / crowd->each, query = crowd->first + r % crowd->each;
    if (IN_PAIRS_OF(in->kind)) settle(row, crowd->of.value_width, mass, 1);
    float share = 1 / under(all);
    for (int64_t i = 0; i < crowd->of.value_width; i += W) store_f32(row + i, load_f32(row + i) * SPLAT(share));
    int64_t at = crowd->row * in->out_row + head * in->out_head + query * in->out_step;
    write_row(out + at * bytes_of((int)in->kind), (int)in->kind, in->value_width, row);
    lse[(crowd->row * in->heads * in->group + head) * in->queries + query] = log_of_all(all, most);
}

static void take_queries(const struct prompt *in, const struct tensors *at, struct crowd *crowd) {
    int64_t bytes = bytes_of((int)in->kind);
    const int in_pairs = IN_PAIRS_OF(in->kind);
    for (int64_t r = 0; r < crowd->whole; r++) {
        int64_t row = r < crowd->rows ? r : crowd->rows - 1, head = crowd->head * in->group + row / crowd->each;
        int64_t query = crowd->first + query_of(crowd, row % crowd->each);
        const char *from =
            at->queries + (crowd->row * in->query_row + head * in->query_head + query * in->query_step) * bytes;
        float *to = crowd->asking + r * crowd->steps;
        if (in_pairs) take_pairs(from, in->key_width, crowd->steps, to);
        else read_row(from, (int)in->kind, 0, in->key_width, to);
        crowd->sums.most[r] = NOWHERE;
    }
    memset(crowd->sums.mass, 0, sizeof(float) * crowd->whole * MASSES);
}

// Whether numbers of a kind are answered faster here than by torch: not where torch multiplies whole tiles of them and we
// do not.
int64_t kvs_prompt_pays(int64_t kind) {
    return W > 4 && (kind != BF16 || !processor_is(AMX_BF16) || form_of(BF16) == IN_TILES);
}

// Whether numbers of a kind are multiplied in whole tiles.
int64_t kvs_in_tiles(int64_t kind) { return form_of((int)kind) == IN_TILES; }

// Rows of a head. Where queries see different entries, the rows of a block are of one head, so that none meets entries that
// come long after it.
INLINE int64_t each_of(const struct prompt *in, int64_t own, int64_t block) {
    return in->causal ? padded(own, block) : own;
}

// 0, or 1 where there is no memory left.
int kvs_prompt(const struct prompt *in, const char *queries, const char *keys, const char *values, const float *log_mass,
               const float *log_value, const char *valid, char *out, float *lse, int64_t threads) {
    const struct tensors at = {queries, keys, values, log_mass, log_value, valid};
    const enum form form = form_of((int)in->kind);
    const int in_pairs = form != ONE_BY_ONE, tiled = form == IN_TILES;
    int64_t lanes = in->rows * in->heads, wide = padded(in->value_width, IN_PANEL), block = tiled ? TALL : ASKED;
    int64_t own = (tiled ? TALL_CROWD : IN_CROWD) / in->group / block * block, failed = 0;
    int64_t entries = tiled ? TALL_ENTRIES : ENTRIES;
    own = own < block ? block : own;
    while (own > block && own * in->group > LEAST_CROWD && lanes * ((in->queries + own - 1) / own) < CROWDS * threads)
        own = padded(own / 2, block);
    own = own < in->queries ? own : in->queries;
    int64_t steps = steps_of(in->key_width, in_pairs), blocks = (in->queries + own - 1) / own;
    steps = tiled ? padded(steps, IN_TILE) : steps;
    int64_t most = padded(each_of(in, own, block) * in->group, block), items = lanes * blocks;
    size_t numbers = (size_t)(most * (steps + wide + MASSES + 1) + entries * (steps + wide));
    const int weighted = is_weighted(in, &at);
    int small = lanes * in->group * in->queries * in->count * in->key_width < SMALL;
    int team = use_threads(threads, small ? 1 : items);
    PRAGMA(omp parallel for num_threads(team) schedule(dynamic) reduction(|:failed) if (team > 1))
    for (int64_t n = 0; n < items; n++) {
        struct crowd crowd = {0};
        float *room = kept_memory(2, sizeof(float) * numbers);
        if (!room) {
            failed = 1;
            continue;
        }
        int64_t lane = n % lanes;  // the last queries, which see most, come first
        crowd.row = lane / in->heads, crowd.head = lane % in->heads, crowd.first = (blocks - 1 - n / lanes) * own;
        crowd.own = crowd.first + own < in->queries ? own : in->queries - crowd.first;
        crowd.each = each_of(in, crowd.own, block), crowd.rows = crowd.each * in->group;
        crowd.whole = padded(crowd.rows, block), crowd.steps = steps;
        crowd.block = block, crowd.entries = entries;
        crowd.of.value_width = wide;
        crowd.keys = room, crowd.values = crowd.keys + entries * steps;
        crowd.sums.out = crowd.values + entries * wide, crowd.sums.mass = crowd.sums.out + crowd.whole * wide;
        crowd.asking = crowd.sums.mass + crowd.whole * MASSES, crowd.sums.most = crowd.asking + crowd.whole * steps;
        take_queries(in, &at, &crowd);
        struct tile_state before;
        if (tiled) begin_tiles(&before);
        if (tiled) memset(crowd.keys, 0, sizeof(float) * (size_t)(entries * steps));  // pairs after the end of keys
        int64_t end = in->causal ? crowd.first + crowd.own : in->count;
        for (int64_t first = 0; first < end; first += entries) {
            struct met met;
            lay_out_entries(in, &at, &crowd, first, end, &met);
            for (int64_t r = 0; r < crowd.rows; r += block) {
                if (form == ONE_BY_ONE) meet(in, &crowd, &met, r, weighted, ONE_BY_ONE);
                else if (form == PAIR_BY_PAIR) meet(in, &crowd, &met, r, weighted, PAIR_BY_PAIR);
                else meet(in, &crowd, &met, r, weighted, IN_TILES);
            }
        }
        if (tiled) end_tiles(&before);
        for (int64_t r = 0; r < crowd.rows; r++)
            if (r % crowd.each < crowd.own) end_row(in, &crowd, r, out, lse);
    }
    return (int)failed;
}
