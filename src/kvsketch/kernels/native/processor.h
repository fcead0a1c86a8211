// What the processor is, where that says more than the instructions that a build is for.
#ifndef KVS_PROCESSOR
#define KVS_PROCESSOR

#include "common.h"

#define AMX_BF16 1
#define ZEN4 2  // AMD's family 25 with AVX-512
#define ASKED_IT 4

INLINE int asked_processor(void) {
    int found = ASKED_IT;
#if defined(__x86_64__)
    unsigned a, b, c, d, has_avx512 = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        found |= d >> 22 & 1 ? AMX_BF16 : 0;
        has_avx512 = b >> 16 & 1;
    }
    unsigned is_amd = __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && d == signature_AMD_edx;
    if (is_amd && has_avx512 && __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) == 25) found |= ZEN4;
#endif
    return found;
}

// Whether the processor is one of these; it is asked once, since that takes long on a virtual machine.
INLINE int processor_is(int what) {
    static int known;
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) __atomic_store_n(&known, found = asked_processor(), __ATOMIC_RELAXED);
    return (found & what) != 0;
}

// Whether what is read next is prefetched into the second cache, many lines at once: on Zen 4 that takes half the time, since
// it brings few lines at a time into the first one. Zen 5 and Intel's are faster with the first; others are not known.
static int asked_far = -1;
INLINE int asks_far(void) {
    int wanted = __atomic_load_n(&asked_far, __ATOMIC_RELAXED);
    return wanted < 0 ? processor_is(ZEN4) : wanted;
}

#endif
