/* AVX2 with FMA and F16C: eight float32 (`vec_t`), and what opens blocks of weights in eight lanes. */

#ifndef OUTRIDER_AVX2_H
#define OUTRIDER_AVX2_H

#include <immintrin.h>

#include "../types.h"

#define LANES 8
typedef __m256 vec_t;

INLINE vec_t v_zero(void) {
    return _mm256_setzero_ps();
}
INLINE vec_t v_load(const float *p) {
    return _mm256_loadu_ps(p);
}
INLINE void v_store(float *p, vec_t x) {
    _mm256_storeu_ps(p, x);
}
INLINE vec_t v_set1(float x) {
    return _mm256_set1_ps(x);
}
INLINE vec_t v_add(vec_t a, vec_t b) {
    return _mm256_add_ps(a, b);
}
INLINE vec_t v_sub(vec_t a, vec_t b) {
    return _mm256_sub_ps(a, b);
}
INLINE vec_t v_mul(vec_t a, vec_t b) {
    return _mm256_mul_ps(a, b);
}
INLINE vec_t v_div(vec_t a, vec_t b) {
    return _mm256_div_ps(a, b);
}
INLINE vec_t v_fma(vec_t a, vec_t b, vec_t c) {
    return _mm256_fmadd_ps(a, b, c);
} /* a * b + c */
INLINE vec_t v_max(vec_t a, vec_t b) {
    return _mm256_max_ps(a, b);
}               /* b where either is NaN */
INLINE vec_t v_round(vec_t x) {
    return _mm256_round_ps(x, 8);
}                    /* to nearest even */

/* 2^n, n being integers. */
INLINE vec_t v_exp2(vec_t n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

/* `x`, and 0 where `by` is below `low`. */
INLINE vec_t v_zero_below(vec_t x, vec_t by, vec_t low) {
    return _mm256_and_ps(x, _mm256_cmp_ps(by, low, _CMP_NLT_UQ));
}

/* Is a > b in any lane? */
INLINE int v_above(vec_t a, vec_t b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}

/* Is a > b, or either NaN, in any lane? */
INLINE int v_maybe_above(vec_t a, vec_t b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)) != 0;
}

INLINE vec_t v_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

INLINE vec_t v_load_i8(const char *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

INLINE vec_t v_load_f16(const char *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* Four float16 times a factor, as four float32. */
INLINE void scale_four_f16(const char *p, float factor, float *to) {
    _mm_storeu_ps(to, _mm_mul_ps(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)p)), _mm_set1_ps(factor)));
}

/* The largest lane; may skip a NaN. */
INLINE float v_largest(vec_t x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

typedef int32_t ints_t __attribute__((vector_size(4 * LANES)));

INLINE ints_t i_load(const void *p) {
    return (ints_t)_mm256_loadu_si256((const __m256i *)p);
}
INLINE vec_t i_to_floats(ints_t x) {
    return _mm256_cvtepi32_ps((__m256i)x);
}
INLINE ints_t i_gather(const int32_t *table, ints_t at) {
    return (ints_t)_mm256_i32gather_epi32((const int *)table, (__m256i)at, 4);
}
INLINE ints_t i_min(ints_t a, ints_t b) {
    return (ints_t)_mm256_min_epi32((__m256i)a, (__m256i)b);
}

/* Bytes, in two halves of sixteen. */
typedef uint8_t bytes_t __attribute__((vector_size(32)));

INLINE bytes_t b_load(const void *p) {
    return (bytes_t)_mm256_loadu_si256((const __m256i *)p);
}
INLINE bytes_t b_load_twice(const void *p) {
    return (bytes_t)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
INLINE bytes_t b_shift_right(bytes_t x, int bits) {
    return (bytes_t)_mm256_srli_epi16((__m256i)x, bits);
} /* words */
INLINE bytes_t b_lookup(bytes_t table, bytes_t at) {
    return (bytes_t)_mm256_shuffle_epi8((__m256i)table, (__m256i)at);
}

/* Bytes of a and of b in turn: the first eight of each half, or the last. */
INLINE ints_t b_interleave(bytes_t a, bytes_t b, int last) {
    return (ints_t)(last ? _mm256_unpackhi_epi8((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi8((__m256i)a, (__m256i)b));
}

/* Lane i of the result is the sum of a[i]'s lanes. */
INLINE vec_t v_sums(const vec_t a[LANES]) {
    vec_t b[4], c[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) b[i] = v_add(_mm256_unpacklo_ps(a[i], a[i + 4]), _mm256_unpackhi_ps(a[i], a[i + 4]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        c[i] = v_add(_mm256_shuffle_ps(b[i], b[i + 2], 0x44), _mm256_shuffle_ps(b[i], b[i + 2], 0xee));
    /* in four lanes a[0] a[4] a[2] a[6], and a[1] a[5] a[3] a[7] */
    const vec_t d = v_add(_mm256_permute2f128_ps(c[0], c[1], 0x20), _mm256_permute2f128_ps(c[0], c[1], 0x31));
    return _mm256_permutevar8x32_ps(d, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
}

/* Rows to columns: a[i] becomes lane i of all. */
INLINE void v_transpose(vec_t a[LANES]) {
    vec_t b[8], c[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            c[i + 2 * k] = _mm256_shuffle_ps(b[i + k], b[i + k + 2], 0x44);
            c[i + 2 * k + 1] = _mm256_shuffle_ps(b[i + k], b[i + k + 2], 0xee);
        }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        a[k] = _mm256_permute2f128_ps(c[k], c[k + 4], 0x20);
        a[k + 4] = _mm256_permute2f128_ps(c[k], c[k + 4], 0x31);
    }
}

#endif
