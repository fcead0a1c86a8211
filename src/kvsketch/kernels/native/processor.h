// What the processor is, where that says more than the instructions that a build is for.
#ifndef KVS_PROCESSOR
#define KVS_PROCESSOR

#include "common.h"

struct processor {
    int has_amx_bf16, has_avx512_fp16;
    int amd_family;  // 0: of another make, or nobody knows
};

INLINE struct processor asked_processor(void) {
    struct processor found = {0, 0, 0};
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) found.has_amx_bf16 = d >> 22 & 1, found.has_avx512_fp16 = d >> 23 & 1;
    unsigned is_amd = __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && d == signature_AMD_edx;
    if (is_amd && __get_cpuid(1, &a, &b, &c, &d)) found.amd_family = (int)((a >> 8 & 15) + (a >> 20 & 255));
#endif
    return found;
}

// Asked once: it takes long on a virtual machine.
__attribute__((unused)) static struct processor processor(void) {
    static int known;
    static struct processor found;
    if (!__atomic_load_n(&known, __ATOMIC_ACQUIRE)) {
        struct processor asked = asked_processor();
        __atomic_store_n(&found.has_amx_bf16, asked.has_amx_bf16, __ATOMIC_RELAXED);
        __atomic_store_n(&found.has_avx512_fp16, asked.has_avx512_fp16, __ATOMIC_RELAXED);
        __atomic_store_n(&found.amd_family, asked.amd_family, __ATOMIC_RELAXED);
        __atomic_store_n(&known, 1, __ATOMIC_RELEASE);
    }
    return found;
}

// Whether what is read next is asked for into the second cache, many lines at once: on Zen 4 (family 25) that takes half
// the time, since few lines at a time are brought into the first one; newer ones and Intel's are faster with the first.
static int asked_far = -1;
INLINE int asks_far(void) {
    int wanted = __atomic_load_n(&asked_far, __ATOMIC_RELAXED);
    return wanted < 0 ? processor().amd_family == 25 : wanted;
}

#endif
