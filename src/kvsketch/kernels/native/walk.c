// BalanceKV's walks, a block of tokens at a time: products of keys and of values, exp, and signs, while they are in cache.
// What is computed is said in kernels/balanced_walk: reference.py, and strips.py for the order.
#include "common.h"

#define PANEL 64  // tokens that lie side by side, coordinate by coordinate
#define LANES (PANEL / W)
#define ROWS 4  // of a product that is made in registers, and vectors beside one another
#if defined(__AVX512F__) || defined(__aarch64__)
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define ONES 0.025f  // weight of the denominator beside the numerator
#define NOTHING -60.0f  // a logit whose exponential is nothing beside 1, but no denormal number: those are slow

typedef struct {
    int64_t blocks, n, d, e;
    int kind, threads;
    const void *keys, *values;
    int64_t key_block, key_row, value_block, value_row;
    const double *uniforms;
} walks;

typedef struct {  // one block: keys and values in panels, and the signs so far
    int64_t count, d, e;
    float *keys, *values, *lengths, *value_lengths, *signs, *tile, *rows, *mean;
} block;

static int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static int make_room(block *b, const walks *all) {
    int64_t n = padded(all->n, PANEL), wide = padded(all->d > all->e ? all->d : all->e, W);
    float *at = kept_memory(0, sizeof(float) * (size_t)(n * (all->d + all->e + 3) + PANEL * PANEL + (W + 1) * wide));
    if (!at) return 0;
    b->d = all->d, b->e = all->e;
    b->tile = at, at += PANEL * PANEL;
    b->lengths = at, at += n;
    b->value_lengths = at, at += n;
    b->signs = at, at += n;
    b->rows = at, at += W * wide;
    b->mean = at, at += wide;
    b->keys = at, at += n * all->d;
    b->values = at;
    return 1;
}

// A row of numbers of any kind as float32; nothing is read beyond its end.
static void read_row(const void *from, int kind, int64_t at, int64_t width, float *to) {
    int64_t k = 0;
    if (kind == F32) memcpy(to, (const float *)from + at, sizeof(float) * (size_t)width);
    else if (kind == BF16)
        for (; k + W <= width; k += W) store_f32(to + k, load_bf16((const uint16_t *)from + at + k));
    else
        for (; k + W <= width; k += W) store_f32(to + k, load_f16((const uint16_t *)from + at + k));
    if (kind != F32)
        for (; k < width; k++) to[k] = read_one(from, kind, at + k);
}

// The tokens' vectors less their mean (NULL: as they are), times a factor, in panels that are filled up with zeros.
static void to_panels(const void *from, int kind, int64_t at, int64_t row, int64_t width, const block *b,
                      const float *mean, float factor, float *panels) {
    int64_t wide = padded(width, W);
    for (int64_t first = 0; first < padded(b->count, PANEL); first += W) {
        float *to = panels + first / PANEL * PANEL * width + first % PANEL;
        for (int i = 0; i < W; i++) {
            float *x = b->rows + i * wide;
            if (first + i >= b->count) {
                memset(x, 0, sizeof(float) * (size_t)width);
                continue;
            }
            read_row(from, kind, at + (first + i) * row, width, x);
            for (int64_t k = 0; k < width; k++) x[k] = (mean ? x[k] - mean[k] : x[k]) * factor;
        }
        for (int64_t k = 0; k < width; k++)
            for (int i = 0; i < W; i++) to[k * PANEL + i] = b->rows[i * wide + k];
    }
}

static void mean_of(const walks *all, int64_t at, const block *b) {
    for (int64_t k = 0; k < b->d; k++) b->mean[k] = 0;
    for (int64_t i = 0; i < b->count; i++) {
        read_row(all->keys, all->kind, at + i * all->key_row, b->d, b->rows);
        for (int64_t k = 0; k < b->d; k++) b->mean[k] += b->rows[k];
    }
    for (int64_t k = 0; k < b->d; k++) b->mean[k] /= (float)b->count;
}

static void squared_lengths(const float *panels, int64_t width, int64_t count, float *lengths) {
    for (int64_t first = 0; first < count; first += W) {
        const float *x = panels + first / PANEL * PANEL * width + first % PANEL;
        vf sum = SPLAT(0.0f);
        for (int64_t k = 0; k < width; k++) sum += load_f32(x + k * PANEL) * load_f32(x + k * PANEL);
        store_f32(lengths + first, sum);
    }
}

// Some rows of a tile: exponentials of the products of keys, less the largest, or those times the products of values.
INLINE void products(const float *rows, const float *columns, int64_t width, float start, int vectors, int of_values, float *tile) {
    vf sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = SPLAT(start);
    for (int64_t k = 0; k < width; k++) {
        vf column[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) column[v] = load_f32(columns + k * PANEL + v * W);
        UNROLL for (int r = 0; r < ROWS; r++) {
            vf x = SPLAT(rows[k * PANEL + r]);
            UNROLL for (int v = 0; v < vectors; v++) sums[r][v] += x * column[v];
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < vectors; v++) {
        float *at = tile + r * PANEL + v * W;
        if (of_values) store_f32(at, load_f32(at) * sums[r][v]);
        else store_f32(at, exp_of(larger(sums[r][v], SPLAT(NOTHING))));
    }
}

// Those of all tokens of one panel with those of another, as far as there are any; of one with itself the later ones.
static void fill_tile(const float *rows, const float *columns, int64_t width, float start, int of_values, int row_count,
                      int column_count, float *tile) {
    int diagonal = rows == columns, end = (column_count + W - 1) / W;
    for (int group = 0; group < end; group += VECTORS)
        for (int r = 0; r < row_count; r += ROWS) {
            int first = diagonal && r / W > group ? r / W : group;
            int last = end < group + VECTORS ? end : group + VECTORS;
            const float *x = rows + r, *y = columns + first * W;
            float *to = tile + r * PANEL + first * W;
            switch (last - first) {
            case 1: products(x, y, width, start, 1, of_values, to); break;
            case 2: products(x, y, width, start, 2, of_values, to); break;
#if VECTORS == 4
            case 3: products(x, y, width, start, 3, of_values, to); break;
            case 4: products(x, y, width, start, 4, of_values, to); break;
#endif
            default: break;
            }
        }
}

static void tile_of(const block *b, int64_t from, int64_t to, float largest, float ones) {
    int64_t left = b->count - from * PANEL, right = b->count - to * PANEL;
    int rows = (int)(left < PANEL ? left : PANEL), columns = (int)(right < PANEL ? right : PANEL);
    int64_t keys = PANEL * b->d, values = PANEL * b->e;
    fill_tile(b->keys + from * keys, b->keys + to * keys, b->d, -largest, 0, rows, columns, b->tile);
    fill_tile(b->values + from * values, b->values + to * values, b->e, ones, 1, rows, columns, b->tile);
}

INLINE void add_row(float *y, const block *b, int row, float sign, int first, int last) {
    for (int v = first; v < last; v++)
        store_f32(y + v * W, load_f32(y + v * W) + SPLAT(sign) * load_f32(b->tile + row * PANEL + v * W));
}

// What the tokens of all panels before this one, whose signs are known, sum up to for its own tokens.
static void sums_before(const block *b, int64_t panel, float largest, float ones, float *y) {
    int64_t left = b->count - panel * PANEL;
    int last = (int)((left < PANEL ? left : PANEL) + W - 1) / W;
    memset(y, 0, sizeof(float) * PANEL);
    for (int64_t before = 0; before < panel; before++) {
        tile_of(b, before, panel, largest, ones);
        for (int r = 0; r < PANEL; r++) add_row(y, b, r, b->signs[before * PANEL + r], 0, last);
    }
    tile_of(b, panel, panel, largest, ones);
}

static void halve_block(const walks *all, block *b, int64_t number, float scale, float gain, uint8_t *kept) {
    int64_t key_at = number * all->key_block, half = b->count / 2, positive = 0;
    const double *uniforms = all->uniforms + number * all->n;
    mean_of(all, key_at, b);
    to_panels(all->keys, all->kind, key_at, all->key_row, b->d, b, b->mean, sqrtf(scale), b->keys);
    to_panels(all->values, all->kind, number * all->value_block, all->value_row, b->e, b, NULL, 1, b->values);
    squared_lengths(b->keys, b->d, b->count, b->lengths);
    squared_lengths(b->values, b->e, b->count, b->value_lengths);
    float largest = 0, diagonal = 0, y[PANEL];
    for (int64_t i = 0; i < b->count; i++) largest = b->lengths[i] > largest ? b->lengths[i] : largest;
    for (int64_t i = 0; i < b->count; i++) diagonal += expf(b->lengths[i] - largest) * (b->value_lengths[i] + ONES);
    diagonal /= (float)b->count;
    gain /= diagonal < 1e-30f ? 1e-30f : diagonal;
    for (int64_t panel = 0; panel * PANEL < b->count; panel++) {
        sums_before(b, panel, largest, ONES, y);
        int64_t left = b->count - panel * PANEL;
        int here = (int)(left < PANEL ? left : PANEL);
        for (int i = 0; i < here; i++) {
            int64_t j = panel * PANEL + i;
            float sign = y[i] * gain < (float)(0.5 - uniforms[j]) ? 1.0f : -1.0f;
            sign = positive >= half ? -1.0f : sign;
            sign = j - positive >= half ? 1.0f : sign;
            positive += sign > 0;
            b->signs[j] = sign;
            kept[j] = sign > 0;
            add_row(y, b, i, sign, i / W, (here + W - 1) / W);
        }
    }
}

// kept[blocks, n]: half of the first sizes[i] tokens of block i. Returns 1 if there was no memory.
int kvs_keep_half(const int64_t *about, const void *keys, const void *values, const double *uniforms,
                  const int64_t *sizes, double scale, double gain, uint8_t *kept) {
    walks all = {about[0], about[1], about[2], about[3], (int)about[4], (int)about[5], keys, values,
                 about[6], about[7], about[8], about[9], uniforms};
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(use_threads(all.threads, all.blocks)) reduction(| : failed)
    for (int64_t i = 0; i < all.blocks; i++) {
        block b = {.count = sizes[i]};
        memset(kept + i * all.n, 0, (size_t)all.n);
        if (!make_room(&b, &all)) failed = 1;
        else halve_block(&all, &b, i, (float)scale, (float)gain, kept + i * all.n);
    }
    return failed;
}
