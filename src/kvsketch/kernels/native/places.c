// Places of lanes, see kernels/places/reference.py: their numbers, those that hold something first, or the least ones, or the
// best ones; and copies of places with given numbers, and of a few numbers of many tensors.
#include "common.h"

#define DIGIT 11  // bits that are counted together
#define DIGITS ((64 + DIGIT - 1) / DIGIT)

// The numbers of the places that hold something, in order, and then of those that do not.
void kvs_in_front(int64_t lanes, int64_t count, const int8_t *there, int64_t lane, int64_t step, int64_t *to) {
    for (int64_t own = 0; own < lanes; own++, there += lane, to += count) {
        int64_t held = 0, front = 0;
        for (int64_t i = 0; i < count; i++) held += there[i * step] != 0;
        for (int64_t i = 0; i < count; i++) to[there[i * step] ? front++ : held + i - front] = i;
    }
}

// A number's bits, in the order of size; NaN is as large as +inf.
INLINE uint64_t ordered(double x) {
    uint64_t bits;
    x = x != x ? INFINITY : x == 0 ? 0.0 : x;  // -0 is 0
    memcpy(&bits, &x, 8);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

// The largest of the `most` least of these, and how many of those that equal it are among them. It is found digit by digit:
// only numbers that have all digits so far are looked at again. `bits` is overwritten.
static uint64_t largest_kept(uint64_t *bits, int64_t count, int64_t most, int64_t *alike) {
    uint64_t known = 0;
    for (int digit = DIGITS - 1; digit >= 0; digit--) {
        int shift = digit * DIGIT;
        int64_t counts[1 << DIGIT] = {0}, left = 0;
        for (int64_t i = 0; i < count; i++) counts[bits[i] >> shift & ((1 << DIGIT) - 1)]++;
        uint64_t next = 0;
        while (most > counts[next]) most -= counts[next++];
        known |= next << shift;
        for (int64_t i = 0; i < count; i++) {
            uint64_t own = bits[i];
            bits[left] = own;
            left += (own >> shift & ((1 << DIGIT) - 1)) == next;
        }
        count = left;
    }
    *alike = most;
    return known;
}

// The places of the `most` least of these, in order and counted from `first` on; the other places after them, if `others` is
// set. Of equal ones the first are taken first. `room` is for as many as there are.
static void number_least(const uint64_t *bits, int64_t count, int64_t most, uint64_t *room, int64_t first, int others,
                         int64_t *to) {
    int64_t front = 0, alike = 0;
    memcpy(room, bits, sizeof *bits * (size_t)count);
    uint64_t largest = most ? largest_kept(room, count, most, &alike) : 0;
    for (int64_t i = 0; i < count; i++) {
        int taken = most && (bits[i] < largest || (bits[i] == largest && alike-- > 0));
        if (taken) to[front++] = first + i;
        else if (others) to[most + i - front] = first + i;
    }
}

// The places of the `most` least of every lane, in order, and then the other places. Not 0: there was no memory.
int64_t kvs_least_in_front(int64_t lanes, int64_t count, int64_t most, const double *x, int64_t threads, int64_t *to) {
    int64_t failed = 0;
    PRAGMA(omp parallel for num_threads(use_threads(threads, lanes)) schedule(static) reduction(|:failed) \
           if (use_threads(threads, lanes) > 1))
    for (int64_t lane = 0; lane < lanes; lane++) {
        uint64_t *bits = kept_memory(0, 2 * sizeof *bits * (size_t)count);
        failed |= !bits;
        if (!bits) continue;
        for (int64_t i = 0; i < count; i++) bits[i] = ordered(x[lane * count + i]);
        number_least(bits, count, most, bits + count, 0, 1, to + lane * count);
    }
    return failed;
}

// The places of the `rooms[part]` largest scores in every part of a lane, in order; a part is the next `counts[part]` places
// from `first` on. Scores are compared as kernels/distances.py rounds them; `split` says to how many bits. volatile: nothing
// may be fused with the rounding. Not 0: there was no memory.
int64_t kvs_best(const int64_t *about, const double *x, double split, int64_t *to) {
    int64_t lanes = about[0], row = about[1], first = about[2], threads = about[3], parts = about[4], failed = 0;
    const int64_t *counts = about + 5, *rooms = counts + parts;
    int64_t most = 0, all = 0;
    for (int64_t part = 0; part < parts; part++) most = counts[part] > most ? counts[part] : most, all += rooms[part];
    PRAGMA(omp parallel for num_threads(use_threads(threads, lanes)) schedule(static) reduction(|:failed) \
           if (use_threads(threads, lanes) > 1))
    for (int64_t lane = 0; lane < lanes; lane++) {
        uint64_t *bits = kept_memory(0, 2 * sizeof *bits * (size_t)most);
        failed |= !bits;
        if (!bits) continue;
        int64_t at = first, *own = to + lane * all;
        for (int64_t part = 0; part < parts; own += rooms[part], at += counts[part], part++) {
            for (int64_t i = 0; i < counts[part]; i++) {
                double score = x[lane * row + at + i];
                volatile double high = score * split;
                volatile double low = high - score;
                bits[i] = ordered(-(high - low));
            }
            number_least(bits, counts[part], rooms[part], bits + most, at, 0, own);
        }
    }
    return failed;
}

#define COPIED 65536  // bytes that a thread takes

// Copy the places that `index` [lanes, wanted] numbers out of several tensors. `about` has the strides of lanes and places
// and the length of a place of each, in bytes; `of` where tensors are and where the copies go. Not 0: there is no such place.
int64_t kvs_copy_places(const int64_t *about, const int64_t *index, void *const *of) {
    int64_t lanes = about[0], wanted = about[1], there = about[2], threads = about[3], tensors = about[4], bytes = 0, wrong = 0;
    const int64_t *steps = about + 5;
    for (int64_t x = 0; x < tensors; x++) bytes += steps[3 * x + 2];
    int64_t at_once = COPIED / (bytes + 1) + 1, pieces = (wanted + at_once - 1) / at_once;
    for (int64_t i = 0; i < lanes * wanted; i++) wrong |= index[i] < 0 || index[i] >= there;
    if (wrong) return 1;
    PRAGMA(omp parallel for num_threads(use_threads(threads, lanes * pieces)) schedule(static) \
           if (use_threads(threads, lanes * pieces) > 1))
    for (int64_t piece = 0; piece < lanes * pieces; piece++) {
        int64_t lane = piece / pieces, start = piece % pieces * at_once;
        int64_t stop = start + at_once < wanted ? start + at_once : wanted;
        for (int64_t x = 0; x < tensors; x++) {
            int64_t place = steps[3 * x + 1], width = steps[3 * x + 2];
            if (!width) continue;
            const char *from = (const char *)of[2 * x] + lane * steps[3 * x];
            char *to = (char *)of[2 * x + 1] + lane * wanted * width;
            for (int64_t i = start; i < stop; i++)
                memcpy(to + i * width, from + index[lane * wanted + i] * place, (size_t)width);
        }
    }
    return 0;
}

#define ALONE 262144  // bytes: moving fewer takes no second thread

// Which places are put aside before any moves, since their numbers are not above all before them. Returns how many, or -1 if
// a number is not among the `held` places and the `more` after them.
static int64_t out_of_order(const int64_t *index, int64_t kept, int64_t held, int64_t more, uint8_t *aside) {
    int64_t most = -1, count = 0;
    for (int64_t i = 0; i < kept; i++) {
        if (index[i] < 0 || index[i] >= held + more) return -1;
        int here = index[i] < held, out = here && index[i] <= most;
        if (aside) aside[i] = (uint8_t)out;
        if (here && !out) most = index[i];
        count += out;
    }
    return count;
}

// Move a run of places within a tensor; from and to may overlap.
static void move_run(char *lane, int64_t place, int64_t width, int64_t to, int64_t from, int64_t run) {
    if (place == width) {
        memmove(lane + to * place, lane + from * place, (size_t)(run * width));
        return;
    }
    for (int64_t k = 0; k < run; k++) {
        int64_t at = to < from ? k : run - 1 - k;
        memcpy(lane + (to + at) * place, lane + (from + at) * place, (size_t)width);
    }
}

// Move the places of one lane of a tensor; except for those that are put aside, numbers grow. Places that move towards the
// front move first, from the first on, then those that move back, from the last on: nothing is overwritten before it is read.
static void keep_own(const int64_t *own, const uint8_t *aside, int64_t kept, int64_t held, char *saved, char *to,
                     const char *from, const int64_t *step) {
    int64_t place = step[1], width = step[4];
    if (!width) return;
    for (int64_t i = 0, n = 0; i < kept; i++)
        if (aside[i]) memcpy(saved + n++ * width, to + own[i] * place, (size_t)width);
    for (int64_t i = 0, run; i < kept; i += run) {
        run = 1;
        if (aside[i] || own[i] >= held || own[i] <= i) continue;
        while (i + run < kept && own[i + run] == own[i] + run && own[i + run] < held) run++;
        move_run(to, place, width, i, own[i], run);
    }
    for (int64_t i = kept - 1, run; i >= 0; i -= run) {
        run = 1;
        if (aside[i] || own[i] >= i) continue;
        while (run <= i && own[i - run] == own[i] - run && !aside[i - run]) run++;
        move_run(to, place, width, i - run + 1, own[i] - run + 1, run);
    }
    for (int64_t i = 0, n = 0; i < kept; i++) {
        if (aside[i]) memcpy(to + i * place, saved + n++ * width, (size_t)width);
        else if (own[i] >= held) memcpy(to + i * place, from + (own[i] - held) * step[3], (size_t)width);
    }
}

// Move to the front, in several tensors, the places that `index` [lanes, kept] numbers; numbers count the `held` places there
// and then new ones. `about` has for each tensor the strides of lanes and places, in it and in the new ones, and the length
// of a place, in bytes. Not 0: there is no such place, or no memory, and nothing has moved.
int64_t kvs_keep_in_place(const int64_t *about, const int64_t *index, void *const *of) {
    int64_t lanes = about[0], kept = about[1], held = about[2], more = about[3], threads = about[4], tensors = about[5];
    const int64_t *each = about + 6;
    int64_t bytes = 0, widest = 0, most = 0;
    for (int64_t x = 0; x < tensors; x++) {
        bytes += each[5 * x + 4];
        widest = each[5 * x + 4] > widest ? each[5 * x + 4] : widest;
    }
    for (int64_t lane = 0; lane < lanes; lane++) {
        int64_t count = out_of_order(index + lane * kept, kept, held, more, NULL);
        if (count < 0) return 1;
        most = count > most ? count : most;
    }
    int team = use_threads(threads, lanes * kept * bytes < ALONE ? 1 : lanes);
    size_t own_bytes = (size_t)(kept + most * widest);
    char *memory = is_refused() ? NULL : malloc(own_bytes * (size_t)team + 1);
    if (!memory) return 1;
    PRAGMA(omp parallel for num_threads(team) schedule(static) if (team > 1))
    for (int part = 0; part < team; part++) {
        uint8_t *aside = (uint8_t *)memory + own_bytes * (size_t)part;
        for (int64_t lane = part; lane < lanes; lane += team) {
            const int64_t *own = index + lane * kept;
            out_of_order(own, kept, held, more, aside);
            for (int64_t x = 0; x < tensors; x++) {
                const int64_t *step = each + 5 * x;
                char *to = (char *)of[2 * x] + lane * step[0];
                const char *from = (const char *)of[2 * x + 1] + lane * step[2];
                keep_own(own, aside, kept, held, (char *)aside + kept, to, from, step);
            }
        }
    }
    free(memory);
    return 0;
}

// Close the gap between two places in several tensors. `about` has for each how many runs of places it has, how far these lie
// apart and how long a place is, in bytes, and how many places are in use.
void kvs_close_gap(const int64_t *about, void *const *of) {
    int64_t start = about[0], stop = about[1], threads = about[2], tensors = about[3];
    for (int64_t x = 0; x < tensors; x++) {
        const int64_t *own = about + 4 + 4 * x;
        int64_t runs = own[0], place = own[2];
        size_t moved = (size_t)((own[3] - stop) * place);
        int team = use_threads(threads, runs * (int64_t)moved < ALONE ? 1 : runs);
        PRAGMA(omp parallel for num_threads(team) schedule(static) if (team > 1))
        for (int64_t run = 0; run < runs; run++) {
            char *at = (char *)of[x] + run * own[1];
            memmove(at + start * place, at + stop * place, moved);
        }
    }
}

// A few numbers of many tensors, one after another: those at `parts` of a tensor, counted from 0 up to as many parts as there
// are, or all where it has no more. `about` has for each tensor how many numbers it has and how many bytes each takes.
void kvs_few_of_each(const int64_t *about, const double *parts, const void *const *from, char *to) {
    int64_t tensors = about[0], wanted = about[1];
    for (int64_t x = 0; x < tensors; x++) {
        int64_t count = about[2 + 2 * x], size = about[3 + 2 * x];
        const char *own = from[x];
        if (count <= wanted) {
            if (count) memcpy(to, own, (size_t)(count * size));
            to += count * size;
            continue;
        }
        double step = (double)count / (double)wanted;
        for (int64_t i = 0; i < wanted; i++, to += size) memcpy(to, own + (int64_t)(parts[i] * step) * size, (size_t)size);
    }
}
