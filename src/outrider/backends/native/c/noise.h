/* The Gumbel noise of core/noise.py. */

#ifndef OUTRIDER_NOISE_H
#define OUTRIDER_NOISE_H

#include "types.h"

INLINE uint64_t split(uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The key of the noise at a position. */
INLINE uint64_t key_of(uint64_t seed, int64_t position) {
    return split(split(split(seed) ^ (uint64_t)position));
}

INLINE uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* The noise of one token, by the tables of core/noise.py. */
INLINE float noise(const int32_t *knots, const int32_t *slopes, uint64_t key, int64_t id) {
    const int32_t h = (int32_t)mix(mix((uint32_t)id ^ (uint32_t)key) + (uint32_t)(key >> 32)), side = h >> 31;
    const float wide = (float)(h ^ side) * 2.0f + 1.0f;
    int32_t x;
    memcpy(&x, &wide, 4);
    if (x > (159 << 23) - 1) x = (159 << 23) - 1;
    const int32_t i = (x >> 14) - (127 << 9) - side * (32 << 9);
    const int32_t g = knots[i] + ((int32_t)((uint32_t)slopes[i] * (uint32_t)(x & ((1 << 14) - 1))) >> 14);
    return (float)g * (1.0f / (1 << 18));
}

#endif
