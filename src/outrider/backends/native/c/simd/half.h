/* float16 as bits. */

#ifndef OUTRIDER_HALF_H
#define OUTRIDER_HALF_H

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../types.h"

/* float16 and float32, to nearest even; without the type _Float16, which gcc has for x86 since its version 12. */
#ifdef __x86_64__
INLINE UNUSED float from_half(uint16_t x) {
    return _cvtsh_ss(x);
}
INLINE UNUSED uint16_t to_half(float x) {
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}
#else
INLINE UNUSED float from_half(uint16_t x) {
    __fp16 value;
    memcpy(&value, &x, sizeof value);
    return (float)value;
}
INLINE UNUSED uint16_t to_half(float x) {
    const __fp16 value = (__fp16)x;
    uint16_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
#endif

#endif
