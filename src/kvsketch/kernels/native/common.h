// What all kernels share: vectors as wide as the machine's, loads of three kinds of numbers, exp, and threads.
// Vectors are the compiler's own (GCC and clang), so that one source serves every processor.
#ifndef KVS_COMMON
#define KVS_COMMON

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define W 16  // numbers in a vector
#define INSTRUCTIONS "AVX-512"
#define SPLAT(x) ((vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x})
#elif defined(__AVX2__) && defined(__FMA__)
#define W 8
#define INSTRUCTIONS "AVX2"
#define SPLAT(x) ((vf){x, x, x, x, x, x, x, x})
#else
#define W 4
#define INSTRUCTIONS "portable"
#define SPLAT(x) ((vf){x, x, x, x})
#endif

// Whether two bfloat16 are multiplied and added up at once.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRED 1
#else
#define PAIRED 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(x) _Pragma(#x)
#define UNROLL PRAGMA(GCC unroll 16)

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef float v_half __attribute__((vector_size(2 * W)));
typedef double v_double __attribute__((vector_size(4 * W)));

enum kind { F32 = 0, BF16 = 1, F16 = 2 };

INLINE vf load_f32(const float *at) {
    vf x;
    memcpy(&x, at, sizeof x);
    return x;
}

INLINE void store_f32(float *at, vf x) { memcpy(at, &x, sizeof x); }

INLINE v_double load_double(const float *at) {
    v_half x;
    memcpy(&x, at, sizeof x);
    return __builtin_convertvector(x, v_double);
}

INLINE vf load_bf16(const uint16_t *at) {
    vh x;
    memcpy(&x, at, sizeof x);
#if W == 16
    return (vf)(((vu)_mm512_cvtepu16_epi32((__m256i)x)) << 16);
#elif W == 8
    return (vf)(((vu)_mm256_cvtepu16_epi32((__m128i)x)) << 16);
#else
    return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}

// 2 · W numbers as two vectors: those at even places, and those at odd ones. Two vectors in order cost twice as much.
INLINE void load_bf16_by_turns(const uint16_t *at, vf *to) {
    vu both;
    memcpy(&both, at, sizeof both);
    to[0] = (vf)(both << 16), to[1] = (vf)(both & 0xffff0000u);
}

#define BY_TURNS(kind, width) (W > 4 && (kind) == BF16 && (width) % (2 * W) == 0)  // whether rows are read so

INLINE float one_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

INLINE uint16_t to_bf16(float x) {  // to the nearest, ties to even; NaN stays
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float one_f16(uint16_t x) {
    _Float16 half;
    memcpy(&half, &x, 2);
    return (float)half;
}

INLINE uint16_t to_f16(float x) {
    _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

INLINE vf load_f16(const uint16_t *at) {
#if W == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif W == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    vf x;
    for (int i = 0; i < W; i++) x[i] = one_f16(at[i]);
    return x;
#endif
}

INLINE vf load(const void *from, int kind, int64_t at) {
    return kind == F32 ? load_f32((const float *)from + at)
           : kind == BF16 ? load_bf16((const uint16_t *)from + at) : load_f16((const uint16_t *)from + at);
}

INLINE float read_one(const void *from, int kind, int64_t at) {
    if (kind == F32) return ((const float *)from)[at];
    uint16_t x = ((const uint16_t *)from)[at];
    return kind == BF16 ? one_bf16(x) : one_f16(x);
}

INLINE void write_one(void *to, int kind, int64_t at, float x) {
    if (kind == F32) ((float *)to)[at] = x;
    else ((uint16_t *)to)[at] = kind == BF16 ? to_bf16(x) : to_f16(x);
}

INLINE int64_t bytes_of(int kind) { return kind == F32 ? 4 : 2; }

INLINE vf choose(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }

INLINE vf larger(vf a, vf b) {  // b, where either is NaN
#if W == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif W == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE int any_above(vf x, float least) {
#if W == 16
    return _mm512_cmp_ps_mask((__m512)x, (__m512)SPLAT(least), _CMP_GT_OQ) != 0;
#elif W == 8
    return _mm256_movemask_ps((__m256)(x > SPLAT(least))) != 0;
#else
    vi above = x > SPLAT(least);
    return (above[0] | above[1] | above[2] | above[3]) != 0;
#endif
}

// exp of numbers that are at most 88; 0 below -87, NaN of NaN. Off by one or two units in the last place.
INLINE vf exp_of(vf x) {
#if W == 16
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)x, (__m512)SPLAT(-87.0f), _CMP_NLT_UQ);
    vf whole = (vf)_mm512_roundscale_ps((__m512)(x * SPLAT(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vi none = x < SPLAT(-87.0f);
    x = choose(none, SPLAT(-87.0f), x);
    vf turns = x * SPLAT(1.44269504f) + SPLAT(12582912.0f);  // adding 1.5 · 2^23 rounds to a whole number
    vf whole = turns - SPLAT(12582912.0f);
#endif
    vf rest = x - whole * SPLAT(0.693359375f) - whole * SPLAT(-2.12194440e-4f);
    vf y = SPLAT(1.0f / 720);
    y = y * rest + SPLAT(1.0f / 120);
    y = y * rest + SPLAT(1.0f / 24);
    y = y * rest + SPLAT(1.0f / 6);
    y = y * rest + SPLAT(0.5f);
    y = y * rest + SPLAT(1.0f);
    y = y * rest + SPLAT(1.0f);
#if W == 16
    return (vf)_mm512_maskz_scalef_ps(some, (__m512)y, (__m512)whole);
#else
    vf raised = (vf)((vi)y + (((vi)turns - (vi)SPLAT(12582912.0f)) << 23));
    raised = choose(x == x, raised, x);
    return (vf)(~none & (vi)raised);
#endif
}

INLINE float sum_of(vf x) {
    float sum = 0;
    for (int i = 0; i < W; i++) sum += x[i];
    return sum;
}

// Lane i of the result is the sum of vector i.
INLINE vf sums_of(const vf *a) {
#if W == 16
    __m512 pairs[8], fours[4];
    UNROLL for (int i = 0; i < 8; i++) {
        __m512 x = (__m512)a[2 * i], y = (__m512)a[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(pairs[2 * i]), y = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
#elif W == 8
    __m256 low = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a[0], (__m256)a[1]), _mm256_hadd_ps((__m256)a[2], (__m256)a[3]));
    __m256 high = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a[4], (__m256)a[5]), _mm256_hadd_ps((__m256)a[6], (__m256)a[7]));
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
#else
    vf found;
    for (int i = 0; i < W; i++) found[i] = sum_of(a[i]);
    return found;
#endif
}

// A process that was forked has none of its parent's threads, and its runtime does not know that: it uses one thread.
// Else all threads or one: for a team smaller than the one before, the runtime ends the threads that are left over, and
// the next call, of torch perhaps, has to make them anew.
static int alone = 0;
__attribute__((unused)) static int use_threads(int64_t wanted, int64_t work) {
    return alone || wanted < 2 || work < 2 ? 1 : (int)wanted;
}

// Whether company (a team of threads) pays, for calls at every step. If another process computes too, a thread of the team
// may come late, and the others spin until it is done. Then the calling thread would be faster alone: it works alone for a
// while, and longer each time that company again does not pay. The time that it would take alone is the processor time
// spent on all parts.
#define MOST_CREDIT 2         // company may lose so many times what the parts take before it is given up
#define LEAST_CREDIT 4000000   // or so many nanoseconds
#define FIRST_PAUSE 100000000  // nanoseconds without company
#define LONGEST_PAUSE 2000000000
struct company {
    int64_t credit, pause, until;  // time it has won; how long it was given up, and until when
};
struct together {
    struct company *company;
    int64_t began, spent;  // when; processor time
    int threads;
};

INLINE int64_t time_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

INLINE int64_t peek(const int64_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
INLINE void put(int64_t *at, int64_t x) { __atomic_store_n(at, x, __ATOMIC_RELAXED); }

// Begin so many parts, with as many threads as `threads` says.
__attribute__((unused)) static struct together begin_together(struct company *company, int64_t threads, int64_t parts) {
    struct together it = {company, 0, 0, use_threads(threads, parts)};
    if (it.threads < 2) return it;
    it.began = time_of(CLOCK_MONOTONIC);
    if (it.began < peek(&company->until)) it.threads = 1;
    return it;
}

// A thread begins its parts; and it has done them.
INLINE int64_t begin_own(const struct together *it) {
    return it->threads < 2 ? 0 : time_of(CLOCK_THREAD_CPUTIME_ID);
}
INLINE void end_own(struct together *it, int64_t began) {
    if (it->threads < 2) return;
    __atomic_fetch_add(&it->spent, time_of(CLOCK_THREAD_CPUTIME_ID) - began, __ATOMIC_RELAXED);
}

// All parts are done: note what company was worth.
__attribute__((unused)) static void end_together(struct together *it) {
    if (it->threads < 2) return;
    struct company *company = it->company;
    int64_t now = time_of(CLOCK_MONOTONIC), credit = peek(&company->credit) + it->spent - (now - it->began);
    int64_t most = MOST_CREDIT * it->spent > LEAST_CREDIT ? MOST_CREDIT * it->spent : LEAST_CREDIT;
    if (credit >= most) credit = most, put(&company->pause, 0);
    if (credit < 0) {
        int64_t pause = 2 * peek(&company->pause);
        pause = pause ? pause : FIRST_PAUSE;
        pause = pause < LONGEST_PAUSE ? pause : LONGEST_PAUSE;
        put(&company->pause, pause), put(&company->until, now + pause);
        credit = 0;
    }
    put(&company->credit, credit);
}

// Memory that a thread keeps from call to call: fresh memory costs more than some of the arithmetic. It is freed when the
// thread ends.
#define KEPT 5
struct kept {
    void *memory[KEPT];
    size_t size[KEPT];
};
static pthread_key_t kept_key;
static pthread_once_t kept_once = PTHREAD_ONCE_INIT;
static int kept_by_key = 0;

static void give_back(void *of_thread) {
    struct kept *kept = of_thread;
    for (int place = 0; place < KEPT; place++) {
        free(kept->memory[place]);
        kept->memory[place] = NULL, kept->size[place] = 0;
    }
}

static void make_kept_key(void) { kept_by_key = !pthread_key_create(&kept_key, give_back); }

static int64_t pieces_left = INT64_MAX;  // by `kvs_limit_memory`; INT64_MAX: any number

// Whether a piece of memory is refused, as if there were none left: to test what a call does then.
__attribute__((unused)) static int is_refused(void) {
    if (__atomic_load_n(&pieces_left, __ATOMIC_RELAXED) == INT64_MAX) return 0;
    return __atomic_fetch_sub(&pieces_left, 1, __ATOMIC_RELAXED) <= 0;
}

// NULL: there is none left.
__attribute__((unused)) static void *kept_memory(int place, size_t bytes) {
    static _Thread_local struct kept kept;
    if (is_refused()) return NULL;
    if (kept.size[place] < bytes) {
        pthread_once(&kept_once, make_kept_key);
        if (kept_by_key) pthread_setspecific(kept_key, &kept);
        free(kept.memory[place]);
        kept.size[place] = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
        kept.memory[place] = aligned_alloc(4096, kept.size[place]);
        if (!kept.memory[place]) kept.size[place] = 0;
    }
    return kept.memory[place];
}

#endif
