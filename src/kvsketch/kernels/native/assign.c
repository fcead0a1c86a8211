// The bucket of every key: the centroid with the largest inner product, the first of several. Some keys meet panel after
// panel of centroids (`panels.h`), and nothing is kept but the largest product so far and its centroid. In whole tiles of
// pairs of bfloat16 (`tiles.h`) a centroid is three vectors of bfloat16, whose exact sum it is: products are as near as in
// float32.
#include "tiles.h"  // and `attention.c` before this, for what is small

#define ASSIGNED 256            // keys that stay in the second cache
#define ASSIGNED_IN_TILES 1024  // the same, where laying out centroids takes longer than meeting them
#define THIRDS 3

struct assigning {  // as kernels/native/assign.py writes it; strides count numbers
    int64_t lanes, count, buckets, width, kind, key_lane, key_step, centroid_lane, centroid_step;
};

struct best {  // of a key, in each of the places of a vector
    vf product;
    vi bucket;
};

// NaN is larger than anything, as for torch.
INLINE void take_better(struct best *best, vf product, vi bucket) {
#if W == 16
    __m512 most = (__m512)best->product, own = (__m512)product;
    __mmask16 better = _mm512_cmp_ps_mask(own, most, _CMP_NLE_UQ) & _mm512_cmp_ps_mask(most, most, _CMP_ORD_Q);
    best->product = (vf)_mm512_mask_mov_ps(most, better, own);
    best->bucket = (vi)_mm512_mask_mov_epi32((__m512i)best->bucket, better, (__m512i)bucket);
#else
    vi better = (product > best->product) | ((product != product) & (best->product == best->product));
    best->product = choose(better, product, best->product);
    best->bucket = (better & bucket) | (~better & best->bucket);
#endif
}

static int64_t bucket_of(const struct best *best) {
    float most = best->product[0];
    int32_t found = best->bucket[0];
    for (int i = 1; i < W; i++) {
        float product = best->product[i];
        int better = product > most || (product != product && most == most);
        int equal = product == most || (product != product && most != most);
        if (better || (equal && best->bucket[i] < found)) most = product, found = best->bucket[i];
    }
    return found;
}

// Keys' products with the panel of centroids from `first` on.
INLINE void take_all(const struct assigning *in, int64_t first, vf (*products)[ABREAST], const int keys,
                     struct best *best) {
    vi bucket[ABREAST], nobodys[ABREAST];
    for (int v = 0; v < ABREAST; v++) {
        for (int i = 0; i < W; i++) bucket[v][i] = (int32_t)first + v * W + i;
        nobodys[v] = bucket[v] >= (int32_t)in->buckets + (vi){0};
    }
    for (int r = 0; r < keys; r++)
        UNROLL for (int v = 0; v < ABREAST; v++)
            take_better(best + r, choose(nobodys[v], SPLAT(-INFINITY), products[r][v]), bucket[v]);
}

// A panel of the centroids from `first` on.
static void lay_centroids(const struct assigning *in, const float *centroids, int64_t first, float *panel) {
    lay_abreast((const char *)(centroids + first * in->centroid_step), F32, in->centroid_step, in->buckets - first,
                in->width, NULL, 0, panel);
}

static void assign(const struct assigning *in, const char *keys, const float *centroids, int64_t count, float *panel,
                   float *rows, struct best *best) {
    for (int64_t j = 0; j < padded(count, ASKED); j++) {
        int64_t own = j < count ? j : count - 1;
        read_row(keys + own * in->key_step * bytes_of((int)in->kind), (int)in->kind, 0, in->width,
                 rows + j * in->width);
    }
    for (int64_t c = 0; c < in->buckets; c += IN_PANEL) {
        lay_centroids(in, centroids, c, panel);
        for (int64_t j = 0; j < count; j += ASKED) {
            vf products[ASKED][ABREAST];
            const char *at[ASKED];
            UNROLL for (int r = 0; r < ASKED; r++) {
                at[r] = (const char *)(rows + (j + r) * in->width);
                UNROLL for (int v = 0; v < ABREAST; v++) products[r][v] = SPLAT(0.0f);
            }
            multiply(at, panel, IN_PANEL, in->width, products, 0);
            take_all(in, c, products, ASKED, best + j);
        }
    }
}

// The numbers of a panel as three of bfloat16 each, in panels of pairs, the last third first: what is small is added
// first.
static void in_thirds(const float *panel, int64_t width, int64_t pairs, float *thirds) {
    for (int64_t i = 0; i < width; i += 2)
        UNROLL for (int v = 0; v < ABREAST; v++) {
            vf rest = load_f32(panel + i * IN_PANEL + v * W);
            vf next = i + 1 < width ? load_f32(panel + (i + 1) * IN_PANEL + v * W) : SPLAT(0.0f);
            for (int t = THIRDS - 1; t >= 0; t--) {
                vu first = (vu)rest & 0xffff0000u, second = (vu)next & 0xffff0000u;  // their first eight bits
                store_f32(thirds + (t * pairs + i / 2) * IN_PANEL + v * W, (vf)(first >> 16 | second));
                rest -= (vf)first, next -= (vf)second;
                rest = choose(rest == rest, rest, SPLAT(0.0f));  // infinity less itself
                next = choose(next == next, next, SPLAT(0.0f));
            }
        }
}

static void assign_in_tiles(const struct assigning *in, const char *keys, const float *centroids, int64_t count,
                            float *panel, float *rows, float *thirds, struct best *best) {
    int64_t pairs = padded(steps_of(in->width, 1), IN_TILE);
    for (int64_t j = 0; j < padded(count, TALL); j++) {
        const char *own = keys + (j < count ? j : count - 1) * in->key_step * bytes_of(BF16);
        take_pairs(own, in->width, pairs, rows + j * pairs);
    }
    memset(thirds, 0, sizeof(float) * (size_t)(THIRDS * IN_PANEL * pairs));
    struct tile_state before;
    begin_tiles(&before);
    for (int64_t c = 0; c < in->buckets; c += IN_PANEL) {
        lay_centroids(in, centroids, c, panel);
        in_thirds(panel, in->width, pairs, thirds);
        for (int64_t j = 0; j < count; j += TALL) {
            vf products[TALL][ABREAST];
            times_panels(rows + j * pairs, pairs, thirds, IN_PANEL, pairs, THIRDS, (float *)products, IN_PANEL, 0);
            take_all(in, c, products, TALL, best + j);
        }
    }
    end_tiles(&before);
}

// Whether tiles take these keys: none that are NaN or infinite, since parts of a centroid would turn others into NaN too.
static int fit_tiles(const struct assigning *in, const char *keys, int64_t count) {
    if (form_of((int)in->kind) != IN_TILES) return 0;
    uint16_t largest = 0;
    for (int64_t j = 0; j < count; j++) {
        const uint16_t *key = (const uint16_t *)keys + j * in->key_step;
        for (int64_t i = 0; i < in->width; i++) {
            uint16_t size = key[i] & 0x7fff;
            largest = size > largest ? size : largest;
        }
    }
    return largest < 0x7f80;
}

// 0, or 1 where there is no memory left.
int kvs_assign(const struct assigning *in, const char *keys, const float *centroids, int64_t *found, int64_t threads) {
    int64_t most = form_of((int)in->kind) == IN_TILES ? ASSIGNED_IN_TILES : ASSIGNED, bytes = bytes_of((int)in->kind);
    int64_t parts = (in->count + most - 1) / most, all = in->lanes * parts, width = padded(in->width, 2 * IN_TILE);
    int failed = 0, small = in->lanes * in->count * in->buckets * in->width < SMALL;
    int team = use_threads(threads, small ? 1 : all);
    PRAGMA(omp parallel for num_threads(team) schedule(dynamic) reduction(|:failed) if (team > 1))
    for (int64_t n = 0; n < all; n++) {
        int64_t lane = n / parts, first = n % parts * most;
        int64_t count = in->count - first < most ? in->count - first : most;
        float *rows = kept_memory(2, sizeof(float) * width * (most + 3 * IN_PANEL));
        struct best *best = kept_memory(3, sizeof(struct best) * most);
        if (!rows || !best) {
            failed = 1;
            continue;
        }
        float *panel = rows + most * width;
        const char *own = keys + (lane * in->key_lane + first * in->key_step) * bytes;
        const float *of_lane = centroids + lane * in->centroid_lane;
        for (int64_t j = 0; j < padded(count, TALL); j++) best[j] = (struct best){SPLAT(-INFINITY), (vi){0}};
        if (fit_tiles(in, own, count))
            assign_in_tiles(in, own, of_lane, count, panel, rows, panel + IN_PANEL * width, best);
        else assign(in, own, of_lane, count, panel, rows, best);
        for (int64_t j = 0; j < count; j++) found[lane * in->count + first + j] = bucket_of(best + j);
    }
    return failed;
}
