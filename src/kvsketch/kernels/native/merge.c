// Merge answers that each come from some of the tokens, in the place of the first. `attention.merge` is the definition.
#include "rows.h"

#define PARTS 8  // at most

struct answer {  // as kernels/native/merge.py writes it; strides count numbers
    char *out;
    float *lse;
    int64_t row, head, step;
};

// 0, or 1 where there is no memory left: then some may have been merged.
int kvs_merge(const struct answer *parts, int64_t count, int64_t rows, int64_t heads, int64_t queries, int64_t width,
              int64_t kind, int64_t threads) {
    int64_t all = rows * queries, wide = padded(width, W), bytes = bytes_of((int)kind);
    int failed = 0, team = use_threads(threads, all * heads * width < SMALL ? 1 : all);
    PRAGMA(omp parallel for num_threads(team) schedule(static) reduction(|:failed) if (team > 1))
    for (int64_t n = 0; n < all; n++) {  // heads of a query lie together
        int64_t row = n / queries, query = n % queries;
        float *sum = kept_memory(2, sizeof(float) * 2 * wide);
        if (!sum) {
            failed = 1;
            continue;
        }
        float *own = sum + wide;
        for (int64_t head = 0; head < heads; head++) {
            int64_t place = (row * heads + head) * queries + query, at[PARTS];
            float most = -INFINITY, mass = 0;
            for (int64_t p = 0; p < count; p++) {
                at[p] = (row * parts[p].row + head * parts[p].head + query * parts[p].step) * bytes;
                float log = parts[p].lse[place];
                most = log > most || log != log ? log : most;  // NaN stays
            }
            for (int64_t p = 0; p < count && most > -INFINITY; p++) mass += expf(parts[p].lse[place] - most);
            float both = most > -INFINITY ? most + logf(mass) : most;
            memset(sum, 0, sizeof(float) * (size_t)wide);
            for (int64_t p = 0; p < count; p++) {
                float share = both == -INFINITY ? 0 : expf(parts[p].lse[place] - both);
                read_row(parts[p].out + at[p], (int)kind, 0, width, own);
                for (int64_t i = 0; i < wide; i += W)
                    store_f32(sum + i, load_f32(sum + i) + load_f32(own + i) * SPLAT(share));
            }
            write_row(parts[0].out + at[0], (int)kind, width, sum);
            parts[0].lse[place] = both;
        }
    }
    return failed;
}
