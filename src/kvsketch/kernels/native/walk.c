// BalanceKV's walks, a block of tokens at a time: products of keys and values, exp, and signs, while all is in cache.
// kernels/balanced_walk/reference.py says what is computed, strips.py in which order.
#include "tiles.h"

#define PANEL 64  // tokens that lie side by side, coordinate by coordinate
#define ROWS 4  // of a product that is made in registers, and vectors beside one another
#if defined(__AVX512F__) || defined(__aarch64__)
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define ONES 0.025f  // weight of the denominator beside the numerator
#define TINY 1e-15f  // length of values: tiny beside those of models
#define NOTHING -60.0f  // a logit whose exponential is nothing beside 1, but not denormal: denormal numbers are slow

typedef struct {
    int64_t blocks, n, d, e;
    int kind, threads;
    int64_t key_block, key_row, value_block, value_row;
    const void *keys, *values;
    const double *uniforms;
    float scale;
    const int64_t *index;  // NULL, or numbers of tokens [lanes, numbered], one block of a lane after another
    int64_t of_lane, numbered;
} walks;

// One block: its tokens' places, keys and values in panels, and the signs so far. Where whole tiles are multiplied, keys and
// values are rows of pairs as they came, followed by panels of them; products of keys must then still be scaled, and each
// key's product with the mean subtracted.
typedef struct {
    int64_t count, d, e, *places, key_steps, value_steps;
    float *keys, *values, *lengths, *value_lengths, *towards, *signs, *tile, *other, *rows, *mean;
    float scale, largest, ones, factor, own, y[PANEL];
    int tiled;
} block;

static int make_room(block *b, const walks *all) {
    int64_t n = padded(all->n, PANEL), wide = padded(all->d > all->e ? all->d : all->e, W);
    b->tiled = form_of(all->kind) == IN_TILES, b->d = all->d, b->e = all->e, b->scale = all->scale;
    b->key_steps = padded(steps_of(b->d, 1), IN_TILE), b->value_steps = padded(steps_of(b->e, 1), IN_TILE);
    int64_t of_keys = n * (b->tiled ? 2 * b->key_steps : b->d), of_values = n * (b->tiled ? 2 * b->value_steps : b->e);
    float *at = kept_memory(0, sizeof(float) * (size_t)(of_keys + of_values + 6 * n + 2 * PANEL * PANEL + (W + 1) * wide));
    if (!at) return 0;
    b->places = (int64_t *)at, at += 2 * n;
    b->tile = at, at += PANEL * PANEL;
    b->other = at, at += PANEL * PANEL;
    b->towards = at, at += n;
    b->lengths = at, at += n;
    b->value_lengths = at, at += n;
    b->signs = at, at += n;
    b->rows = at, at += W * wide;
    b->mean = at, at += wide;
    b->keys = at, at += of_keys;
    b->values = at;
    return 1;
}

// The tokens' vectors less their mean (NULL: as they are), times a factor, in panels that are filled up with zeros.
static void to_panels(const void *from, int kind, int64_t at, int64_t row, int64_t width, const block *b,
                      const float *mean, float factor, float *panels) {
    int64_t wide = padded(width, W);
    for (int64_t first = 0; first < padded(b->count, PANEL); first += W) {
        float *to = panels + first / PANEL * PANEL * width + first % PANEL;
        memset(b->rows, 0, sizeof(float) * (size_t)(W * wide));
        for (int i = 0; i < W && first + i < b->count; i++) {
            float *x = b->rows + i * wide;
            read_row(from, kind, at + b->places[first + i] * row, width, x);
            for (int64_t k = 0; k < width; k++) x[k] = (mean ? x[k] - mean[k] : x[k]) * factor;
        }
        for (int64_t k = 0; k < width; k += W) {
            vf x[W];
            UNROLL for (int i = 0; i < W; i++) x[i] = load_f32(b->rows + i * wide + k);
            transpose(x);
            for (int i = 0; i < W && k + i < width; i++) store_f32(to + (k + i) * PANEL, x[i]);
        }
    }
}

static void mean_of_keys(const walks *all, int64_t at, const block *b) {
    for (int64_t k = 0; k < padded(b->d, W); k++) b->mean[k] = 0;
    for (int64_t i = 0; i < b->count; i++) {
        read_row(all->keys, all->kind, at + b->places[i] * all->key_row, b->d, b->rows);
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

static float largest_of(const float *x, int64_t count) {  // NaN if there is one
    float largest = 0;
    for (int64_t i = 0; i < count; i++) largest = x[i] > largest || x[i] != x[i] ? x[i] : largest;
    return largest;
}

// Rows of pairs as they came, filled up with zeros, and panels of them.
static void to_tiles(const void *from, int64_t at, int64_t row, int64_t width, int64_t steps, const block *b, float *rows) {
    int64_t whole = padded(b->count, PANEL);
    float *panels = rows + whole * steps;
    for (int64_t i = 0; i < b->count; i++)
        take_pairs((const uint16_t *)from + at + b->places[i] * row, width, steps, rows + i * steps);
    memset(rows + b->count * steps, 0, sizeof(float) * (size_t)((whole - b->count) * steps));
    for (int64_t i = 0; i < whole; i += IN_PANEL)
        lay_abreast((const char *)(rows + i * steps), BF16, 2 * steps, IN_PANEL, 2 * steps, NULL, 1, panels + i * steps);
}

// Times a factor: squared lengths of rows less the mean, and products of rows with the mean, which are 0 for padding rows.
static void about_rows(const float *rows, int64_t steps, int64_t width, int64_t count, const float *mean, float factor,
                       float *lengths, float *towards) {
    for (int64_t i = 0; i < padded(count, PANEL); i++) {
        vf sum = SPLAT(0.0f), product = SPLAT(0.0f);
        for (int64_t k = 0; k < width; k += W) {
            vf x = load_bf16((const uint16_t *)(rows + i * steps) + k), mid = mean ? load_f32(mean + k) : SPLAT(0.0f);
            sum += (x - mid) * (x - mid), product += x * mid;
        }
        lengths[i] = factor * sum_of(sum);
        if (towards) towards[i] = factor * sum_of(product);
    }
}

static void prepare_tiles(const walks *all, int64_t key_at, int64_t value_at, block *b, const float *mean) {
    to_tiles(all->keys, key_at, all->key_row, b->d, b->key_steps, b, b->keys);
    to_tiles(all->values, value_at, all->value_row, b->e, b->value_steps, b, b->values);
    about_rows(b->keys, b->key_steps, b->d, b->count, mean, b->scale, b->lengths, b->towards);
    about_rows(b->values, b->value_steps, b->e, b->count, NULL, 1, b->value_lengths, NULL);
    b->own = 0;
    for (int64_t k = 0; mean && k < b->d; k++) b->own += b->scale * mean[k] * mean[k];
}

static void prepare(const walks *all, int64_t number, block *b, int centred) {
    int64_t key_at = number / all->of_lane * all->key_block, value_at = number / all->of_lane * all->value_block;
    if (centred) mean_of_keys(all, key_at, b);
    const float *mean = centred ? b->mean : NULL;
    b->factor = 1;
    if (b->tiled) prepare_tiles(all, key_at, value_at, b, mean);
    else {
        to_panels(all->keys, all->kind, key_at, all->key_row, b->d, b, mean, sqrtf(all->scale), b->keys);
        to_panels(all->values, all->kind, value_at, all->value_row, b->e, b, NULL, 1, b->values);
        squared_lengths(b->keys, b->d, b->count, b->lengths);
        squared_lengths(b->values, b->e, b->count, b->value_lengths);
    }
    b->largest = largest_of(b->lengths, b->count);
}

// Some rows of a tile: exponentials of the products of keys less the largest, or these times the products of values.
INLINE void products(const float *rows, const float *columns, int64_t width, float start, int vectors, int of_values,
                     float *tile) {
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
        else store_f32(at, exp_of(larger(SPLAT(NOTHING), sums[r][v])));
    }
}

// Products of all tokens of one panel with those of another, as far as there are any; of a panel with itself the later ones.
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

static int tokens_of(const block *b, int64_t panel) {
    int64_t left = b->count - panel * PANEL;
    return (int)(left < PANEL ? left : PANEL);
}

// Products of all rows of one panel with those of another.
static void products_in_tiles(const float *rows, int64_t whole, int64_t steps, int64_t from, int64_t to, float *tile) {
    const float *panels = rows + whole * steps;
    for (int64_t r = 0; r < PANEL; r += TALL)
        for (int64_t c = 0; c < PANEL; c += IN_PANEL)
            times_panel(rows + (from * PANEL + r) * steps, steps, panels + (to * PANEL + c) * steps, IN_PANEL, steps,
                        tile + r * PANEL + c, PANEL, 0);
}

static void tile_in_tiles(const block *b, int64_t from, int64_t to) {
    int64_t whole = padded(b->count, PANEL);
    products_in_tiles(b->keys, whole, b->key_steps, from, to, b->tile);
    products_in_tiles(b->values, whole, b->value_steps, from, to, b->other);
    for (int64_t r = 0; r < PANEL; r++) {
        const vf less = SPLAT(b->towards[from * PANEL + r] - b->own + b->largest);
        for (int64_t c = from == to ? r / W * W : 0; c < PANEL; c += W) {
            float *at = b->tile + r * PANEL + c;
            vf x = load_f32(at) * SPLAT(b->scale) - less - load_f32(b->towards + to * PANEL + c);
            vf of_values = load_f32(b->other + r * PANEL + c) * SPLAT(b->factor) + SPLAT(b->ones);
            store_f32(at, exp_of(larger(SPLAT(NOTHING), x)) * of_values);
        }
    }
}

static void tile_of(const block *b, int64_t from, int64_t to) {
    if (b->tiled) {
        tile_in_tiles(b, from, to);
        return;
    }
    int rows = tokens_of(b, from), columns = tokens_of(b, to);
    int64_t keys = PANEL * b->d, values = PANEL * b->e;
    fill_tile(b->keys + from * keys, b->keys + to * keys, b->d, -b->largest, 0, rows, columns, b->tile);
    fill_tile(b->values + from * values, b->values + to * values, b->e, b->ones, 1, rows, columns, b->tile);
}

INLINE void add_row(block *b, int row, float sign, int first, int last) {
    for (int v = first; v < last; v++)
        store_f32(b->y + v * W, load_f32(b->y + v * W) + SPLAT(sign) * load_f32(b->tile + row * PANEL + v * W));
}

// y of a panel's tokens from all panels before it, whose signs are known; and its own products.
static void begin_panel(block *b, int64_t panel) {
    int last = (tokens_of(b, panel) + W - 1) / W;
    memset(b->y, 0, sizeof b->y);
    for (int64_t before = 0; before < panel; before++) {
        tile_of(b, before, panel);
        for (int r = 0; r < PANEL; r++) add_row(b, r, b->signs[before * PANEL + r], 0, last);
    }
    tile_of(b, panel, panel);
}

static void set_sign(block *b, int64_t token, float sign) {
    int here = (int)(token % PANEL);
    b->signs[token] = sign;
    add_row(b, here, sign, here / W, (tokens_of(b, token / PANEL) + W - 1) / W);
}

static void halve(const walks *all, int64_t number, block *b, float gain, uint8_t *kept) {
    int64_t half = b->count / 2, positive = 0;
    float diagonal = 0;
    prepare(all, number, b, 1);
    for (int64_t i = 0; i < b->count; i++) diagonal += expf(b->lengths[i] - b->largest) * (b->value_lengths[i] + ONES);
    diagonal /= (float)b->count;
    gain /= diagonal < 1e-30f ? 1e-30f : diagonal;
    b->ones = ONES;
    for (int64_t j = 0; j < b->count; j++) {
        if (j % PANEL == 0) begin_panel(b, j / PANEL);
        float chance = (float)(0.5 - all->uniforms[number * all->n + j]);
        int plus = b->y[j % PANEL] * gain < chance;
        plus = (plus & (positive < half)) | (j - positive >= half);
        positive += plus;
        kept[j] = (uint8_t)plus;
        set_sign(b, j, (float)(2 * plus - 1));
    }
}

// Returns whether the walk failed: there are no signs from there on.
static uint8_t keep_fewer(const walks *all, int64_t number, block *b, float bound, uint8_t *kept) {
    int64_t positive = 0, done = 0;
    prepare(all, number, b, 0);
    float longest = sqrtf(largest_of(b->value_lengths, b->count));
    if (b->tiled && longest < TINY) {  // the square of their factor is beyond float32, and so are their products
        b->tiled = 0;
        prepare(all, number, b, 0);
        longest = sqrtf(largest_of(b->value_lengths, b->count));
    }
    float factor = 1 / (longest < 1e-30f ? 1e-30f : longest);
    for (int64_t i = 0; !b->tiled && i < padded(b->count, PANEL) * b->e; i++) b->values[i] *= factor;
    b->factor = factor * factor;
    b->ones = 0;
    for (; done < b->count; done++) {
        if (done % PANEL == 0) begin_panel(b, done / PANEL);
        float y = b->y[done % PANEL];
        if (!(fabsf(y) <= bound)) break;
        int plus = all->uniforms[number * all->n + b->places[done]] < (double)(0.5f - y / (2 * bound));
        positive += plus;
        set_sign(b, done, (float)(2 * plus - 1));
    }
    float fewer = positive <= done - positive ? 1 : -1;
    for (int64_t j = 0; j < done; j++) kept[b->places[j]] = b->signs[j] == fewer;
    return done < b->count;
}

static walks read_about(const int64_t *x, const void *keys, const void *values, const double *numbers, double scale) {
    return (walks){x[0], x[1], x[2], x[3], (int)x[4], (int)x[5], x[6], x[7], x[8],
                   x[9], keys, values, numbers, (float)scale, NULL, 1, 0};
}

// Where a block's tokens lie: one after another, or where its index says. Returns whether that is among so many.
static int take_places(const walks *all, int64_t number, int64_t there, block *b) {
    if (b->count > all->n) return 0;
    for (int64_t j = 0; !all->index && j < b->count; j++) b->places[j] = j;
    if (!all->index) return 1;
    int64_t first = number % all->of_lane * all->n, wrong = first + b->count > all->numbered;
    const int64_t *index = all->index + number / all->of_lane * all->numbered + first;
    for (int64_t j = 0; !wrong && j < b->count; j++) wrong = index[j] < 0 || index[j] >= there, b->places[j] = index[j];
    return !wrong;
}

// kept[blocks, n]: half of the first sizes[i] tokens of block i; of those that the index numbers, if there is one. Returns 1
// if there was no memory, or no such token.
int kvs_keep_half(const int64_t *about, const void *keys, const void *values, const double *uniforms, const int64_t *index,
                  const int64_t *sizes, double scale, double gain, uint8_t *kept) {
    walks all = read_about(about, keys, values, uniforms, scale);
    int64_t there = 0;
    int failed = 0;
    if (index) all.index = index, all.of_lane = about[10], all.numbered = about[11], there = about[12];
#pragma omp parallel for schedule(dynamic) num_threads(use_threads(all.threads, all.blocks)) reduction(| : failed)
    for (int64_t i = 0; i < all.blocks; i++) {
        block b = {.count = sizes[i]};
        if (all.n) memset(kept + i * all.n, 0, (size_t)all.n);
        if (!make_room(&b, &all) || !take_places(&all, i, there, &b)) {
            failed = 1;
            continue;
        }
        struct tile_state before;
        if (b.tiled) begin_tiles(&before);
        halve(&all, i, &b, (float)gain, kept + i * all.n);
        if (b.tiled) end_tiles(&before);
    }
    return failed;
}

// kept[blocks, n]: the tokens with the rarer sign, of those that are real; lost: which walks failed.
int kvs_keep_smaller(const int64_t *about, const void *keys, const void *values, const double *uniforms,
                     const uint8_t *real, double scale, const float *bounds, uint8_t *kept, uint8_t *lost) {
    walks all = read_about(about, keys, values, uniforms, scale);
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(use_threads(all.threads, all.blocks)) reduction(| : failed)
    for (int64_t i = 0; i < all.blocks; i++) {
        block b = {.count = 0};
        if (all.n) memset(kept + i * all.n, 0, (size_t)all.n);
        if (!make_room(&b, &all)) {
            failed = 1;
            continue;
        }
        for (int64_t j = 0; j < all.n; j++)
            if (real[i * all.n + j]) b.places[b.count++] = j;
        struct tile_state before;
        const int tiled = b.tiled;
        if (tiled) begin_tiles(&before);
        lost[i] = keep_fewer(&all, i, &b, bounds[i], kept + i * all.n);
        if (tiled) end_tiles(&before);
    }
    return failed;
}
