// The attention that queries expect in buckets: the classifier's two layers, softmax, and the mean over a group.
#include "common.h"

#define COLUMNS 512  // that are worked on together; twice as many where there are heads for all threads
#define AHEAD 8192   // bytes: weights that are bytes are prefetched so far ahead
#define SMALL_QUESTION (1 << 18)  // multiplications that are not worth a second thread

struct layer {  // of the classifier: [heads, inner, columns] and [heads, columns]; NULL: there is none
    const void *weights, *bias;
    int64_t inner, columns;
    const float *steps;   // [heads, columns]: weights are integers times such steps, see `times_bytes`; or NULL
    const float *levels;  // [heads, inner]: the weights of a row are so many times as large
    const int32_t *sums;  // of a column's integers
};

// Four rows of weights times `rb` rows of numbers, added up, for some columns; rb and kind are known when compiled.
INLINE void four_rows(const void *weights, int64_t columns, const float *from, int64_t stride, float *to,
                      int64_t to_stride, int64_t first, int64_t last, const int rb, const int kind) {
    vf shares[4][4];
    UNROLL for (int r = 0; r < rb; r++) UNROLL for (int k = 0; k < 4; k++) shares[r][k] = SPLAT(from[r * stride + k]);
    int64_t c = first;
    for (; c + W <= last; c += W) {
        vf own[4];
        UNROLL for (int k = 0; k < 4; k++) {
            own[k] = load(weights, kind, k * columns + c);
            __builtin_prefetch((const char *)weights + ((k + 4) * columns + c) * bytes_of(kind), 0, 2);
        }
        UNROLL for (int r = 0; r < rb; r++) {
            vf sum = load_f32(to + r * to_stride + c);
            UNROLL for (int k = 0; k < 4; k++) sum += shares[r][k] * own[k];
            store_f32(to + r * to_stride + c, sum);
        }
    }
    for (; c < last; c++)
        for (int r = 0; r < rb; r++)
            for (int k = 0; k < 4; k++) to[r * to_stride + c] += from[r * stride + k] * read_one(weights, kind, k * columns + c);
}

INLINE void add_rows(const void *weights, int64_t columns, const float *from, int64_t stride, float *to,
                     int64_t to_stride, int64_t rows, int64_t first, int64_t last, const int kind) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        four_rows(weights, columns, from + r * stride, stride, to + r * to_stride, to_stride, first, last, 4, kind);
    for (; r < rows; r++)
        four_rows(weights, columns, from + r * stride, stride, to + r * to_stride, to_stride, first, last, 1, kind);
}

#if PAIRED
#define TWICE (2 * W)  // columns that are worked on together; two rows of weights lie there in turns, in two vectors
#define DEEP 8         // rows of weights that are worked on together; those after the next eight are prefetched

// Eight rows of weights times `rb` rows of numbers, added up for some columns. Of every TWICE columns those come first
// that `unpacklo` takes: `in_order` puts that right at the end.
INLINE void eight_rows(const uint16_t *weights, int64_t columns, const uint16_t *from, int64_t stride, float *to,
                       int64_t to_stride, int64_t first, int64_t last, const int rb) {
    __m512bh two[4][DEEP / 2];
    UNROLL for (int r = 0; r < rb; r++)
        UNROLL for (int k = 0; k < DEEP / 2; k++) {
            int both;
            memcpy(&both, from + r * stride + 2 * k, sizeof both);
            two[r][k] = (__m512bh)_mm512_set1_epi32(both);
        }
    for (int64_t c = first; c < last; c += TWICE) {
        __m512 low[4], high[4];
        UNROLL for (int r = 0; r < rb; r++)
            low[r] = _mm512_loadu_ps(to + r * to_stride + c), high[r] = _mm512_loadu_ps(to + r * to_stride + c + W);
        UNROLL for (int k = 0; k < DEEP; k += 2) {
            const uint16_t *at = weights + k * columns + c;
            __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + columns);
            __builtin_prefetch(at + 2 * DEEP * columns, 0, 2);
            __builtin_prefetch(at + (2 * DEEP + 1) * columns, 0, 2);
            __m512bh those = (__m512bh)_mm512_unpacklo_epi16(a, b), others = (__m512bh)_mm512_unpackhi_epi16(a, b);
            UNROLL for (int r = 0; r < rb; r++) {
                low[r] = _mm512_dpbf16_ps(low[r], two[r][k / 2], those);
                high[r] = _mm512_dpbf16_ps(high[r], two[r][k / 2], others);
            }
        }
        UNROLL for (int r = 0; r < rb; r++)
            _mm512_storeu_ps(to + r * to_stride + c, low[r]), _mm512_storeu_ps(to + r * to_stride + c + W, high[r]);
    }
}

INLINE void in_order(float *at) {
    vf low = load_f32(at), high = load_f32(at + W);
    store_f32(at, IN_TURNS(low, high, FIRST_WOVEN)), store_f32(at + W, IN_TURNS(low, high, SECOND_WOVEN));
}

// to[r] += from[r] · weights in products of pairs of bfloat16. 0: the layer has no such shape, or there is no memory.
static int times_pairs(const uint16_t *weights, const struct layer *layer, const float *from, int64_t stride, float *to,
                       int64_t to_stride, int64_t rows, int64_t first, int64_t last) {
    int64_t deep = layer->inner, wide = layer->columns, r = 0;
    if (deep % W || wide % TWICE) return 0;
    uint16_t *own = kept_memory(3, sizeof(uint16_t) * rows * deep);
    if (!own) return 0;
    for (; r < rows; r++)
        for (int64_t i = 0; i < deep; i += W) {
            __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + r * stride + i));
            memcpy(own + r * deep + i, &rounded, sizeof rounded);
        }
    for (int64_t i = 0; i < deep; i += DEEP, weights += DEEP * wide) {
        for (r = 0; r + 4 <= rows; r += 4)
            eight_rows(weights, wide, own + r * deep + i, deep, to + r * to_stride, to_stride, first, last, 4);
        for (; r < rows; r++)
            eight_rows(weights, wide, own + r * deep + i, deep, to + r * to_stride, to_stride, first, last, 1);
    }
    for (r = 0; r < rows; r++)
        for (int64_t c = first; c < last; c += TWICE) in_order(to + r * to_stride + c);
    return 1;
}
#else
#define times_pairs(...) 0
#endif

#define SIDE 32  // columns whose weights lie side by side where they are bytes: [columns / SIDE, inner / 4, SIDE, 4]

// Numbers times their levels, as integers times a step, which is returned; NaN: some number is not finite. 32,768 is added
// to each integer, so that its high and its low byte are both from 0 to 255. The largest integer is chosen so that a sum
// over all rows stays below 2^31: 32,767 for up to 512 rows, 2,047 for 8,192.
static float in_two_bytes(const float *from, const float *levels, int64_t deep, uint8_t *restrict high,
                          uint8_t *restrict low) {
    float most = 0, none = 0, limit = 2147483647.0f / 128 / deep;
    vf top = SPLAT(0.0f), nothing = SPLAT(0.0f);
    int64_t first = 0;
    for (; first + W <= deep; first += W) {
        vf x = load_f32(from + first) * load_f32(levels + first);
        top = larger(larger(x, -x), top), nothing += x * SPLAT(0.0f);
    }
    for (int i = 0; i < W; i++) most = top[i] > most ? top[i] : most;
    for (none = sum_of(nothing); first < deep; first++) {
        float x = fabsf(from[first] * levels[first]);
        most = x > most ? x : most, none += x * 0;
    }
    limit = limit < 32767 ? floorf(limit) : 32767;
    float turns = most > 1e-30f && none == 0 ? limit / most : 0;
    memset(high, 128, deep), memset(low, 0, deep);
    if (turns > 0)
        for (int64_t i = 0; i < deep; i++) {
            int32_t whole = (int32_t)rintf(from[i] * levels[i] * turns) + (1 << 15);
            high[i] = whole >> 8, low[i] = whole & 255;
        }
    return most / limit + none;
}

#ifdef __AVX512VNNI__
// Each sum has a name: GCC 12 may write those of an array to memory after every product, at half the speed.
#define OF_ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#define BEGIN_ROW(r) __m512i high##r = none, low##r = none, high_too##r = none, low_too##r = none;
#define ADD_TO_ROW(r)                                                  \
    bytes = four_times(own[r] + i);                                    \
    high##r = _mm512_dpbusd_epi32(high##r, bytes, some);               \
    high_too##r = _mm512_dpbusd_epi32(high_too##r, bytes, others);     \
    bytes = four_times(own[r] + deep + i);                             \
    low##r = _mm512_dpbusd_epi32(low##r, bytes, some);                 \
    low_too##r = _mm512_dpbusd_epi32(low_too##r, bytes, others);
#define END_ROW(r)                            \
    put_sums(high##r, low##r, columns, to[r]); \
    put_sums(high_too##r, low_too##r, columns + 16, to[r] + 16);

INLINE __m512i four_times(const uint8_t *at) {
    int32_t four;
    memcpy(&four, at, sizeof four);
    return _mm512_set1_epi32(four);
}

INLINE void put_sums(__m512i high, __m512i low, const int32_t *columns, int32_t *to) {
    __m512i all = _mm512_sub_epi32(high, _mm512_slli_epi32(_mm512_loadu_si512(columns), 7));
    _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_slli_epi32(all, 8), low));
}
#endif

// Sums of SIDE columns, in integers, for four rows: given are their high bytes, and `deep` after these the low ones.
static void sums_of_bytes(const int8_t *weights, int64_t deep, const uint8_t *const own[4], const int32_t *columns,
                          int32_t to[4][SIDE]) {
#ifdef __AVX512VNNI__
    __m512i none = _mm512_setzero_si512(), bytes;
    OF_ROWS(BEGIN_ROW)
    for (int64_t i = 0; i < deep; i += 4, weights += 4 * SIDE) {
        __m512i some = _mm512_loadu_si512(weights), others = _mm512_loadu_si512(weights + 64);
        __builtin_prefetch(weights + AHEAD, 0, 2);
        __builtin_prefetch(weights + AHEAD + 64, 0, 2);
        OF_ROWS(ADD_TO_ROW)
    }
    OF_ROWS(END_ROW)
#else
    (void)columns;
    memset(to, 0, 4 * sizeof *to);
    for (int64_t i = 0; i < deep; i += 4, weights += 4 * SIDE)
        for (int r = 0; r < 4; r++) {
            int32_t x[4];
            for (int k = 0; k < 4; k++) x[k] = (own[r][i + k] - 128) * 256 + own[r][deep + i + k];
            for (int c = 0; c < SIDE; c++)
                for (int k = 0; k < 4; k++) to[r][c] += x[k] * weights[4 * c + k];
        }
#endif
}

// to[r] = from[r] · weights, for some columns, where weights are bytes. Sums are exact. 0: there is no memory.
static int times_bytes(const struct layer *layer, int64_t head, const float *from, int64_t stride, float *to,
                       int64_t to_stride, int64_t rows, int64_t first, int64_t last) {
    int64_t deep = layer->inner, wide = layer->columns;
    float *steps = kept_memory(3, rows * (sizeof(float) + 2 * deep));
    if (!steps) return 0;
    uint8_t *own = (uint8_t *)(steps + rows);
    for (int64_t r = 0; r < rows; r++) {
        uint8_t *high = own + 2 * r * deep;
        steps[r] = in_two_bytes(from + r * stride, layer->levels + head * deep, deep, high, high + deep);
    }
    for (int64_t c = first; c < last; c += SIDE) {
        const int8_t *weights = (const int8_t *)layer->weights + (head * wide + c) * deep;
        const int32_t *columns = layer->sums + head * wide + c;
        int32_t found[4][SIDE];
        for (int64_t r = 0; r < rows; r += 4) {
            const uint8_t *four[4];  // the last one again where there are fewer
            for (int64_t k = 0; k < 4; k++) four[k] = own + 2 * deep * (r + k < rows ? r + k : rows - 1);
            sums_of_bytes(weights, deep, four, columns, found);
            for (int64_t k = 0; k < 4 && r + k < rows; k++)
                for (int64_t i = 0; i < SIDE; i++)
                    to[(r + k) * to_stride + c + i] = found[k][i] * (steps[r + k] * layer->steps[head * wide + c + i]);
        }
    }
    return 1;
}

// The same where weights are not bytes.
static void times_numbers(const struct layer *layer, int kind, int64_t head, const float *from, int64_t stride,
                          float *to, int64_t to_stride, int64_t rows, int64_t first, int64_t last) {
    int64_t wide = layer->columns, i = 0;
    const char *weights = (const char *)layer->weights + head * layer->inner * wide * bytes_of(kind);
    for (int64_t r = 0; r < rows; r++) memset(to + r * to_stride + first, 0, sizeof(float) * (last - first));
    if (kind == BF16 && times_pairs((const uint16_t *)weights, layer, from, stride, to, to_stride, rows, first, last))
        return;
    for (; i + 4 <= layer->inner; i += 4, weights += 4 * wide * bytes_of(kind)) {
        if (kind == F32) add_rows(weights, wide, from + i, stride, to, to_stride, rows, first, last, F32);
        else if (kind == BF16) add_rows(weights, wide, from + i, stride, to, to_stride, rows, first, last, BF16);
        else add_rows(weights, wide, from + i, stride, to, to_stride, rows, first, last, F16);
    }
    for (; i < layer->inner; i++, weights += wide * bytes_of(kind))
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = first; c < last; c++)
                to[r * to_stride + c] += from[r * stride + i] * read_one(weights, kind, c);
}

// to[r] = bias + from[r] · weights, for some columns; with `cut` what is negative is 0. 0: there is no memory.
static int times(const struct layer *layer, int kind, int64_t head, const float *from, int64_t stride, float *to,
                 int64_t to_stride, int64_t rows, int64_t first, int64_t last, int cut) {
    int64_t wide = layer->columns;
    if (!layer->steps) times_numbers(layer, kind, head, from, stride, to, to_stride, rows, first, last);
    else if (!times_bytes(layer, head, from, stride, to, to_stride, rows, first, last)) return 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = first; c < last; c++) {
            float x = to[r * to_stride + c] + read_one(layer->bias, kind, head * wide + c);
            to[r * to_stride + c] = cut && x < 0 ? 0 : x;
        }
    return 1;
}

// Probabilities of a query's columns, added with a share to those of the group.
static void add_softmax(float *logits, int64_t columns, float share, float *sum) {
    float most = -INFINITY, mass = 0;
    int64_t c = 0;
    vf top = SPLAT(-INFINITY), masses = SPLAT(0.0f);
    for (; c + W <= columns; c += W) top = larger(top, load_f32(logits + c));
    for (; c < columns; c++) most = logits[c] > most ? logits[c] : most;
    for (int i = 0; i < W; i++) most = top[i] > most ? top[i] : most;
    c = 0;
    for (; c + W <= columns; c += W) {
        vf x = exp_of(load_f32(logits + c) - SPLAT(most));
        masses += x;
        store_f32(logits + c, x);
    }
    for (mass = sum_of(masses); c < columns; c++) mass += logits[c] = expf(logits[c] - most);
    for (c = 0; c < columns; c++) sum[c] += logits[c] * (share / mass);
}

struct asked {  // queries [rows, heads · group, queries, width], as they are before rotation
    const void *queries;
    int64_t kind, rows, heads, group, count, width, row, head, step;
};

// A call: queries, inner and logits [heads, every, numbers]; `every` counts rows, a head's group and its queries.
struct classifying {
    const struct asked *of;
    const struct layer *layers;
    float *queries, *inner, *logits, *scores;
    int64_t every, together;  // columns that are worked on together
};

// Some columns of a layer for one head. 0: there is no memory.
static int answer_columns(const struct classifying *in, const struct layer *layer, int64_t head, int64_t first) {
    int last = layer == in->layers + 1, second = last && in->layers->weights;
    int64_t inner = layer->inner, wide = layer->columns, end = first + in->together;
    const float *from = (second ? in->inner : in->queries) + head * in->every * inner;
    float *to = (last ? in->logits : in->inner) + head * in->every * wide;
    return times(layer, (int)in->of->kind, head, from, inner, to, wide, in->every, first, end < wide ? end : wide, !last);
}

// What a group expects, from the logits of one head.
static void add_up_group(const struct classifying *in, int64_t head) {
    const struct asked *of = in->of;
    int64_t wide = in->layers[1].columns;
    for (int64_t row = 0; row < of->rows; row++)
        memset(in->scores + (row * of->heads + head) * of->count * wide, 0, sizeof(float) * of->count * wide);
    for (int64_t r = 0; r < in->every; r++) {
        int64_t row = r / (of->group * of->count), q = r % of->count;
        add_softmax(in->logits + (head * in->every + r) * wide, wide, 1.0f / of->group,
                    in->scores + ((row * of->heads + head) * of->count + q) * wide);
    }
}

// All of one head. 0: there is no memory.
static int answer_head(const struct classifying *in, int64_t head) {
    for (const struct layer *layer = in->layers; layer < in->layers + 2; layer++)
        for (int64_t c = 0; layer->weights && c < layer->columns; c += in->together)
            if (!answer_columns(in, layer, head, c)) return 0;
    add_up_group(in, head);
    return 1;
}

// scores [rows, heads, count, columns] of the last layer's columns. 0, or 1 where there is no memory left.
int kvs_classify(const struct asked *of, const struct layer *layers, float *scores, int64_t threads) {
    int by_head = of->heads >= threads;  // then no thread waits for others between one layer and the next
    int64_t every = of->rows * of->group * of->count, all = of->heads * every, hidden = layers->columns;
    float *room = kept_memory(1, sizeof(float) * all * (of->width + hidden + layers[1].columns) + 64);
    if (!room) return 1;
    struct classifying in = {of, layers, room, room + all * of->width, room + all * (of->width + hidden), scores, every,
                             by_head ? 2 * COLUMNS : COLUMNS};
    for (int64_t r = 0; r < all; r++) {  // of a head: rows, then its group, then queries
        int64_t h = r / every, row = r % every / (of->group * of->count), g = r / of->count % of->group, q = r % of->count;
        int64_t at = row * of->row + (h * of->group + g) * of->head + q * of->step;
        for (int64_t i = 0; i < of->width; i++) in.queries[r * of->width + i] = read_one(of->queries, (int)of->kind, at + i);
    }
    for (const struct layer *layer = layers + by_head; layer < layers + 2; layer++) {
        int64_t blocks = by_head ? 1 : (layer->columns + in.together - 1) / in.together, parts = of->heads * blocks;
        int64_t work = all * (layer->columns * layer->inner + (by_head ? layers->columns * layers->inner : 0));
        int failed = 0;
        static struct company company = {LEAST_CREDIT, 0, 0};
        struct together it = begin_together(&company, threads, work < SMALL_QUESTION ? 1 : parts);
        PRAGMA(omp parallel num_threads(it.threads) reduction(|:failed) if (it.threads > 1)) {
            int64_t began = begin_own(&it);
            PRAGMA(omp for schedule(dynamic) nowait)
            for (int64_t n = 0; n < parts; n++)
                failed |= by_head ? !answer_head(&in, n) : !answer_columns(&in, layer, n / blocks, n % blocks * in.together);
            end_own(&it, began);
        }
        end_together(&it);
        if (failed) return 1;
    }
    for (int64_t h = 0; !by_head && h < of->heads; h++) add_up_group(&in, h);
    return 0;
}
