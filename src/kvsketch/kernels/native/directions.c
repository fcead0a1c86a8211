// Where keys point, see kernels/directions/reference.py: in float64, each key read once where it lies.
#include "common.h"

#define ROWS_AT_ONCE 1024  // that a thread takes

// A key's product with the mean, and with itself; the mean is filled up with zeros to whole vectors. `kind` is known
// when compiled.
INLINE void key_towards(const void *keys, const int kind, int64_t at, int64_t width, const double *mean, double *found) {
    v_double along[2] = {{0}, {0}}, own[2] = {{0}, {0}};
    for (int64_t k = 0; k < width; k += W) {
        float numbers[W];
        if (k + W <= width) {
            store_f32(numbers, load(keys, kind, at + k));
        } else {
            memset(numbers, 0, sizeof numbers);
            for (int64_t i = 0; k + i < width; i++) numbers[i] = read_one(keys, kind, at + k + i);
        }
        UNROLL for (int half = 0; half < 2; half++) {
            v_half part;
            v_double other;
            memcpy(&part, numbers + half * (W / 2), sizeof part);
            memcpy(&other, mean + k + half * (W / 2), sizeof other);
            v_double x = __builtin_convertvector(part, v_double);
            along[half] += x * other;
            own[half] += x * x;
        }
    }
    v_double products = along[0] + along[1], squares = own[0] + own[1];
    found[0] = found[1] = 0;
    for (int i = 0; i < W / 2; i++) found[0] += products[i], found[1] += squares[i];
}

// ⟨k, mean⟩ / ‖k‖ of all keys [lanes, count, width]; lengths are `least` at least. Means are filled up with zeros to whole
// vectors, and so wide.
void kvs_towards(const int64_t *about, const void *keys, const double *means, double least, double *to) {
    int64_t lanes = about[0], count = about[1], width = about[2], threads = about[4], lane = about[5], step = about[6];
    int64_t pieces = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, wide = about[7];
    int kind = (int)about[3];
    int64_t parts = lanes * pieces;
    PRAGMA(omp parallel for num_threads(use_threads(threads, parts)) schedule(static) if (use_threads(threads, parts) > 1))
    for (int64_t part = 0; part < parts; part++) {
        int64_t own = part / pieces, first = part % pieces * ROWS_AT_ONCE;
        int64_t last = first + ROWS_AT_ONCE < count ? first + ROWS_AT_ONCE : count;
        const double *mean = means + own * wide;
        for (int64_t i = first; i < last; i++) {
            double found[2];
            int64_t at = own * lane + i * step;
            if (kind == F32) key_towards(keys, F32, at, width, mean, found);
            else if (kind == BF16) key_towards(keys, BF16, at, width, mean, found);
            else key_towards(keys, F16, at, width, mean, found);
            double length = sqrt(found[1]);
            to[own * count + i] = found[0] / (length > least ? length : least);
        }
    }
}
