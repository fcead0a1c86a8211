// Numbers of places, see kernels/places/reference.py: those that hold something first, or the least ones.
#include "common.h"

#define DIGIT 11  // bits that are counted together
#define DIGITS ((64 + DIGIT - 1) / DIGIT)

// Numbers of the places that hold something, in their order, and then of those that do not.
void kvs_in_front(int64_t lanes, int64_t count, const int8_t *there, int64_t lane, int64_t step, int64_t *to) {
    for (int64_t own = 0; own < lanes; own++, there += lane, to += count) {
        int64_t held = 0, front = 0;
        for (int64_t i = 0; i < count; i++) held += there[i * step] != 0;
        for (int64_t i = 0; i < count; i++) to[there[i * step] ? front++ : held + i - front] = i;
    }
}

// A number's bits in the order of size; what is no number is as large as +inf.
INLINE uint64_t ordered(double x) {
    uint64_t bits;
    x = x != x ? INFINITY : x == 0 ? 0.0 : x;  // -0 is 0
    memcpy(&bits, &x, 8);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

// The largest of the `most` least of a lane, and how many of those that are as large are among these: digit by digit, and
// only numbers that have all digits so far are looked at again. `room` is for as many as there are.
static uint64_t largest_kept(const double *x, int64_t count, int64_t most, uint64_t *room, int64_t *alike) {
    uint64_t known = 0;
    for (int64_t i = 0; i < count; i++) room[i] = ordered(x[i]);
    for (int digit = DIGITS - 1; digit >= 0; digit--) {
        int shift = digit * DIGIT;
        int64_t counts[1 << DIGIT] = {0}, left = 0;
        for (int64_t i = 0; i < count; i++) counts[room[i] >> shift & ((1 << DIGIT) - 1)]++;
        uint64_t next = 0;
        while (most > counts[next]) most -= counts[next++];
        known |= next << shift;
        for (int64_t i = 0; i < count; i++) {
            uint64_t bits = room[i];
            room[left] = bits;
            left += (bits >> shift & ((1 << DIGIT) - 1)) == next;
        }
        count = left;
    }
    *alike = most;
    return known;
}

// Numbers of the places of the `most` least of every lane, in their order, and then of the others. Of equal ones the
// first come first. Not 0: there was no memory.
int64_t kvs_least_in_front(int64_t lanes, int64_t count, int64_t most, const double *x, int64_t threads, int64_t *to) {
    int64_t failed = 0;
    PRAGMA(omp parallel for num_threads(use_threads(threads, lanes)) schedule(static) reduction(|:failed) \
           if (use_threads(threads, lanes) > 1))
    for (int64_t lane = 0; lane < lanes; lane++) {
        const double *own = x + lane * count;
        int64_t *places = to + lane * count, front = 0, alike = 0;
        uint64_t *room = kept_memory(0, sizeof(uint64_t) * (size_t)count);
        failed |= !room;
        if (!room) continue;
        uint64_t largest = most ? largest_kept(own, count, most, room, &alike) : 0;
        for (int64_t i = 0; i < count; i++) {
            uint64_t bits = ordered(own[i]);
            int taken = most && (bits < largest || (bits == largest && alike-- > 0));
            places[taken ? front++ : most + i - front] = i;
        }
    }
    return failed;
}
