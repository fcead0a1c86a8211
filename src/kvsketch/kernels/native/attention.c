// Attention over weighted entries where they lie: several sources in one call, each a set of lanes.
//
// A lane is a KV head of a row of the batch. A source has entries for some lanes. Queries read all of them, or runs of
// neighbours (segments), different ones for every query, which are given or still to be chosen (`choice.c`). Queries of a
// group are answered together, so that a key is read once for all of them. The entries of a lane are cut into pieces, which
// threads take as they come; the results of pieces are merged in a fixed order, so that the answer depends neither on the
// number of threads nor on their order.
#include "processor.h"
#include "rows.h"

#define TILE 16          // entries; two tiles lie in the first cache
#define FAR_TILE 64      // or so many, where the next tile is prefetched into the second one; a multiple of W
#define PIECE 1024       // entries, or more where a lane has many
#define FAR_PIECE 4096   // or up to so many, see `piece_of`
#define MANY_PIECES 32   // of all lanes together: enough for threads to share
#define MOST_PIECES 64   // of a lane
#define NOWHERE -1e30f   // the largest logit of no entries
#define LEAST_MASS 1e-19f
#define MASSES (3 * W)   // what shares sum up to; in products of pairs also those of values, as meant and as rounded
#define SMALL (1 << 18)  // multiplications that are not worth a second thread

struct shape {  // of a call, as kernels/native/attention.py writes it, and what follows from that
    int64_t rows, heads, group, queries, key_width, value_width_given;
    int64_t width, value_width;  // rounded up to whole vectors
    int64_t query_row, query_head, query_step;
    int kind;
    float scale, softcap;
    int tile, far;  // entries of a tile; whether the next one is prefetched into the second cache
};

struct source {  // as kernels/native/attention.py writes it; strides count numbers, not bytes
    const char *keys, *values;
    const float *log_mass, *log_value;
    const int64_t *lanes, *begin, *length;  // NULL: all lanes in order; all entries
    int64_t rows, heads, count, segments, by_query;
    int64_t key_row, key_head, key_step, value_row, value_head, value_step;
    int64_t mass_row, mass_head, extra_row, extra_head, kind;  // kind: of keys and values; that of queries may be another
    const struct choice *choice;  // NULL, or what chooses the runs
};

struct tile {
    int count;
    const void *keys[FAR_TILE], *values[FAR_TILE];  // in a tile that is read, the last one is repeated up to the end
    float log_mass[FAR_TILE], log_value[FAR_TILE];
    int weighted, apart;  // whether there are weights, and whether values have weights of their own
    int scattered;        // whether its rows do not follow one another in memory
};

struct sums {  // of queries that are answered together
    float *most, *mass, *out;  // mass: vectors for each, see MASSES, to be added up; one number once a piece is done
};

struct piece {
    int64_t source, lane, query, from, to;  // lane of the source; query: the first one
    int64_t target, asked;                  // lane of the batch; how many queries
    int64_t rows, whole;                    // of the group; with the padding row, see `whole_rows`
    struct sums sums;
};

// Prefetch these bytes, into the first cache: from the second one all that is read would be asked for once more, and a
// processor that has asked memory for as much as it can would wait. Some processors can ask for few lines into the first
// cache, and for many into the second: see `asks_far`.
INLINE void ask_for(const void *at, int64_t bytes, int far) {
    if (far)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)at + i, 0, 2);
    else
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)at + i, 0, 3);
}

// What is prefetched, a line at a time, beside what is read: a processor waits once it has asked for a number of lines.
// Rows that follow one another are asked for in that order, in which the processor foresees the next line; of scattered
// rows, where it would bring lines that nobody reads, one line of each is asked for.
struct asking {
    const char *next;         // NULL: go by rows
    const void *const *rows;  // what lies at `at` of each; NULL: nothing
    int64_t at;               // bytes
    int far;
};
INLINE struct asking from_first(const void *const *rows, int far) {
    return (struct asking){rows ? *rows : NULL, NULL, 0, far};
}
INLINE struct asking of_each(const void *const *rows, int64_t at, int far) { return (struct asking){NULL, rows, at, far}; }
INLINE void ask_next(struct asking *asking, int64_t bytes) {
    if (asking->next) ask_for(asking->next, bytes, asking->far), asking->next += bytes;
    else if (asking->rows) ask_for((const char *)*asking->rows++ + asking->at, bytes, asking->far);
}

// Rows are answered by four, two or one. Four take less time than two and one more, so a padding row makes three into
// four: whoever uses `rows_at_once` needs room for `whole_rows`.
INLINE int64_t whole_rows(int64_t rows) { return rows % 4 == 3 ? rows + 1 : rows; }
INLINE int rows_at_once(int64_t left) { return left > 2 ? 4 : (int)left; }

INLINE struct sums behind(struct sums sums, int64_t rows, const struct shape *of) {
    return (struct sums){sums.most + rows, sums.mass + rows * MASSES, sums.out + rows * of->value_width};
}

INLINE float largest_above(vf x, float least) {
    for (int i = 0; i < W; i++) least = x[i] > least ? x[i] : least;
    return least;
}

// There is a larger logit among these: scale down what was summed up so far.
static __attribute__((noinline)) void reach(vf top, const struct shape *of, float *most, float *mass, float *out) {
    float largest = largest_above(top, *most);
    float less = *most == NOWHERE ? 0.0f : expf(*most - largest);
    for (int64_t i = 0; i < MASSES; i += W) store_f32(mass + i, load_f32(mass + i) * SPLAT(less));
    for (int64_t i = 0; i < of->value_width; i += W) store_f32(out + i, load_f32(out + i) * SPLAT(less));
    *most = largest;
}

// Logits of a tile become shares of its values, relative to the largest so far; mass is their sum. After the tile's last
// entry shares are 0.
INLINE void to_shares(float (*scores)[FAR_TILE], const struct tile *tile, const struct shape *of, struct sums sums,
                      const int rb) {
    const int weighted = tile->weighted, apart = tile->apart, whole = (int)padded(tile->count, W);
    if (of->softcap > 0)
        for (int r = 0; r < rb; r++)
            for (int j = 0; j < tile->count; j++) scores[r][j] = of->softcap * tanhf(scores[r][j] / of->softcap);
    for (int r = 0; r < rb; r++)
        for (int j = tile->count; j < whole; j++) scores[r][j] = -INFINITY;
    UNROLL for (int r = 0; r < rb; r++) {
        float *logits = scores[r], *most = sums.most + r, *mass = sums.mass + r * MASSES;
        vf top = SPLAT(*most);
        for (int j = 0; j < whole; j += W) {
            vf x = load_f32(logits + j);
            top = larger(weighted ? x + load_f32(tile->log_mass + j) : x, top);
            if (apart) top = larger(x + load_f32(tile->log_value + j), top);
        }
        if (any_above(top, *most)) reach(top, of, most, mass, sums.out + r * of->value_width);
        vf sum = load_f32(mass);
        for (int j = 0; j < whole; j += W) {
            vf x = load_f32(logits + j) - SPLAT(*most);
            vf share = exp_of(weighted ? x + load_f32(tile->log_mass + j) : x);
            sum += share;
            store_f32(logits + j, apart ? exp_of(x + load_f32(tile->log_value + j)) : share);
        }
        store_f32(mass, sum);
    }
}

#include "pairs.inc"

#define KIND f32
#define NUMBER float
#define LOAD(at, to) *(to) = load_f32(at)
#define VECTORS 1
#define PAIRS 0
#include "tile.inc"
#define KIND bf16
#define NUMBER uint16_t
#define LOAD(at, to) *(to) = load_bf16(at)
#define VECTORS 1
#define PAIRS 1
#include "tile.inc"
#if W > 4
#define KIND bf16_by_turns
#define NUMBER uint16_t
#define LOAD(at, to) load_bf16_by_turns(at, to)
#define VECTORS 2
#define PAIRS 2
#include "tile.inc"
#else  // registers have no room for two vectors of each of four queries
#define answer_tile_bf16_by_turns answer_tile_bf16
#define scores_bf16_by_turns scores_bf16
#endif
#define KIND f16
#define NUMBER uint16_t
#define LOAD(at, to) *(to) = load_f16(at)
#define VECTORS 1
#define PAIRS 0
#include "tile.inc"

// Of every 2 · W numbers those at even places first, as `load_bf16_by_turns` has them.
INLINE int turned(int i) { return i % 2 * W + i / 2; }

static void to_turns(float *row, int64_t count) {
    for (float *at = row; at < row + count; at += 2 * W) {
        float own[2 * W];
        for (int i = 0; i < 2 * W; i++) own[turned(i)] = at[i];
        memcpy(at, own, sizeof own);
    }
}

// The divisor of sums of values, and the log of the denominator, if shares relative to the largest logit add up to `mass`.
INLINE float under(float mass) { return mass == 0 ? 1.0f : mass < LEAST_MASS ? LEAST_MASS : mass; }
INLINE float log_of_all(float mass, float most) { return mass == 0 ? -INFINITY : most + logf(mass); }

// Finish the sums of a piece's row: columns in their order, and what rounding took from all shares given back.
static void settle(float *row, int64_t count, const float *mass, int in_pairs) {
    float meant = in_pairs ? sum_of(load_f32(mass + W)) : 1, rounded = in_pairs ? sum_of(load_f32(mass + 2 * W)) : 1;
    float share = rounded > 0 && meant < INFINITY ? meant / rounded : 1;
    for (float *at = row; at < row + count; at += 2 * W) {
        vf low = load_f32(at) * SPLAT(share), high = load_f32(at + W) * SPLAT(share);
        store_f32(at, in_pairs ? IN_TURNS(low, high, FIRST_WOVEN) : IN_TURNS(low, high, FIRST));
        store_f32(at + W, in_pairs ? IN_TURNS(low, high, SECOND_WOVEN) : IN_TURNS(low, high, SECOND));
    }
}

// Numbers of an entry as whole vectors of float32.
INLINE void widen(float *to, const void *from, int kind, int64_t count, int64_t whole) {
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        vf x = kind == F32 ? load_f32((const float *)from + i)
               : kind == BF16 ? load_bf16((const uint16_t *)from + i) : load_f16((const uint16_t *)from + i);
        store_f32(to + i, x);
    }
    for (; i < count; i++) to[i] = read_one(from, kind, i);
    for (; i < whole; i++) to[i] = 0;
}

// What a thread works on: queries, and two tiles, one that is filled while the other's entries are on their way.
struct work {
    const struct shape *of;
    struct sums sums;
    int rows, kind;
    int widened, by_turns;   // entries are copied to whole vectors of float32; or read by turns, as queries are then
    const float *query;      // times the scale
    const uint16_t *halves;  // as they came, where products of pairs take them; else NULL
    float *room;             // for a tile as whole vectors of float32
    struct tile tiles[2], *filling, *ready;
};

// Repeat the last entry up to the end, where it has no share: so code that reads by four, or prefetches what comes, need not
// know how many there are.
static void repeat_last(struct tile *tile, const struct shape *of) {
    for (int j = tile->count; j < of->tile; j++) {
        tile->keys[j] = tile->keys[j - 1], tile->values[j] = tile->values[j - 1];
        tile->log_mass[j] = tile->log_value[j] = 0;
    }
}

// Answer the tile that is ready; the one that was filled is next.
static void turn(struct work *work) {
    struct tile *tile = work->ready, *next = work->filling;
    const struct shape *of = work->of;
    int kind = work->kind;
    if (next->count) repeat_last(next, of);
    if (work->widened && tile->count) {
        for (int j = 0; j < tile->count; j++) {
            float *key = work->room + j * (of->width + of->value_width), *value = key + of->width;
            widen(key, tile->keys[j], kind, of->key_width, of->width);
            widen(value, tile->values[j], kind, of->value_width_given, of->value_width);
            tile->keys[j] = key, tile->values[j] = value;
        }
        repeat_last(tile, of);
        kind = F32;
    }
    if (!tile->count) {}
    else if (kind == F32) answer_tile_f32(work->query, NULL, of, tile, next, work->sums, work->rows);
    else if (work->by_turns) answer_tile_bf16_by_turns(work->query, work->halves, of, tile, next, work->sums, work->rows);
    else if (kind == BF16) answer_tile_bf16(work->query, work->halves, of, tile, next, work->sums, work->rows);
    else answer_tile_f16(work->query, NULL, of, tile, next, work->sums, work->rows);
    tile->count = 0;
    work->ready = next, work->filling = tile;
}

// Take the entries from…to of one lane; empty slots, as their weights show, are left out.
static void take_entries(struct work *work, const struct source *in, int64_t lane, int64_t from, int64_t to) {
    const struct shape *of = work->of;
    int64_t row = lane / in->heads, head = lane % in->heads, bytes = bytes_of(work->kind);
    const char *keys = in->keys + (row * in->key_row + head * in->key_head) * bytes;
    const char *values = in->values + (row * in->value_row + head * in->value_head) * bytes;
    const float *mass = in->log_mass ? in->log_mass + row * in->mass_row + head * in->mass_head : NULL;
    const float *extra = in->log_value ? in->log_value + row * in->extra_row + head * in->extra_head : NULL;
    while (from < to) {
        struct tile *tile = work->filling;
        const char *key = keys + from * in->key_step * bytes, *value = values + from * in->value_step * bytes;
        int64_t count = tile->count, more = to - from < of->tile - count ? to - from : of->tile - count;
        for (int64_t i = 0; i < more; i++) {
            tile->keys[count] = key + i * in->key_step * bytes;
            tile->values[count] = value + i * in->value_step * bytes;
            if (tile->weighted) {
                tile->log_mass[count] = mass ? mass[from + i] : 0.0f;
                if (extra) tile->log_value[count] = extra[from + i];
                if (tile->log_mass[count] == -INFINITY && (!extra || extra[from + i] == -INFINITY)) continue;
            }
            count++;
        }
        // While the first tile is filled, nothing is read beside which it could be prefetched.
        for (int64_t i = tile->count; !work->ready->count && i < count; i++)
            ask_for(tile->keys[i], of->key_width * bytes, of->far),
                ask_for(tile->values[i], of->value_width_given * bytes, of->far);
        from += more;
        tile->count = (int)count;
        if (count == of->tile) turn(work);
    }
}

// Where a lane's list of runs begins: each query has its own, or all have one.
INLINE int64_t list_of(const struct source *in, int64_t lane, int64_t query) {
    return (lane * in->by_query + (in->by_query > 1 ? query : 0)) * in->segments;
}

// Copy the queries of a piece one after another, in groups: row r is query r % asked of head r / asked.
static void widen_queries(const struct shape *of, const void *queries, const struct piece *piece, float *to,
                          uint16_t *halves) {
    int64_t row = piece->target / of->heads, head = piece->target % of->heads;
    for (int64_t r = 0; r < piece->rows; r++) {
        int64_t at = row * of->query_row + (head * of->group + r / piece->asked) * of->query_head +
                     (piece->query + r % piece->asked) * of->query_step;
        widen(to + r * of->width, (const char *)queries + at * bytes_of(of->kind), of->kind, of->key_width, of->width);
        for (int64_t i = 0; i < of->width; i++) to[r * of->width + i] *= of->scale;
        if (halves) memcpy(halves + r * of->width, (const uint16_t *)queries + at, sizeof(uint16_t) * of->width);
    }
    int64_t nobodys = piece->whole - piece->rows;
    memset(to + piece->rows * of->width, 0, sizeof(float) * nobodys * of->width);
    if (halves) memset(halves + piece->rows * of->width, 0, sizeof(uint16_t) * nobodys * of->width);
}

static void work_off(const struct shape *of, const void *queries, const struct source *in, const struct piece *piece,
                     float *room) {
    float *masses = room + piece->whole * of->width, *tile = masses + piece->whole * MASSES;
    uint16_t *halves = IN_PAIRS(of) ? (uint16_t *)(tile + of->tile * (of->width + of->value_width)) : NULL;
    int widened = of->width != of->key_width || of->value_width != of->value_width_given;
    int scattered = in->begin || in->key_step != of->key_width || in->value_step != of->value_width_given;
    int by_turns = !widened && BY_TURNS(in->kind, of->width) && BY_TURNS(in->kind, of->value_width);
    struct work work = {
        of, {piece->sums.most, masses, piece->sums.out}, (int)piece->whole, (int)in->kind, widened, by_turns, room, halves,
        tile, {{0}}, NULL, NULL};
    work.filling = work.tiles, work.ready = work.tiles + 1;
    for (int i = 0; i < 2; i++) {
        work.tiles[i].weighted = in->log_mass || in->log_value;
        work.tiles[i].apart = in->log_value != NULL;
        work.tiles[i].scattered = scattered;
    }
    widen_queries(of, queries, piece, room, halves);
    for (int64_t r = 0; by_turns && r < piece->rows; r++) to_turns(room + r * of->width, of->width);
    for (int64_t r = 0; r < piece->whole; r++) piece->sums.most[r] = NOWHERE;
    memset(masses, 0, sizeof(float) * piece->whole * MASSES);
    memset(piece->sums.out, 0, sizeof(float) * piece->whole * of->value_width);
    int64_t seen = 0, first = list_of(in, piece->lane, piece->query);
    if (!in->begin) take_entries(&work, in, piece->lane, piece->from, piece->to);
    for (int64_t s = first; in->begin && s < first + in->segments && seen < piece->to; seen += in->length[s++]) {
        int64_t from = piece->from > seen ? piece->from - seen : 0, to = piece->to - seen;
        to = to > in->length[s] ? in->length[s] : to;
        take_entries(&work, in, piece->lane, in->begin[s] + from, in->begin[s] + to);
    }
    turn(&work);
    turn(&work);
    for (int64_t r = 0; r < piece->rows; r++) {
        const float *mass = masses + r * MASSES;
        piece->sums.mass[r] = sum_of(load_f32(mass));
        if (by_turns) settle(piece->sums.out + r * of->value_width, of->value_width, mass, halves != NULL);
    }
}

// How many entries a lane's query reads.
static int64_t entries_of(const struct source *in, int64_t lane, int64_t query) {
    if (!in->begin) return in->count;
    const int64_t *length = in->length + list_of(in, lane, query);
    int64_t all = 0;
    for (int64_t s = 0; s < in->segments; s++) all += length[s];
    return all;
}

// How many entries a piece has. Whoever begins one waits for its first tile: so where tiles are long, pieces are too, if all
// lanes together have enough entries. It depends on lengths alone.
static int64_t piece_of(const struct shape *of, const struct source *sources, int64_t count) {
    int64_t all = 0;
    for (int64_t n = 0; of->far && n < count; n++)
        for (int64_t lane = 0; lane < sources[n].rows * sources[n].heads; lane++)
            for (int64_t query = 0; query < (sources[n].begin ? of->queries : 1); query++)
                all += entries_of(sources + n, lane, query);
    all /= MANY_PIECES;
    return all < PIECE ? PIECE : all < FAR_PIECE ? all : FAR_PIECE;
}

// Cut all that lanes' queries read into pieces of at most `most` entries (more where a lane has MOST_PIECES). Without
// `pieces` they are only counted.
static int64_t cut(const struct shape *of, const struct source *sources, int64_t count, int64_t most, struct piece *pieces,
                   int64_t *numbers, int64_t *work) {
    int64_t found = 0;
    *numbers = *work = 0;
    for (int64_t n = 0; n < count; n++) {
        const struct source *in = sources + n;
        int64_t blocks = in->begin ? of->queries : 1, asked = in->begin ? 1 : of->queries;
        for (int64_t lane = 0; lane < in->rows * in->heads; lane++)
            for (int64_t query = 0; query < blocks; query++) {
                int64_t all = entries_of(in, lane, query), parts = (all + most - 1) / most;
                parts = parts < 1 ? 1 : parts < MOST_PIECES ? parts : MOST_PIECES;
                int64_t size = (all + parts - 1) / parts;
                for (int64_t from = 0; from < all; from += size, found++) {
                    int64_t rows = of->group * asked, whole = whole_rows(rows);
                    if (pieces) pieces[found] = (struct piece){n, lane, query, from, from + size < all ? from + size : all,
                                                               in->lanes ? in->lanes[lane] : lane, asked, rows, whole, {0}};
                    *numbers += whole * (of->value_width + 2);
                }
                *work += all * of->group * asked;
            }
    }
    return found;
}

// Merge the sums of all pieces, relative to each row's largest logit, and write the answers.
static void finish(const struct shape *of, const struct piece *pieces, int64_t count, float *most, void *out, float *lse,
                   float *room) {
    int64_t rows = of->rows * of->heads * of->group * of->queries;
    float *mass = lse, *sums = room;  // lse holds the masses until it is known
    for (int64_t i = 0; i < rows; i++) most[i] = NOWHERE, mass[i] = 0;
    memset(sums, 0, sizeof(float) * rows * of->value_width);
    for (int pass = 0; pass < 2; pass++)
        for (const struct piece *one = pieces; one < pieces + count; one++)
            for (int64_t r = 0; r < one->rows; r++) {
                int64_t at = (one->target * of->group + r / one->asked) * of->queries + one->query + r % one->asked;
                if (!pass) {
                    most[at] = one->sums.most[r] > most[at] ? one->sums.most[r] : most[at];
                    continue;
                }
                if (one->sums.most[r] == NOWHERE && !(one->sums.mass[r] != one->sums.mass[r])) continue;
                float share = expf(one->sums.most[r] - most[at]);
                mass[at] += share * one->sums.mass[r];
                const float *from = one->sums.out + r * of->value_width;
                float *to = sums + at * of->value_width;
                for (int64_t i = 0; i < of->value_width; i += W)
                    store_f32(to + i, load_f32(to + i) + SPLAT(share) * load_f32(from + i));
            }
    for (int64_t at = 0; at < rows; at++) {
        float all = under(mass[at]);
        for (int64_t i = 0; i < of->value_width_given; i++)
            write_one(out, of->kind, at * of->value_width_given + i, sums[at * of->value_width + i] / all);
        lse[at] = log_of_all(mass[at], most[at]);
    }
}

// The sources, with the runs chosen that were still to be. NULL: there is no memory left.
static const struct source *with_runs(const struct source *given, int64_t count, int64_t threads) {
    int64_t numbers = 0;
    for (int64_t n = 0; n < count; n++)
        if (given[n].choice) numbers += 2 * given[n].choice->lanes * given[n].choice->queries * runs_of(given[n].choice);
    if (!numbers) return given;
    struct source *sources = kept_memory(4, sizeof(struct source) * count + sizeof(int64_t) * numbers);
    if (!sources) return NULL;
    memcpy(sources, given, sizeof(struct source) * count);
    int64_t *next = (int64_t *)(sources + count);
    for (struct source *in = sources; in < sources + count; in++) {
        if (!in->choice) continue;
        int64_t half = in->choice->lanes * in->choice->queries * runs_of(in->choice);
        if (kvs_visit(in->choice, next, next + half, threads)) return NULL;
        in->begin = next, in->length = next + half;
        in->segments = runs_of(in->choice), in->by_query = in->choice->queries;
        next += 2 * half;
    }
    return sources;
}

// 0, or 1 where there is no memory left.
int kvs_attend(const struct shape *given, const struct source *in, int64_t count, const void *queries, void *out,
               float *lse, int64_t threads) {
    const struct source *sources = with_runs(in, count, threads);
    if (!sources) return 1;
    struct shape of = *given;
    of.width = padded(of.key_width, W), of.value_width = padded(of.value_width_given, W);
    of.far = asks_far(), of.tile = of.far ? FAR_TILE : TILE;
    int64_t numbers, work, rows = of.rows * of.heads * of.group * of.queries, most = piece_of(&of, sources, count);
    int64_t found = cut(&of, sources, count, most, NULL, &numbers, &work);
    numbers += rows * (of.value_width + 1);
    struct piece *pieces = kept_memory(0, sizeof(struct piece) * (found + 1));
    float *room = kept_memory(1, sizeof(float) * (numbers + 1));
    if (!pieces || !room) return 1;
    cut(&of, sources, count, most, pieces, &numbers, &work);
    float *next = room + rows * (of.value_width + 1);
    for (int64_t i = 0; i < found; i++) {
        int64_t own = pieces[i].whole;
        pieces[i].sums = (struct sums){next, next + own, next + 2 * own};
        next += own * (of.value_width + 2);
    }
    static struct company company = {LEAST_CREDIT, 0, 0};
    int failed = 0, small = work * (of.width + of.value_width) < SMALL;
    struct together it = begin_together(&company, threads, small ? 1 : found);
    int64_t most_rows = whole_rows(of.group * of.queries);
    size_t scratch = sizeof(float) * ((of.width + of.value_width) * of.tile + (2 * of.width + MASSES) * most_rows);
    PRAGMA(omp parallel num_threads(it.threads) reduction(|:failed) if (it.threads > 1)) {
        int64_t began = begin_own(&it);
        PRAGMA(omp for schedule(dynamic) nowait)
        for (int64_t i = 0; i < found; i++) {
            float *own = kept_memory(2, scratch);
            if (own) work_off(&of, queries, sources + pieces[i].source, pieces + i, own);
            else failed = 1;
        }
        end_own(&it, began);
    }
    end_together(&it);
    if (!failed) finish(&of, pieces, found, room, out, lse, room + rows);
    return failed;
}
