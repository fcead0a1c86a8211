// Whether numbers are finite, see kernels/finite.py.
#include "common.h"

// Whether all of a run of numbers are finite: the bits of NaN and of infinities have the largest exponent.
#define ALL_ARE(name, bits, mask, least)                                             \
    static int name(const void *from, int64_t at, int64_t count) {                   \
        const bits *x = (const bits *)from + at;                                     \
        bits most = 0;                                                               \
        for (int64_t i = 0; i < count; i++) {                                        \
            bits own = x[i] & mask;                                                  \
            most = own > most ? own : most;                                          \
        }                                                                            \
        return most < least;                                                         \
    }
ALL_ARE(all_of_f32, uint32_t, 0x7fffffffu, 0x7f800000u)
ALL_ARE(all_of_bf16, uint16_t, 0x7fffu, 0x7f80u)
ALL_ARE(all_of_f16, uint16_t, 0x7fffu, 0x7c00u)

#define LOOKED_AT 65536  // numbers that a thread takes

// Whether all numbers of tensors [rows, heads, count, width] are finite, tensor by tensor: `about` has the width of each, and
// the strides of its rows, heads and tokens.
void kvs_are_numbers(const int64_t *about, void *const *of, int8_t *to) {
    int64_t rows = about[0], heads = about[1], count = about[2], kind = about[3], threads = about[4], tensors = about[5];
    const int64_t *each = about + 6;
    for (int64_t x = 0; x < tensors; x++) {
        int64_t width = each[4 * x], row = each[4 * x + 1], head = each[4 * x + 2], step = each[4 * x + 3], wrong = 0;
        int64_t at_once = LOOKED_AT / (heads * width + 1) + 1, pieces = (count + at_once - 1) / at_once, all = rows * pieces;
        PRAGMA(omp parallel for num_threads(use_threads(threads, all)) schedule(static) reduction(|:wrong) \
               if (use_threads(threads, all) > 1))
        for (int64_t piece = 0; piece < all; piece++) {
            int64_t first = piece % pieces * at_once, last = first + at_once < count ? first + at_once : count;
            for (int64_t i = first; i < last; i++)
                for (int64_t h = 0; h < heads; h++) {
                    int64_t at = piece / pieces * row + h * head + i * step;
                    wrong |= !(kind == F32 ? all_of_f32(of[x], at, width)
                               : kind == BF16 ? all_of_bf16(of[x], at, width) : all_of_f16(of[x], at, width));
                }
        }
        to[x] = !wrong;
    }
}
