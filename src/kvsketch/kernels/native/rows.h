// Rows of numbers of any kind as float32, and W of them side by side.
#ifndef KVS_ROWS
#define KVS_ROWS

#include "common.h"

#if W == 16  // numbers of two vectors in turns: those of their first halves, and of their second halves
#define FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif W == 8
#define FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST 0, 4, 1, 5
#define SECOND 2, 6, 3, 7
#endif
#ifdef __clang__
#define IN_TURNS(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define IN_TURNS(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

static int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A row of numbers of any kind as float32; nothing is read beyond its end.
static void read_row(const void *from, int kind, int64_t at, int64_t width, float *to) {
    int64_t k = 0;
    if (kind == F32) memcpy(to, (const float *)from + at, sizeof(float) * (size_t)width);
    else if (kind == BF16)
        for (; k + W <= width; k += W) store_f32(to + k, load_bf16((const uint16_t *)from + at + k));
    else
        for (; k + W <= width; k += W) store_f32(to + k, load_f16((const uint16_t *)from + at + k));
    if (kind != F32)
        for (; k < width; k++) to[k] = read_one(from, kind, at + k);
}

// A row of numbers as another kind.
static void write_row(void *to, int kind, int64_t count, const float *from) {
    int64_t i = 0;
    if (kind == F32) memcpy(to, from, sizeof(float) * (size_t)count), i = count;
#if PAIRED
    for (; kind == BF16 && i + W <= count; i += W) {
        __m256bh some = _mm512_cvtneps_pbh((__m512)load_f32(from + i));
        memcpy((uint16_t *)to + i, &some, sizeof some);
    }
#endif
    for (; i < count; i++) write_one(to, kind, i, from[i]);
}

// W vectors become the vectors of their first numbers, of their second ones, and so on.
INLINE void transpose(vf *x) {
    UNROLL for (int step = 1; step < W; step *= 2) {
        vf y[W];
        UNROLL for (int i = 0; i < W / 2; i++) {
            y[2 * i] = IN_TURNS(x[i], x[i + W / 2], FIRST);
            y[2 * i + 1] = IN_TURNS(x[i], x[i + W / 2], SECOND);
        }
        UNROLL for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

#endif
