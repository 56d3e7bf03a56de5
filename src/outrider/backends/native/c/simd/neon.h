/* NEON: eight float32 (`vec_t`) in two registers, and what opens blocks of weights in eight lanes. Every sum has the
   order of `avx2.h`, so results have the same bits. */

#ifndef OUTRIDER_NEON_H
#define OUTRIDER_NEON_H

#include <arm_neon.h>

#include "../types.h"

#define LANES 8
typedef float vec_t __attribute__((vector_size(32)));
typedef int32_t ints_t __attribute__((vector_size(32)));
typedef uint8_t bytes_t __attribute__((vector_size(32))); /* in two halves of sixteen */

/* The halves of a vector, and a vector of halves. */
#define N_LOW(x) __builtin_shufflevector(x, x, 0, 1, 2, 3)
#define N_HIGH(x) __builtin_shufflevector(x, x, 4, 5, 6, 7)
#define N_JOIN(low, high) __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7)

INLINE uint8x16_t n_bytes(bytes_t x, int half) {
    uint8x16_t halves[2];
    memcpy(halves, &x, sizeof x);
    return halves[half];
}
INLINE bytes_t n_join_bytes(uint8x16_t low, uint8x16_t high) {
    const uint8x16_t halves[2] = {low, high};
    bytes_t x;
    memcpy(&x, halves, sizeof x);
    return x;
}

/* a where the mask is set, else b. */
INLINE vec_t n_select(ints_t mask, vec_t a, vec_t b) {
    return (vec_t)(((ints_t)a & mask) | ((ints_t)b & ~mask));
}
INLINE int n_any(ints_t mask) {
    return vmaxvq_u32((uint32x4_t)(N_LOW(mask) | N_HIGH(mask))) != 0;
}

INLINE vec_t v_zero(void) {
    return (vec_t){0};
}
INLINE vec_t v_load(const float *p) {
    return N_JOIN(vld1q_f32(p), vld1q_f32(p + 4));
}
INLINE void v_store(float *p, vec_t x) {
    vst1q_f32(p, N_LOW(x));
    vst1q_f32(p + 4, N_HIGH(x));
}
INLINE vec_t v_set1(float x) {
    return (vec_t){x, x, x, x, x, x, x, x};
}
INLINE vec_t v_add(vec_t a, vec_t b) {
    return a + b;
}
INLINE vec_t v_sub(vec_t a, vec_t b) {
    return a - b;
}
INLINE vec_t v_mul(vec_t a, vec_t b) {
    return a * b;
}
INLINE vec_t v_div(vec_t a, vec_t b) {
    return a / b;
}
INLINE vec_t v_fma(vec_t a, vec_t b, vec_t c) {
    return N_JOIN(vfmaq_f32(N_LOW(c), N_LOW(a), N_LOW(b)), vfmaq_f32(N_HIGH(c), N_HIGH(a), N_HIGH(b)));
} /* a * b + c */
INLINE vec_t v_max(vec_t a, vec_t b) {
    return n_select((ints_t)(a > b), a, b);
} /* b where either is NaN */
INLINE vec_t v_round(vec_t x) {
    return N_JOIN(vrndnq_f32(N_LOW(x)), vrndnq_f32(N_HIGH(x)));
} /* to nearest even */

/* 2^n, n being integers. */
INLINE vec_t v_exp2(vec_t n) {
    const int32x4_t bias = vdupq_n_s32(127);
    const int32x4_t low = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(N_LOW(n)), bias), 23);
    const int32x4_t high = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(N_HIGH(n)), bias), 23);
    return N_JOIN(vreinterpretq_f32_s32(low), vreinterpretq_f32_s32(high));
}

/* `x`, and 0 where `by` is below `low`. */
INLINE vec_t v_zero_below(vec_t x, vec_t by, vec_t low) {
    return (vec_t)((ints_t)x & ~(ints_t)(by < low));
}

/* Is a > b in any lane? */
INLINE int v_above(vec_t a, vec_t b) {
    return n_any((ints_t)(a > b));
}

/* Is a > b, or either NaN, in any lane? */
INLINE int v_maybe_above(vec_t a, vec_t b) {
    return n_any(~(ints_t)(a <= b));
}

INLINE vec_t v_load_bf16(const uint16_t *p) {
    const uint16x8_t x = vld1q_u16(p);
    const uint32x4_t low = vshll_n_u16(vget_low_u16(x), 16), high = vshll_high_n_u16(x, 16);
    return N_JOIN(vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high));
}

INLINE vec_t v_load_i8(const char *p) {
    const int16x8_t x = vmovl_s8(vld1_s8((const int8_t *)p));
    return N_JOIN(vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x)));
}

INLINE vec_t v_load_f16(const char *p) {
    const float16x8_t x = vreinterpretq_f16_u8(vld1q_u8((const uint8_t *)p));
    return N_JOIN(vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x));
}

/* Four float16 times a factor, as four float32. */
INLINE void scale_four_f16(const char *p, float factor, float *to) {
    const float16x4_t x = vreinterpret_f16_u8(vld1_u8((const uint8_t *)p));
    vst1q_f32(to, vmulq_n_f32(vcvt_f32_f16(x), factor));
}

/* The largest lane; may skip a NaN. */
INLINE float v_largest(vec_t x) {
    return vmaxnmvq_f32(vmaxnmq_f32(N_LOW(x), N_HIGH(x)));
}

INLINE ints_t i_load(const void *p) {
    ints_t x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE vec_t i_to_floats(ints_t x) {
    return __builtin_convertvector(x, vec_t);
}
INLINE ints_t i_gather(const int32_t *table, ints_t at) {
    ints_t x;
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) x[i] = table[at[i]];
    return x;
}
INLINE ints_t i_min(ints_t a, ints_t b) {
    return N_JOIN(vminq_s32(N_LOW(a), N_LOW(b)), vminq_s32(N_HIGH(a), N_HIGH(b)));
}

INLINE bytes_t b_load(const void *p) {
    return n_join_bytes(vld1q_u8(p), vld1q_u8((const uint8_t *)p + 16));
}
INLINE bytes_t b_load_twice(const void *p) {
    return n_join_bytes(vld1q_u8(p), vld1q_u8(p));
}
INLINE bytes_t b_shift_right(bytes_t x, int bits) {
    return (bytes_t)((uint16_t __attribute__((vector_size(32))))x >> bits);
} /* words */
INLINE bytes_t b_lookup(bytes_t table, bytes_t at) {
    return n_join_bytes(vqtbl1q_u8(n_bytes(table, 0), n_bytes(at, 0)), vqtbl1q_u8(n_bytes(table, 1), n_bytes(at, 1)));
}

/* Bytes of a and of b in turn: the first eight of each half, or the last. */
INLINE ints_t b_interleave(bytes_t a, bytes_t b, int last) {
    const uint8x16_t a0 = n_bytes(a, 0), a1 = n_bytes(a, 1), b0 = n_bytes(b, 0), b1 = n_bytes(b, 1);
    return (ints_t)(last ? n_join_bytes(vzip2q_u8(a0, b0), vzip2q_u8(a1, b1))
                         : n_join_bytes(vzip1q_u8(a0, b0), vzip1q_u8(a1, b1)));
}

/* (x0 + x2) + (x1 + x3) of four registers. */
INLINE float32x4_t n_sums(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    const float32x4_t ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    const float32x4_t cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
    return vpaddq_f32(ab, cd);
}

/* Lane i of the result is the sum of a[i]'s lanes. */
INLINE vec_t v_sums(const vec_t a[LANES]) {
    float32x4_t half[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const vec_t *x = a + 4 * h;
        const float32x4_t low = n_sums(N_LOW(x[0]), N_LOW(x[1]), N_LOW(x[2]), N_LOW(x[3]));
        half[h] = vaddq_f32(low, n_sums(N_HIGH(x[0]), N_HIGH(x[1]), N_HIGH(x[2]), N_HIGH(x[3])));
    }
    return N_JOIN(half[0], half[1]);
}

/* Rows to columns, of four registers. */
INLINE void n_transpose(float32x4_t a[4]) {
    const float32x4_t b0 = vtrn1q_f32(a[0], a[1]), b1 = vtrn2q_f32(a[0], a[1]);
    const float32x4_t b2 = vtrn1q_f32(a[2], a[3]), b3 = vtrn2q_f32(a[2], a[3]);
    a[0] = __builtin_shufflevector(b0, b2, 0, 1, 4, 5);
    a[1] = __builtin_shufflevector(b1, b3, 0, 1, 4, 5);
    a[2] = __builtin_shufflevector(b0, b2, 2, 3, 6, 7);
    a[3] = __builtin_shufflevector(b1, b3, 2, 3, 6, 7);
}

/* Rows to columns: a[i] becomes lane i of all. */
INLINE void v_transpose(vec_t a[LANES]) {
    float32x4_t part[2][2][4]; /* of rows, of columns */
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) {
        part[i / 4][0][i % 4] = N_LOW(a[i]);
        part[i / 4][1][i % 4] = N_HIGH(a[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) n_transpose(part[i / 2][i % 2]);
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) a[i] = N_JOIN(part[0][i / 4][i % 4], part[1][i / 4][i % 4]);
}

#endif
