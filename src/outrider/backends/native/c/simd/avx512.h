/* AVX-512: sixteen float32 (`vec_t`), and 32 words of sixteen bits (`words_t`). */

#ifndef OUTRIDER_AVX512_H
#define OUTRIDER_AVX512_H

#include <immintrin.h>

#include "../types.h"

#define LANES 16
typedef __m512 vec_t;

INLINE vec_t v_zero(void) {
    return _mm512_setzero_ps();
}
INLINE vec_t v_load(const float *p) {
    return _mm512_loadu_ps(p);
}
INLINE void v_store(float *p, vec_t x) {
    _mm512_storeu_ps(p, x);
}
INLINE vec_t v_set1(float x) {
    return _mm512_set1_ps(x);
}
INLINE vec_t v_add(vec_t a, vec_t b) {
    return _mm512_add_ps(a, b);
}
INLINE vec_t v_sub(vec_t a, vec_t b) {
    return _mm512_sub_ps(a, b);
}
INLINE vec_t v_mul(vec_t a, vec_t b) {
    return _mm512_mul_ps(a, b);
}
INLINE vec_t v_div(vec_t a, vec_t b) {
    return _mm512_div_ps(a, b);
}
INLINE vec_t v_fma(vec_t a, vec_t b, vec_t c) {
    return _mm512_fmadd_ps(a, b, c);
} /* a * b + c */
INLINE vec_t v_max(vec_t a, vec_t b) {
    return _mm512_max_ps(a, b);
}               /* b where either is NaN */
INLINE vec_t v_round(vec_t x) {
    return _mm512_roundscale_ps(x, 8);
}               /* to nearest even */

/* 2^n, n being integers. */
INLINE vec_t v_exp2(vec_t n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

/* `x`, and 0 where `by` is below `low`. */
INLINE vec_t v_zero_below(vec_t x, vec_t by, vec_t low) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(by, low, _CMP_NLT_UQ), x);
}

/* Is a > b in any lane? */
INLINE int v_above(vec_t a, vec_t b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
}

/* Is a > b, or either NaN, in any lane? */
INLINE int v_maybe_above(vec_t a, vec_t b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ) != 0;
}

INLINE vec_t v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

INLINE vec_t v_load_i8(const char *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* The first `count` of sixteen float16, and zeros. */
INLINE vec_t v_load_f16(const char *p, int64_t count) {
    const __mmask16 there = count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff;
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, p));
}

/* 2^(e - 128) of the first `count` of eight exponents e, and of the rest 0: each with a 0 after it. */
INLINE vec_t v_load_e8m0(const char *p, int64_t count) {
    const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), p);
    const __m512i e = _mm512_cvtepu8_epi64(bytes), least = _mm512_set1_epi64(0x200000); /* 2^-128, a subnormal */
    const __mmask8 small = _mm512_cmplt_epi64_mask(e, _mm512_set1_epi64(2));
    const __m512i normal = _mm512_slli_epi64(_mm512_sub_epi64(e, _mm512_set1_epi64(1)), 23);
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi64(normal, small, least, e));
}

/* Eight float16 twice: 0 .. 7, 0 .. 7, or in pairs: 0 1 0 1 2 3 2 3 ... */
INLINE vec_t v_load_f16_twice(const char *p, int pairs) {
    const __m512i in_pairs = _mm512_setr_epi32(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7);
    const __m512i in_order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    return _mm512_permutexvar_ps(pairs ? in_pairs : in_order, _mm512_castps256_ps512(eight));
}

INLINE float v_largest(vec_t x) {
    return _mm512_reduce_max_ps(x);
} /* may skip a NaN */

typedef int32_t ints_t __attribute__((vector_size(4 * LANES)));

INLINE ints_t i_gather(const int32_t *table, ints_t at) {
    return (ints_t)_mm512_i32gather_epi32((__m512i)at, table, 4);
}
INLINE ints_t i_min(ints_t a, ints_t b) {
    return (ints_t)_mm512_min_epi32((__m512i)a, (__m512i)b);
}

/* Lane i of the result is the sum of a[i]'s lanes. */
INLINE vec_t v_sums(const vec_t a[LANES]) {
    vec_t b[8], c[4], d[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) /* lanes 4k, 4k+2: of a[i]; lanes 4k+1, 4k+3: of a[i + 8] */
        b[i] = v_add(_mm512_unpacklo_ps(a[i], a[i + 8]), _mm512_unpackhi_ps(a[i], a[i + 8]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* a[i], a[i + 8], a[i + 4], a[i + 12] in every four lanes */
        c[i] = v_add(_mm512_shuffle_ps(b[i], b[i + 4], 0x44), _mm512_shuffle_ps(b[i], b[i + 4], 0xee));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        d[i] = v_add(_mm512_shuffle_f32x4(c[i], c[i + 2], 0x88), _mm512_shuffle_f32x4(c[i], c[i + 2], 0xdd));
    /* four lanes each of a[0] ..., a[0] ..., a[2] ..., a[2] ... and of a[1], a[3] */
    const vec_t e = v_add(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
    /* lanes are of 0 8 4 12, 2 10 6 14, 1 9 5 13, 3 11 7 15 */
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15), e);
}

/* Rows to columns: a[i] becomes lane i of all. */
INLINE void v_transpose(vec_t a[LANES]) {
    vec_t b[16], c[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) /* c[i + k]: in four lanes, element 4j + k of rows i .. i + 3 */
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            c[i + 2 * k] = _mm512_shuffle_ps(b[i + k], b[i + k + 2], 0x44);
            c[i + 2 * k + 1] = _mm512_shuffle_ps(b[i + k], b[i + k + 2], 0xee);
        }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const vec_t low = _mm512_shuffle_f32x4(c[k], c[k + 4], 0x44), high = _mm512_shuffle_f32x4(c[k], c[k + 4], 0xee);
        const vec_t low2 = _mm512_shuffle_f32x4(c[k + 8], c[k + 12], 0x44);
        const vec_t high2 = _mm512_shuffle_f32x4(c[k + 8], c[k + 12], 0xee);
        a[k] = _mm512_shuffle_f32x4(low, low2, 0x88);
        a[k + 4] = _mm512_shuffle_f32x4(low, low2, 0xdd);
        a[k + 8] = _mm512_shuffle_f32x4(high, high2, 0x88);
        a[k + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
}

#ifdef BF16_ACTS

/* What one multiply-accumulate takes: pairs of bfloat16. Subnormal numbers count as zero. */
#define MAC_WIDTH 32
#define PACKED 2 /* of these, in the width of a float32 */
typedef __m512bh mac_t;

INLINE mac_t mac_load(const uint16_t *p) {
    return (__m512bh)_mm512_loadu_si512(p);
}
INLINE mac_t mac_repeat(const uint16_t *p) { /* one pair */
    int32_t pair;
    memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}
INLINE vec_t mac(vec_t sum, mac_t x, mac_t w) {
    return _mm512_dpbf16_ps(sum, x, w);
}
INLINE vec_t v_load_packed(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
}
INLINE void v_store_bf16(uint16_t *p, vec_t x) {
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
}

typedef __m512i words_t;

INLINE words_t w_load(const void *p) {
    return _mm512_loadu_si512(p);
}
INLINE void w_store(void *p, words_t x) {
    _mm512_storeu_si512(p, x);
}
INLINE words_t w_zero(void) {
    return _mm512_setzero_si512();
}
INLINE words_t w_set1(int16_t x) {
    return _mm512_set1_epi16(x);
}
INLINE words_t w_and(words_t a, words_t b) {
    return _mm512_and_si512(a, b);
}
INLINE words_t w_or(words_t a, words_t b) {
    return _mm512_or_si512(a, b);
}
INLINE words_t w_sub(words_t a, words_t b) {
    return _mm512_sub_epi16(a, b);
}
INLINE words_t w_shift_right(words_t a, int bits) {
    return _mm512_srli_epi16(a, bits);
}
INLINE words_t w_shift_left(words_t a, int bits) {
    return _mm512_slli_epi16(a, bits);
}
INLINE words_t w_load_bytes(const void *p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
INLINE words_t w_where(uint32_t mask, words_t x) {
    return _mm512_maskz_mov_epi16(mask, x);
} /* else 0 */
INLINE words_t w_lookup(words_t at, words_t table) {
    return _mm512_permutexvar_epi16(at, table);
}
INLINE words_t w_bf16(vec_t low, vec_t high) {
    return (words_t)_mm512_cvtne2ps_pbh(high, low);
}

/* Sixteen of the words, which are signed, as float32. */
INLINE vec_t w_low(words_t x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(x)));
}
INLINE vec_t w_high(words_t x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(x, 1)));
}

/* Words of a and of b in turn: the first sixteen of each, or the last. */
INLINE words_t w_interleave(words_t a, words_t b, int last) {
    static const uint16_t order[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63,
    };
    return _mm512_permutex2var_epi16(a, w_load(order + (last ? 32 : 0)), b);
}

#endif

#endif
