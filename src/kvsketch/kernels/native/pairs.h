// Products of pairs of bfloat16, where the processor has them: two are multiplied and added up at once.
// Shares of values are rounded to bfloat16 for it, as answers are in the end; what they sum up to is not.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define IN_PAIRS(of) ((of)->kind == BF16 && (of)->key_width % (2 * W) == 0)

// scores[r][j] = scale · ⟨query r, key j⟩ in products of pairs of bfloat16, from queries as they came.
INLINE void scores_of_pairs(const uint16_t *query, const struct shape *of, const uint16_t *const *keys, int count,
                            float (*scores)[TILE], const int rb, const void *const *ahead, int scattered) {
    const int kb = W / rb;
    struct asking asking = from_first(ahead);
    for (int j = 0; j < count; j += kb) {
        vf sums[W];
        const uint16_t *at[W];
        UNROLL for (int i = 0; i < W; i++) sums[i] = SPLAT(0.0f);
        UNROLL for (int k = 0; k < kb; k++) at[k] = keys[j + k];
        for (int64_t i = 0; i < of->width; i += 2 * W) {
            __m512bh asked[W];
            if (ahead && scattered) asking = of_each(ahead + j, sizeof(uint16_t) * i);
            UNROLL for (int r = 0; r < rb; r++) asked[r] = (__m512bh)_mm512_loadu_si512(query + r * of->width + i);
            UNROLL for (int k = 0; k < kb; k++) {
                __m512bh key = (__m512bh)_mm512_loadu_si512(at[k] + i);
                ask_next(&asking, sizeof key);
                UNROLL for (int r = 0; r < rb; r++)
                    sums[r * kb + k] = (vf)_mm512_dpbf16_ps((__m512)sums[r * kb + k], asked[r], key);
            }
        }
        vf found = sums_of(sums) * SPLAT(of->scale);
        UNROLL for (int r = 0; r < rb; r++) memcpy(&scores[r][j], (const float *)&found + r * kb, sizeof(float) * kb);
    }
}

// Shares of two entries side by side, as their values are taken.
INLINE void to_pairs(float (*shares)[TILE], uint32_t (*pairs)[TILE / 2], const int rb) {
    UNROLL for (int r = 0; r < rb; r++) {
        __m256bh both = _mm512_cvtneps_pbh((__m512)load_f32(shares[r]));
        memcpy(pairs[r], &both, sizeof both);
    }
}

// Where two vectors of sums have the sum of column i.
INLINE int woven(int i) { return i / 4 % 2 * W + i / 8 * 4 + i % 4; }

// out[r] += Σ_j shares[r][j] · value j, for cb vectors of columns from `from` on; as much is asked for.
INLINE void columns_of_pairs(float *out, int64_t width, int64_t from, const uint16_t *const *values, int count,
                             uint32_t (*pairs)[TILE / 2], const int rb, const int cb, struct asking *asking) {
    vf sums[W];
    UNROLL for (int r = 0; r < rb; r++)
        UNROLL for (int c = 0; c < cb; c++) sums[r * cb + c] = load_f32(out + r * width + from + c * W);
    for (int j = 0; j < count; j += 2) {
        const uint16_t *one = values[j] + from, *other = values[j + 1] + from;
        __m512bh part[W];
        UNROLL for (int c = 0; c < cb; c += 2) {
            __m512i x = _mm512_loadu_si512(one + c * W), y = _mm512_loadu_si512(other + c * W);
            part[c] = (__m512bh)_mm512_unpacklo_epi16(x, y), part[c + 1] = (__m512bh)_mm512_unpackhi_epi16(x, y);
        }
        ask_next(asking, sizeof(uint16_t) * cb * W);
        UNROLL for (int r = 0; r < rb; r++) {
            __m512bh share = (__m512bh)_mm512_set1_epi32(pairs[r][j / 2]);
            UNROLL for (int c = 0; c < cb; c++)
                sums[r * cb + c] = (vf)_mm512_dpbf16_ps((__m512)sums[r * cb + c], share, part[c]);
        }
        ask_next(asking, sizeof(uint16_t) * cb * W);
    }
    UNROLL for (int r = 0; r < rb; r++)
        UNROLL for (int c = 0; c < cb; c++) store_f32(out + r * width + from + c * W, sums[r * cb + c]);
}
#else
#define IN_PAIRS(of) 0
#define scores_of_pairs(...)
#define columns_of_pairs(...)
#define to_pairs(...) (void)0
#define woven(i) (i)
#endif
