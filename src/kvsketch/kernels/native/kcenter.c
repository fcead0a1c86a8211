// Greedy k-center, exactly as kernels/kcenter/reference.py defines it, several centres per pass over the points.
//
// Distances decide, and they are made in float64, rounded as in kernels/distances.py. Most pairs need none: a product
// in float32, with room for its error, says that the new centre is no nearer than the old one.
#include "common.h"
#include "rows.h"

#define CANDIDATES 64  // as many of them become centres in one pass as are certain
#define POINTS 4
#if defined(__AVX512F__) || defined(__aarch64__)
#define BESIDE 4  // vectors of centres
#else
#define BESIDE 2
#endif
#define HUGEST 1e15f  // products of larger numbers might not be finite in float32
#define UNIT 0x1p-24f  // rounding of float32

typedef struct {
    int64_t n, d, wide, chosen, wanted;
    float *points, *least;  // rows of whole vectors; what a product with a centre must exceed to be looked at
    double *norms, *far;  // far: squared, from the nearest centre; -inf for centres and for points that are not there
    int64_t *centres, *nearest;
} lane;

typedef struct {
    int64_t count, places[CANDIDATES + 1];
    double far[CANDIDATES + 1], bound;  // in falling order, of equal ones the first first; bound: no other is farther
} farthest;

typedef struct {
    int64_t count, places[CANDIDATES], first;  // first: the number of the first one in the order of choice
    float *panel, start[CANDIDATES];  // coordinate by coordinate, CANDIDATES of them
} accepted;

static double product(const float *x, const float *y, int64_t wide) {
    v_double sums[2] = {{0}, {0}};
    for (int64_t k = 0; k < wide; k += W)
        UNROLL for (int half = 0; half < 2; half++)
            sums[half] += load_double(x + k + half * (W / 2)) * load_double(y + k + half * (W / 2));
    v_double all = sums[0] + sums[1];
    double sum = 0;
    for (int i = 0; i < W / 2; i++) sum += all[i];
    return sum;
}

// As kernels/distances.py has it. volatile: nothing may be fused with the rounding to 24 bits.
static double squared_distance(const lane *x, int64_t i, int64_t j) {
    double found = x->norms[i] + x->norms[j] - 2 * product(x->points + i * x->wide, x->points + j * x->wide, x->wide);
    volatile double split = (found > 0 ? found : 0) * 536870913.0;
    double high = split;
    volatile double low = high - (found > 0 ? found : 0);
    return high - low;
}

// A product with a centre c, less |c|²/2, is above this if c is nearer than the nearest one so far, whatever float32's
// rounding did to it. That is at most (d + 3) · UNIT · (|x||c| + |c|²/2), and |x||c| is at most the mean of their squares.
static float least_product(const lane *x, int64_t i) {
    double slack = 2 * (double)(x->d + 8) * UNIT;
    return (float)((x->norms[i] - x->far[i]) / 2 - slack * x->norms[i] - 4 * UNIT * x->far[i] - 1e-30);
}

// Read the points of a lane. Returns 0 if there is a number whose products float32 might not hold.
static int read_points(lane *x, const void *from, int kind, int64_t at, int64_t row, const uint8_t *valid) {
    float largest = 0;
    for (int64_t i = 0; i < x->n; i++) {
        float *to = x->points + i * x->wide;
        memset(to, 0, sizeof(float) * (size_t)x->wide);
        x->nearest[i] = 0;
        x->far[i] = valid[i] ? INFINITY : -INFINITY;
        if (valid[i]) read_row(from, kind, at + i * row, x->d, to);
        for (int64_t k = 0; k < x->d; k++) largest = fabsf(to[k]) > largest || to[k] != to[k] ? fabsf(to[k]) : largest;
        if (!(largest <= HUGEST)) return 0;
        x->norms[i] = product(to, to, x->wide) * (1 - 1e-13);
        x->least[i] = valid[i] ? -INFINITY : INFINITY;
    }
    return 1;
}

static void find_farthest(const lane *x, farthest *found) {
    int64_t count = 0;
    for (int64_t i = 0; i < x->n; i++) {
        double far = x->far[i];
        if (far == -INFINITY || (count > CANDIDATES && far <= found->far[CANDIDATES])) continue;
        int64_t place = count > CANDIDATES ? CANDIDATES : count++;
        for (; place && found->far[place - 1] < far; place--) {
            found->far[place] = found->far[place - 1];
            found->places[place] = found->places[place - 1];
        }
        found->far[place] = far;
        found->places[place] = i;
    }
    found->bound = count > CANDIDATES ? found->far[CANDIDATES] : -INFINITY;
    found->count = count > CANDIDATES ? CANDIDATES : count;
}

// The farthest candidate, of equally far ones the first; -1 where another point might be farther, or come first.
static int64_t next_of(const farthest *found, const double *far) {
    int64_t best = 0;
    for (int64_t i = 1; i < found->count; i++)
        if (far[i] > far[best] || (far[i] == far[best] && found->places[i] < found->places[best])) best = i;
    if (!(far[best] > 0)) return -1;
    // Others that are as far as the bound come after all candidates that were so from the beginning.
    return far[best] > found->bound || (far[best] == found->bound && found->far[best] == found->bound) ? best : -1;
}

// Choose centres among the farthest points while it is certain. If there are none, all points left are at distance 0.
static void accept(lane *x, accepted *new) {
    farthest found = {0};
    double far[CANDIDATES];
    int64_t best;
    find_farthest(x, &found);
    memcpy(far, found.far, sizeof far);
    new->count = 0, new->first = x->chosen;
    while (found.count && x->chosen < x->wanted && (best = next_of(&found, far)) >= 0) {
        int64_t centre = found.places[best];
        far[best] = x->far[centre] = -INFINITY;  // it belongs to itself
        x->least[centre] = INFINITY;
        x->nearest[centre] = x->chosen;
        x->centres[x->chosen++] = centre;
        new->places[new->count++] = centre;
        for (int64_t i = 0; i < found.count; i++) {
            double distance = far[i] > 0 ? squared_distance(x, found.places[i], centre) : far[i];
            far[i] = distance < far[i] ? distance : far[i];
        }
    }
}

static void fill_panel(const lane *x, accepted *new) {
    double slack = 2 * (double)(x->d + 8) * UNIT;
    for (int64_t j = 0; j < CANDIDATES; j++) {
        int there = j < new->count;
        int64_t place = there ? new->places[j] : 0;
        new->start[j] = there ? (float)(x->norms[place] * (slack - 0.5)) : -INFINITY;
        for (int64_t k = 0; k < x->d; k++) new->panel[k * CANDIDATES + j] = there ? x->points[place * x->wide + k] : 0;
    }
}

static void compare(lane *x, int64_t i, int64_t centre, int64_t number) {
    double far = squared_distance(x, i, centre);
    if (!(far < x->far[i])) return;
    x->far[i] = far;
    x->nearest[i] = number;
    x->least[i] = least_product(x, i);
}

// Some points against some centres, which begin at `first`.
INLINE void screen(lane *x, const accepted *new, int64_t from, int64_t first, int vectors) {
    vf sums[POINTS][BESIDE];
    const float *points = x->points + from * x->wide;
    UNROLL for (int r = 0; r < POINTS; r++)
        UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = load_f32(new->start + first + v * W);
    for (int64_t k = 0; k < x->d; k++) {
        vf column[BESIDE];
        UNROLL for (int v = 0; v < vectors; v++) column[v] = load_f32(new->panel + k * CANDIDATES + first + v * W);
        UNROLL for (int r = 0; r < POINTS; r++) {
            vf one = SPLAT(points[r * x->wide + k]);
            UNROLL for (int v = 0; v < vectors; v++) sums[r][v] += one * column[v];
        }
    }
    UNROLL for (int r = 0; r < POINTS; r++) {
        vi above = {0};
        UNROLL for (int v = 0; v < vectors; v++) above |= sums[r][v] > SPLAT(x->least[from + r]);
        int64_t words[W / 2], any = 0;
        memcpy(words, &above, sizeof words);
        for (int i = 0; i < W / 2; i++) any |= words[i];
        if (!any) continue;
        float found[BESIDE * W], least = x->least[from + r];
        UNROLL for (int v = 0; v < vectors; v++) store_f32(found + v * W, sums[r][v]);
        for (int64_t j = 0; j < vectors * W; j++)
            if (found[j] > least) compare(x, from + r, new->places[first + j], new->first + first + j);
    }
}

// All points against the new centres, in the order of choice: of equally near ones the first stays.
static void look_at_all(lane *x, accepted *new) {
    fill_panel(x, new);
    for (int64_t first = 0; first < new->count; first += BESIDE * W) {
        int64_t vectors = (new->count - first + W - 1) / W;
        for (int64_t i = 0; i < x->n; i += POINTS) {
            if (vectors == 1) screen(x, new, i, first, 1);
#if BESIDE == 4
            else if (vectors == 2) screen(x, new, i, first, 2);
            else if (vectors == 3) screen(x, new, i, first, 3);
#endif
            else screen(x, new, i, first, BESIDE);
        }
    }
}

static void cluster(lane *x, accepted *new) {
    while (x->chosen < x->wanted) {
        accept(x, new);
        if (!new->count) break;
        look_at_all(x, new);
    }
    for (int64_t i = 0; i < x->n && x->chosen < x->wanted; i++)  // points that equal a centre, in their order
        if (x->far[i] == 0) {
            x->nearest[i] = x->chosen;
            x->centres[x->chosen++] = i;
        }
}

// centres[lanes, most], -1 where a lane has fewer; nearest[lanes, n] and distance[lanes, n]. Returns 1 if it cannot.
int kvs_k_center(const int64_t *about, const void *points, const uint8_t *valid, const int64_t *wanted,
                 int64_t *centres, int64_t *nearest, float *distance) {
    int64_t lanes = about[0], n = about[1], d = about[2], most = about[3], kind = about[4], threads = about[5];
    int64_t wide = padded(d, W), rows = padded(n, POINTS);
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(use_threads(threads, lanes)) reduction(| : failed)
    for (int64_t i = 0; i < lanes; i++) {
        // Memory that is not kept: it may be as large as the points.
        size_t numbers = (size_t)(rows * wide + rows + CANDIDATES * d);
        double *memory = is_refused() ? NULL : malloc(sizeof(double) * (size_t)(2 * rows) + sizeof(float) * numbers);
        if (!memory) {
            failed = 1;
            continue;
        }
        float *at = (float *)(memory + 2 * rows);
        lane x = {.n = n, .d = d, .wide = wide, .wanted = wanted[i], .norms = memory, .far = memory + rows};
        x.least = at, x.points = at + rows;
        x.centres = centres + i * most, x.nearest = nearest + i * n;
        accepted new = {.panel = at + rows + rows * wide};
        for (int64_t j = 0; j < most; j++) x.centres[j] = -1;
        for (int64_t j = n; j < rows; j++) x.least[j] = INFINITY;
        memset(x.points + n * wide, 0, sizeof(float) * (size_t)((rows - n) * wide));
        if (read_points(&x, points, (int)kind, i * about[6], about[7], valid + i * n)) cluster(&x, &new);
        else failed = 1;
        for (int64_t j = 0; j < n && !failed; j++) distance[i * n + j] = (float)sqrt(x.far[j] > 0 ? x.far[j] : 0);
        free(memory);
    }
    return failed;
}
