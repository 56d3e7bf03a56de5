/* The number types of this build, and what it shares with Python (`abi.h`).

   HALVES is set where weights are bfloat16, and WIDE where nothing else is. Without WIDE, keys and values are bfloat16
   too, and where the processor multiplies these, activations are rounded to it before a product (NARROW). */

#ifndef OUTRIDER_TYPES_H
#define OUTRIDER_TYPES_H

#include <stdint.h>

/* What a function relies on. Only the sanitized build looks (`make sanitize`). */
#ifdef CHECKED
#include <stdio.h>
#include <stdlib.h>
#define EXPECT(true) \
    ((true) ? (void)0 : (fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #true), abort()))
#else
#define EXPECT(true) ((void)0)
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef HALVES
typedef uint16_t weight_t;
#else
typedef float weight_t;
#endif

#if defined(HALVES) && !defined(WIDE)
typedef uint16_t kv_t;
#else
typedef float kv_t;
#endif

#if defined(HALVES) && !defined(WIDE) && defined(__AVX512BF16__)
#define NARROW
typedef uint16_t act_t;
#else
typedef float act_t;
#endif

#include "abi.h"

#endif
