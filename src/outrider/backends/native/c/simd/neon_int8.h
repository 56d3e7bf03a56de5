/* int8 dot products in NEON: vectors of LANES int32, each of four signed bytes. With `sdot` where the processor has it,
   and with `smmla` for two rows of activations at a time. */

#ifndef OUTRIDER_NEON_INT8_H
#define OUTRIDER_NEON_INT8_H

#include "neon.h"

#define I8_DOT /* of signed bytes */

typedef bytes_t i8_t;
typedef uint16_t twos_t __attribute__((vector_size(32)));

INLINE i8_t i8_zero(void) {
    return (i8_t){0};
}
INLINE i8_t i8_load(const void *p) {
    return b_load(p);
}
INLINE i8_t i8_set1(int x) { /* in every byte */
    const uint8x16_t half = vdupq_n_u8((uint8_t)x);
    return n_join_bytes(half, half);
}
INLINE i8_t i8_set_sums(int32_t x) { /* in every int32 */
    const uint8x16_t half = vreinterpretq_u8_s32(vdupq_n_s32(x));
    return n_join_bytes(half, half);
}
INLINE i8_t i8_and(i8_t a, i8_t b) {
    return a & b;
}
INLINE i8_t i8_or(i8_t a, i8_t b) {
    return a | b;
}
INLINE i8_t i8_xor(i8_t a, i8_t b) {
    return a ^ b;
}
INLINE i8_t i8_shift_right(i8_t x, int bits) { /* of 16-bit words: bits of a byte's neighbour enter it */
    return (i8_t)((twos_t)x >> bits);
}
INLINE i8_t i8_shift_left(i8_t x, int bits) {
    return (i8_t)((twos_t)x << bits);
}
INLINE i8_t i8_shift_sums(i8_t x, int bits) { /* every int32, to the left */
    return (i8_t)((ints_t)x << bits);
}
INLINE i8_t i8_table(const int8_t values[16]) {
    return b_load_twice(values);
}
INLINE i8_t i8_lookup(i8_t table, i8_t at) {
    return b_lookup(table, at);
}
INLINE vec_t v_from_sums(i8_t x) {
    return i_to_floats((ints_t)x);
}
INLINE vec_t v_load_f16_all(const char *p) {
    return v_load_f16(p);
}

INLINE int32x4_t n_dot(int32x4_t sum, int8x16_t a, int8x16_t b) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, a, b);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vpadalq_s16(sum, vpaddq_s16(low, high)); /* two products fit into int16: |b| <= 127 */
#endif
}

/* Add the products of signed bytes and of the four at `p` to `sum`, four in each int32. */
INLINE i8_t i8_dot(i8_t sum, i8_t w, const int8_t *p) {
    const int8x16_t acts = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(const void *)p));
    int32x4_t half[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++)
        half[h] = n_dot(vreinterpretq_s32_u8(n_bytes(sum, h)), vreinterpretq_s8_u8(n_bytes(w, h)), acts);
    return n_join_bytes(vreinterpretq_u8_s32(half[0]), vreinterpretq_u8_s32(half[1]));
}

#ifdef __ARM_FEATURE_MATMUL_INT8
#define I8_DOT_TWO_ROWS

/* Two steps, each of four bytes of LANES outputs, as eight bytes of an output: of the first four outputs, and the last. */
INLINE void i8_join_steps(const i8_t steps[2], i8_t to[2]) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const uint32x4_t a = vreinterpretq_u32_u8(n_bytes(steps[0], h)), b = vreinterpretq_u32_u8(n_bytes(steps[1], h));
        to[h] = n_join_bytes(vreinterpretq_u8_u32(vzip1q_u32(a, b)), vreinterpretq_u8_u32(vzip2q_u32(a, b)));
    }
}

/* Add the products of `count` steps, joined in twos, with those at `first` and `second` to their sums. */
INLINE void
i8_dot_two_rows(const i8_t *joined, const int count, const int8_t *first, const int8_t *second, i8_t sums[2]) {
    int32x4_t four[4]; /* of two outputs and both rows each */
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) four[g] = vdupq_n_s32(0);
#pragma GCC unroll 8
    for (int s = 0; s < count; s += 2) {
        const int8x16_t acts = vcombine_s8(vld1_s8(first + 4 * s), vld1_s8(second + 4 * s));
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
            four[g] = vmmlaq_s32(four[g], vreinterpretq_s8_u8(n_bytes(joined[s + g / 2], g % 2)), acts);
    }
    const ints_t own = N_JOIN(vuzp1q_s32(four[0], four[1]), vuzp1q_s32(four[2], four[3]));
    const ints_t other = N_JOIN(vuzp2q_s32(four[0], four[1]), vuzp2q_s32(four[2], four[3]));
    sums[0] = (i8_t)((ints_t)sums[0] + own);
    sums[1] = (i8_t)((ints_t)sums[1] + other);
}
#endif

/* Quantising activations, eight float32 at a time. */

typedef vec_t f32x8_t;

INLINE f32x8_t f8_load_acts(const act_t *p) {
    return v_load(p);
}

/* The largest magnitude of 32; NaN if one of them is: as bits it is the largest. */
INLINE float largest_magnitude(const f32x8_t x[4]) {
    ints_t most = {0};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const ints_t size = (ints_t)x[i] & 0x7fffffff;
        most = N_JOIN(vmaxq_s32(N_LOW(most), N_LOW(size)), vmaxq_s32(N_HIGH(most), N_HIGH(size)));
    }
    const int32_t bits = vmaxvq_s32(vmaxq_s32(N_LOW(most), N_HIGH(most)));
    float largest;
    memcpy(&largest, &bits, sizeof bits);
    return largest;
}

/* 32 float32 times a factor, to the nearest int8, ties to even, in order. `sums`: of the first sixteen and the last. */
INLINE void round_to_int8(const f32x8_t x[4], float factor, int8_t *to, int32_t sums[2]) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        int16x8_t words[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(N_LOW(x[2 * h + i]), factor));
            const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(N_HIGH(x[2 * h + i]), factor));
            words[i] = vqmovn_high_s32(vqmovn_s32(low), high);
        }
        const int8x16_t all = vqmovn_high_s16(vqmovn_s16(words[0]), words[1]);
        vst1q_s8(to + 16 * h, all);
        sums[h] = vaddlvq_s8(all);
    }
}

#endif
