// Random numbers by address, bit for bit those of algorithms/draws.py.
#include "common.h"

INLINE uint64_t scramble(uint64_t x) {  // SplitMix64 (Steele, Lea, Flood 2014)
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

// A row of numbers: the first parts of their addresses are the same for all (step 0), and are scrambled once.
static void draw_row(int64_t count, int64_t parts, const int64_t *const *from, const int64_t *steps, double *to) {
    enum { TOGETHER = 128 };
    uint64_t states[TOGETHER], shared = 0;
    int64_t first = 0;
    for (; first < parts && steps[4 * first] == 0; first++) shared = scramble(shared + (uint64_t)*from[first]);
    for (int64_t begin = 0; begin < count; begin += TOGETHER) {
        int64_t here = count - begin < TOGETHER ? count - begin : TOGETHER;
        for (int64_t i = 0; i < here; i++) states[i] = shared;
        for (int64_t part = first; part < parts; part++) {
            const int64_t *x = from[part] + begin * steps[4 * part];
            for (int64_t i = 0; i < here; i++) states[i] = scramble(states[i] + (uint64_t)x[i * steps[4 * part]]);
        }
        for (int64_t i = 0; i < here; i++) to[begin + i] = (double)(int64_t)(states[i] >> 11) * 0x1p-53;
    }
}

// Addresses of up to 8 parts, each with 4 steps in memory along the 4 sizes of the result (0: the same for all).
void kvs_uniforms(const int64_t *sizes, int64_t parts, const int64_t *const *from, const int64_t *steps, double *to) {
    for (int64_t a = 0; a < sizes[0]; a++)
        for (int64_t b = 0; b < sizes[1]; b++)
            for (int64_t c = 0; c < sizes[2]; c++) {
                const int64_t *here[8];
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t *step = steps + 4 * part;
                    here[part] = from[part] + a * step[0] + b * step[1] + c * step[2];
                }
                draw_row(sizes[3], parts, here, steps + 3, to);
                to += sizes[3];
            }
}
