/* The number types of a build, and what it shares with Python (`abi.h`).

   BF16_WEIGHTS is defined where weights are bfloat16. Keys, values and features are then bfloat16 too, unless
   F32_STATE is defined; and where the processor multiplies bfloat16, activations are rounded to it before a product
   (BF16_ACTS). Sums are always float32. */

#ifndef OUTRIDER_TYPES_H
#define OUTRIDER_TYPES_H

#include <stdint.h>
#include <string.h>
/* A precondition. Sanitized builds check it (`make sanitize`). */
#ifdef CHECKED
#include <stdio.h>
#include <stdlib.h>
#define EXPECT(true) ((true) ? (void)0 : (fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #true), abort()))
#else
#define EXPECT(true) ((void)0)
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNUSED __attribute__((unused))

#ifdef BF16_WEIGHTS
typedef uint16_t weight_t;
#else
typedef float weight_t;
#endif

#if defined(BF16_WEIGHTS) && !defined(F32_STATE)
#define BF16_STATE
typedef uint16_t kv_t;
#else
typedef float kv_t;
#endif

#if defined(BF16_STATE) && defined(__AVX512BF16__)
#define BF16_ACTS
typedef uint16_t act_t;
#else
typedef float act_t;
#endif

#if !defined(BF16_ACTS) || !(defined(__AMX_BF16__) && defined(__AMX_INT8__) || defined(EMULATED_AMX))
#undef AMX /* tiles multiply bfloat16 and int8 */
#endif

#include "abi.h"

/* float32 to bfloat16, to nearest even; NaN stays NaN. */
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40); /* the addition below could carry into the sign */
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE UNUSED float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#ifdef BF16_STATE
INLINE kv_t to_kv(float x) {
    return to_bf16(x);
}
INLINE float from_kv(kv_t x) {
    return from_bf16(x);
}
#else
INLINE kv_t to_kv(float x) {
    return x;
}
INLINE float from_kv(kv_t x) {
    return x;
}
#endif

#endif
