// Answers from some of the tokens, put together with answers from others, in the place of the former. `attention.merge` is
// what it is by definition.
#include "rows.h"

struct merging {  // as kernels/native/merge.py writes it; strides count numbers
    int64_t rows, heads, queries, width, kind, out_row, out_head, out_step, other_row, other_head, other_step;
};

// 0, or 1 where there is no memory left: then some may have been put together.
int kvs_merge(const struct merging *in, char *out, float *lse, const char *others, const float *other_lse,
              int64_t threads) {
    int64_t all = in->rows * in->queries, wide = padded(in->width, W), bytes = bytes_of((int)in->kind);
    int failed = 0, team = use_threads(threads, all);
    PRAGMA(omp parallel for num_threads(team) schedule(static) reduction(|:failed) if (team > 1))
    for (int64_t n = 0; n < all; n++) {  // heads of a query lie together
        int64_t row = n / in->queries, query = n % in->queries;
        float *one = kept_memory(2, sizeof(float) * 2 * wide);
        if (!one) {
            failed = 1;
            continue;
        }
        float *two = one + wide;
        for (int64_t head = 0; head < in->heads; head++) {
            int64_t place = (row * in->heads + head) * in->queries + query;
            float a = lse[place], b = other_lse[place], most = a >= b || a != a ? a : b;
            float both = most == -INFINITY ? most : most + log1pf(expf(-fabsf(a - b)));
            float of_a = both == -INFINITY ? 0 : expf(a - both), of_b = both == -INFINITY ? 0 : expf(b - both);
            char *to = out + (row * in->out_row + head * in->out_head + query * in->out_step) * bytes;
            read_row(to, (int)in->kind, 0, in->width, one);
            read_row(others + (row * in->other_row + head * in->other_head + query * in->other_step) * bytes,
                     (int)in->kind, 0, in->width, two);
            for (int64_t i = 0; i < wide; i += W)
                store_f32(one + i, load_f32(one + i) * SPLAT(of_a) + load_f32(two + i) * SPLAT(of_b));
            write_row(to, (int)in->kind, in->width, one);
            lse[place] = both;
        }
    }
    return failed;
}
