// How much attention entries got from queries whose denominators are known: keys are read once, where they lie.
#include "common.h"

#define WEIGHED_AT_ONCE 1024  // entries that a thread takes
#define WEIGHED_AHEAD 64      // entries that are prefetched before they are read
#define MOST_LOG 80.0f        // of a weight: no log is above 0 by more than rounding

enum how { ADDED, LARGEST, INSTEAD };  // what an old number becomes

struct weighing {  // as kernels/native/weights.py writes it; strides count numbers
    int64_t lanes, rows, count, width, kind, key_lane, key_step, mass_lane, got_lane, got_step, how, counted;
    float scale, softcap;
};

INLINE vf weight_of(vf log) { return exp_of(choose(log > SPLAT(MOST_LOG), SPLAT(MOST_LOG), log)); }

static void scores_of_kind(const float *query, const struct shape *of, const void *const *keys, int count,
                           float (*scores)[FAR_TILE], int rb, const void *const *ahead, int scattered, int by_turns) {
#define SCORES(name, number, n) name(query, of, (const number *const *)keys, count, scores, n, ahead, scattered)
#define OF_ROWS_OF(n)                                                      \
    if (of->kind == F32) SCORES(scores_f32, float, n);                     \
    else if (of->kind == F16) SCORES(scores_f16, uint16_t, n);             \
    else if (by_turns) SCORES(scores_bf16_by_turns, uint16_t, n);          \
    else SCORES(scores_bf16, uint16_t, n);
    if (rb == 4) { OF_ROWS_OF(4) }
    else if (rb == 2) { OF_ROWS_OF(2) }
    else { OF_ROWS_OF(1) }
}

// Note how much entries from…to of a lane got from its queries; `room` is for the queries in float32.
static void weigh(const struct weighing *in, const struct shape *of, const void *queries, const char *keys,
                  const float *log_mass, const float *lse, int64_t from, int64_t to, double *got, float *room) {
    int by_turns = BY_TURNS(in->kind, in->width);
    float scores[4][FAR_TILE] = {{0}};
    read_row(queries, (int)in->kind, 0, in->rows * in->width, room);
    for (int64_t i = 0; i < in->rows * in->width; i++) room[i] *= in->scale;
    memset(room + in->rows * in->width, 0, sizeof(float) * (whole_rows(in->rows) - in->rows) * in->width);
    for (int64_t r = 0; by_turns && r < in->rows; r++) to_turns(room + r * in->width, in->width);
    for (int64_t first = from; first < to; first += TILE) {
        const void *own[TILE], *next[TILE];
        int count = (int)(to - first < TILE ? to - first : TILE), more = first + WEIGHED_AHEAD + count <= to;
        float found[TILE] = {0};
        for (int j = 0; j < TILE; j++) {
            own[j] = keys + (first + (j < count ? j : count - 1)) * in->key_step * bytes_of((int)in->kind);
            next[j] = keys + (first + WEIGHED_AHEAD + j) * in->key_step * bytes_of((int)in->kind);
        }
        for (int64_t r = 0, rb; r < in->rows; r += rb) {
            rb = rows_at_once(in->rows - r);
            scores_of_kind(room + r * in->width, of, own, count, scores, (int)rb, more && !r ? next : NULL,
                           in->key_step != in->width, by_turns);
            for (int64_t k = 0; k < rb && r + k < in->rows; k++) {
                for (int j = 0; in->softcap > 0 && j < count; j++)
                    scores[k][j] = in->softcap * tanhf(scores[k][j] / in->softcap);
                for (int j = 0; j < count; j += W) {
                    vf x = load_f32(scores[k] + j) - SPLAT(lse[r + k]);
                    if (log_mass && j + W <= count) x += load_f32(log_mass + first + j);
                    for (int i = 0; log_mass && j + W > count && j + i < count; i++) x[i] += log_mass[first + j + i];
                    vf weight = weight_of(x), before = load_f32(found + j);
                    store_f32(found + j, in->how == LARGEST ? larger(before, weight) : before + weight);
                }
            }
        }
        for (int j = 0; j < count; j++) {
            double *of_entry = got + (first + j) * in->got_step;
            if (in->how == INSTEAD || (in->how == LARGEST && found[j] > *of_entry)) *of_entry = found[j];
            else if (in->how == ADDED) *of_entry += found[j];
            if (in->counted) of_entry[1] += (double)in->rows;
        }
    }
}

// Note in got [lanes, count] how much attention entries got from queries [lanes, rows, width] with these logs of
// denominators [lanes, rows]. 0, or 1 where there is no memory left.
int kvs_weigh(const struct weighing *in, const char *queries, const char *keys, const float *log_mass, const float *lse,
              double *got, int64_t threads) {
    static struct company company = {LEAST_CREDIT, 0, 0};
    int64_t pieces = (in->count + WEIGHED_AT_ONCE - 1) / WEIGHED_AT_ONCE, all = in->lanes * pieces;
    int failed = 0, small = in->lanes * in->count * in->rows * in->width < SMALL, bytes = (int)bytes_of((int)in->kind);
    struct shape of = {.width = in->width, .value_width = in->width, .kind = (int)in->kind, .far = asks_far()};
    struct together it = begin_together(&company, threads, small ? 1 : all);
    PRAGMA(omp parallel num_threads(it.threads) reduction(|:failed) if (it.threads > 1)) {
        int64_t began = begin_own(&it);
        PRAGMA(omp for schedule(dynamic) nowait)
        for (int64_t n = 0; n < all; n++) {
            int64_t lane = n / pieces, from = n % pieces * WEIGHED_AT_ONCE;
            int64_t to = from + WEIGHED_AT_ONCE < in->count ? from + WEIGHED_AT_ONCE : in->count;
            float *room = kept_memory(2, sizeof(float) * (whole_rows(in->rows) * in->width + W));
            failed |= !room;
            if (!room) continue;
            weigh(in, &of, queries + lane * in->rows * in->width * bytes, keys + lane * in->key_lane * bytes,
                  log_mass ? log_mass + lane * in->mass_lane : NULL, lse + lane * in->rows, from, to,
                  got + lane * in->got_lane, room);
        }
        end_own(&it, began);
    }
    end_together(&it);
    return failed;
}
