// The bucket of every key: the centroid of the largest inner product, the first of several. Some keys meet panel after panel
// of centroids (`panels.h`), and nothing is kept but the largest product so far and whose it is.
#include "panels.h"  // and `attention.c` before this, for what is small

#define ASSIGNED 256  // keys that stay in the second cache

struct assigning {  // as kernels/native/assign.py writes it; strides count numbers
    int64_t lanes, count, buckets, width, kind, key_lane, key_step, centroid_lane, centroid_step;
};

struct best {  // of a key, in each of the places of a vector
    vf product;
    vi bucket;
};

// NaN is larger than anything, as for torch.
INLINE void take_better(struct best *best, vf product, vi bucket) {
    vi better = (product > best->product) | ((product != product) & (best->product == best->product));
    best->product = choose(better, product, best->product);
    best->bucket = (better & bucket) | (~better & best->bucket);
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

// 0, or 1 where there is no memory left.
int kvs_assign(const struct assigning *in, const char *keys, const float *centroids, int64_t *found, int64_t threads) {
    int64_t parts = (in->count + ASSIGNED - 1) / ASSIGNED, all = in->lanes * parts, bytes = bytes_of((int)in->kind);
    int failed = 0, small = in->lanes * in->count * in->buckets * in->width < SMALL;
    int team = use_threads(threads, small ? 1 : all);
    PRAGMA(omp parallel for num_threads(team) schedule(dynamic) reduction(|:failed) if (team > 1))
    for (int64_t n = 0; n < all; n++) {
        int64_t lane = n / parts, first = n % parts * ASSIGNED;
        int64_t count = in->count - first < ASSIGNED ? in->count - first : ASSIGNED;
        float *panel = kept_memory(2, sizeof(float) * in->width * (IN_PANEL + ASSIGNED));
        struct best *best = kept_memory(3, sizeof(struct best) * ASSIGNED);
        if (!panel || !best) {
            failed = 1;
            continue;
        }
        float *rows = panel + IN_PANEL * in->width;
        for (int64_t j = 0; j < padded(count, ASKED); j++) {
            int64_t own = first + (j < count ? j : count - 1);
            read_row(keys + (lane * in->key_lane + own * in->key_step) * bytes, (int)in->kind, 0, in->width,
                     rows + j * in->width);
            best[j] = (struct best){SPLAT(-INFINITY), (vi){0}};
        }
        for (int64_t c = 0; c < in->buckets; c += IN_PANEL) {
            lay_abreast((const char *)(centroids + lane * in->centroid_lane + c * in->centroid_step), F32,
                        in->centroid_step, in->buckets - c, in->width, NULL, 0, panel);
            vi bucket[ABREAST];
            for (int v = 0; v < ABREAST; v++)
                for (int i = 0; i < W; i++) bucket[v][i] = (int32_t)c + v * W + i;
            for (int64_t j = 0; j < count; j += ASKED) {
                vf products[ASKED][ABREAST];
                const char *at[ASKED];
                UNROLL for (int r = 0; r < ASKED; r++) {
                    at[r] = (const char *)(rows + (j + r) * in->width);
                    UNROLL for (int v = 0; v < ABREAST; v++) products[r][v] = SPLAT(0.0f);
                }
                multiply(at, panel, IN_PANEL, in->width, products, 0);
                UNROLL for (int r = 0; r < ASKED; r++)
                    UNROLL for (int v = 0; v < ABREAST; v++) {
                        vi nobodys = bucket[v] >= (int32_t)in->buckets + (vi){0};
                        take_better(best + j + r, choose(nobodys, SPLAT(-INFINITY), products[r][v]), bucket[v]);
                    }
            }
        }
        for (int64_t j = 0; j < count; j++) found[lane * in->count + first + j] = bucket_of(best + j);
    }
    return failed;
}
