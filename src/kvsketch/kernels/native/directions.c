// Where keys point, see kernels/directions/reference.py: in float64, each key read once where it lies.
#include "common.h"

#define ROWS_AT_ONCE 1024  // that a thread takes

// W numbers of a key from k on as float32, zeros after its end.
INLINE void part_of_key(const void *keys, const int kind, int64_t at, int64_t k, int64_t width, float *to) {
    if (k + W <= width) {
        store_f32(to, load(keys, kind, at + k));
        return;
    }
    memset(to, 0, sizeof(float) * W);
    for (int64_t i = 0; k + i < width; i++) to[i] = read_one(keys, kind, at + k + i);
}

// A key's product with the mean, and with itself; the mean is filled up with zeros to whole vectors. `kind` is known
// when compiled.
INLINE void key_towards(const void *keys, const int kind, int64_t at, int64_t width, const double *mean, double *found) {
    v_double along[2] = {{0}, {0}}, own[2] = {{0}, {0}};
    for (int64_t k = 0; k < width; k += W) {
        float numbers[W];
        part_of_key(keys, kind, at, k, width, numbers);
        UNROLL for (int half = 0; half < 2; half++) {
            v_double other;
            memcpy(&other, mean + k + half * (W / 2), sizeof other);
            v_double x = load_double(numbers + half * (W / 2));
            along[half] += x * other;
            own[half] += x * x;
        }
    }
    v_double products = along[0] + along[1], squares = own[0] + own[1];
    found[0] = found[1] = 0;
    for (int i = 0; i < W / 2; i++) found[0] += products[i], found[1] += squares[i];
}

// ⟨k, mean⟩ / ‖k‖ of all keys [lanes, count, width]; lengths are `least` at least. Means are filled up with zeros to `wide`
// numbers, which are whole vectors.
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

// What a key is divided by to be of length 1.
INLINE double length_of(const void *keys, const int kind, int64_t at, int64_t width, double least) {
    v_double own[2] = {{0}, {0}};
    double squares = 0;
    for (int64_t k = 0; k < width; k += W) {
        float numbers[W];
        part_of_key(keys, kind, at, k, width, numbers);
        UNROLL for (int half = 0; half < 2; half++) {
            v_double x = load_double(numbers + half * (W / 2));
            own[half] += x * x;
        }
    }
    for (int i = 0; i < W / 2; i++) squares += own[0][i] + own[1][i];
    double length = sqrt(squares);
    return length != length || length > least ? length : least;
}

// A key times its share is added to a sum, which has room for whole vectors.
INLINE void add_key(const void *keys, const int kind, int64_t at, int64_t width, double share, double *sum) {
    for (int64_t k = 0; k < width; k += W) {
        float numbers[W];
        part_of_key(keys, kind, at, k, width, numbers);
        UNROLL for (int half = 0; half < 2; half++) {
            v_double so_far;
            memcpy(&so_far, sum + k + half * (W / 2), sizeof so_far);
            so_far += load_double(numbers + half * (W / 2)) * share;
            memcpy(sum + k + half * (W / 2), &so_far, sizeof so_far);
        }
    }
}

// `kind` is known when compiled.
INLINE void add_direction(const void *keys, const int kind, int64_t at, int64_t width, int directions, double least,
                          double *sum) {
    double share = directions ? 1 / length_of(keys, kind, at, width, least) : 1;
    add_key(keys, kind, at, width, share, sum);
}

// The sum of all keys [lanes, count, width], each of length 1 or as it is: in pieces that do not depend on threads. `parts`
// [pieces, lanes, wide] has room for the sum of each piece; the sum of all is in the first of them.
void kvs_sum_of_keys(const int64_t *about, const void *keys, double least, double *parts) {
    int64_t lanes = about[0], count = about[1], width = about[2], threads = about[4], lane = about[5], step = about[6];
    int64_t wide = about[7], pieces = about[8], all = lanes * pieces, each = (count + pieces - 1) / pieces;
    int kind = (int)about[3], directions = (int)about[9];
    PRAGMA(omp parallel for num_threads(use_threads(threads, all)) schedule(static) if (use_threads(threads, all) > 1))
    for (int64_t part = 0; part < all; part++) {
        int64_t own = part % lanes, first = part / lanes * each, last = first + each < count ? first + each : count;
        double *sum = parts + part * wide;
        memset(sum, 0, sizeof *sum * (size_t)wide);
        for (int64_t i = first; i < last; i++) {
            int64_t at = own * lane + i * step;
            if (kind == F32) add_direction(keys, F32, at, width, directions, least, sum);
            else if (kind == BF16) add_direction(keys, BF16, at, width, directions, least, sum);
            else add_direction(keys, F16, at, width, directions, least, sum);
        }
    }
    for (int64_t piece = 1; piece < pieces; piece++)
        for (int64_t i = 0; i < lanes * wide; i++) parts[i] += parts[piece * lanes * wide + i];
}
