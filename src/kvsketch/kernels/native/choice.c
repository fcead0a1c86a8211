// Which buckets queries visit, and the runs of entries that these consist of.
#include "common.h"

#define SMALL_CHOICE (1 << 12)  // scores that are not worth a second thread

struct choice {  // as kernels/routing/native.py writes it
    int64_t lanes, queries, buckets, probes, runs, per_token;
    double visit, mass;  // negative: no limit; `share`: `visit` is a share of all tokens
    int64_t share, staged_from, staged;
    const float *scores;                    // [lanes, queries, buckets]
    const int64_t *sizes, *edges;           // [lanes, buckets], and [lanes, runs, buckets + 1]: where each run's buckets begin
    int64_t *read;                          // [lanes, queries]: how many entries
    float *left;                            // NULL, or as scores: logs of the sizes of buckets that are not visited
};

INLINE int64_t runs_of(const struct choice *of) {  // of a query: those of its buckets, and what is staged
    return (of->probes < of->buckets ? of->probes : of->buckets) * of->runs + 1;
}

INLINE size_t choosing_room(const struct choice *of) { return (sizeof(float) + sizeof(int64_t)) * (of->buckets + W); }

// The buckets with the largest worth, the first of equal ones first. After `count` there are W numbers that may be read.
static int64_t largest(const float *worth, int64_t count, int64_t wanted, int64_t *found) {
    int64_t have = 0;
    for (int64_t c = 0; c < count; c++) {
        if (have == wanted && c % W == 0) {  // mostly none of the next W is large enough
            vf least = SPLAT(worth[found[have - 1]]);
            vi any = load_f32(worth + c) > least;
            int larger_ones = 0;
            for (int i = 0; i < W; i++) larger_ones |= any[i];
            if (!larger_ones) {
                c += W - 1;
                continue;
            }
        }
        if (have == wanted && !(worth[c] > worth[found[have - 1]])) continue;
        int64_t at = have < wanted ? have++ : have - 1;
        for (; at > 0 && worth[c] > worth[found[at - 1]]; at--) found[at] = found[at - 1];
        found[at] = c;
    }
    return have;
}

// Query n of those of all lanes: its runs, how many entries they have, and what is left.
static void choose_runs(const struct choice *of, int64_t n, int64_t *first, int64_t *length, char *room) {
    int64_t probes = of->probes < of->buckets ? of->probes : of->buckets, *best = (int64_t *)room, all = 0, seen = 0;
    float *worth = (float *)(best + of->buckets + 1);
    const float *own = of->scores + n * of->buckets;
    const int64_t *size = of->sizes + n / of->queries * of->buckets;
    const int64_t *edge = of->edges + n / of->queries * of->runs * (of->buckets + 1);
    for (int64_t c = 0; c < of->buckets; c++) {
        all += size[c];
        worth[c] = of->per_token ? (size[c] ? own[c] / size[c] : 0.0f) : own[c];
        if (of->left) of->left[n * of->buckets + c] = size[c] ? logf((float)size[c]) : -INFINITY;
    }
    for (int64_t c = 0; c < W; c++) worth[of->buckets + c] = -INFINITY;
    int64_t taken = probes ? largest(worth, of->buckets, probes, best) : 0;
    double most = of->share ? of->visit * all : of->visit;
    float expected = 0;
    of->read[n] = of->staged;
    for (int64_t i = 0; i < taken; i++) {
        int64_t bucket = best[i];
        seen += size[bucket];
        int take = i == 0 || ((of->visit < 0 || seen <= most) && (of->mass < 0 || expected < of->mass));
        expected += own[bucket];
        for (int64_t r = 0; r < of->runs; r++) {
            const int64_t *at = edge + r * (of->buckets + 1) + bucket;
            first[i * of->runs + r] = at[0];
            length[i * of->runs + r] = take ? at[1] - at[0] : 0;
        }
        if (take) of->read[n] += size[bucket];
        if (take && of->left) of->left[n * of->buckets + bucket] = -INFINITY;
    }
    first[taken * of->runs] = of->staged_from, length[taken * of->runs] = of->staged;
}

// Runs [lanes, queries, runs_of] of all queries. 0, or 1 where there is no memory left.
int kvs_visit(const struct choice *of, int64_t *begin, int64_t *length, int64_t threads) {
    static struct company company = {LEAST_CREDIT, 0, 0};
    int64_t asking = of->lanes * of->queries, width = runs_of(of);
    int failed = 0, small = asking * of->buckets < SMALL_CHOICE;
    struct together it = begin_together(&company, threads, small ? 1 : asking);
    PRAGMA(omp parallel num_threads(it.threads) reduction(|:failed) if (it.threads > 1)) {
        int64_t began = begin_own(&it);
        PRAGMA(omp for schedule(dynamic) nowait)
        for (int64_t n = 0; n < asking; n++) {
            char *room = kept_memory(3, choosing_room(of));
            if (room) choose_runs(of, n, begin + n * width, length + n * width, room);
            else failed = 1;
        }
        end_own(&it, began);
    }
    end_together(&it);
    return failed;
}
