/* Products of 32 int8 at a time, and eight float32 or int32 beside them: AVX2, and VNNI where the processor has it. */

#ifndef OUTRIDER_SIMD_INT8_H
#define OUTRIDER_SIMD_INT8_H

#include "vector.h"

typedef __m256i i8x32_t; /* or sixteen int16, or eight int32 */
typedef __m256 f32x8_t;

INLINE f32x8_t f8_zero(void) {
    return _mm256_setzero_ps();
}
INLINE f32x8_t f8_set1(float x) {
    return _mm256_set1_ps(x);
}
INLINE f32x8_t f8_mul(f32x8_t a, f32x8_t b) {
    return _mm256_mul_ps(a, b);
}
INLINE f32x8_t f8_fma(f32x8_t a, f32x8_t b, f32x8_t c) {
    return _mm256_fmadd_ps(a, b, c);
}
INLINE f32x8_t f8_load_f16(const char *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE f32x8_t f8_from_i32(i8x32_t x) {
    return _mm256_cvtepi32_ps(x);
}
INLINE void f8_store(float *p, f32x8_t x) {
    _mm256_storeu_ps(p, x);
}
#ifdef BF16_ACTS
INLINE f32x8_t f8_load_acts(const act_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
#else
INLINE f32x8_t f8_load_acts(const act_t *p) {
    return _mm256_loadu_ps(p);
}
#endif

/* The larger magnitudes, as bits: among these NaN is the largest. */
INLINE i8x32_t max_magnitude(i8x32_t most, f32x8_t x) {
    const __m256i sign = _mm256_set1_epi32((int)0x80000000);
    return _mm256_max_epi32(most, _mm256_andnot_si256(sign, _mm256_castps_si256(x)));
}

INLINE float largest_magnitude(i8x32_t most) {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

INLINE i8x32_t i8_zero(void) {
    return _mm256_setzero_si256();
}
INLINE i8x32_t i8_load(const void *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}
INLINE void i8_store(void *p, i8x32_t x) {
    _mm256_storeu_si256((__m256i *)p, x);
}
INLINE i8x32_t i8_repeat(const int8_t *p) { /* eight of them */
    int64_t eight;
    memcpy(&eight, p, 8);
    return _mm256_set1_epi64x(eight);
}
INLINE i8x32_t i8_low_nibbles(i8x32_t x) {
    return _mm256_and_si256(x, _mm256_set1_epi8(15));
}
INLINE i8x32_t i8_high_nibbles(i8x32_t x) {
    return i8_low_nibbles(_mm256_srli_epi16(x, 4));
}
INLINE i8x32_t i8_abs(i8x32_t x) {
    return _mm256_abs_epi8(x);
}
INLINE i8x32_t i8_sign(i8x32_t x, i8x32_t by) {
    return _mm256_sign_epi8(x, by);
}

/* Eight float32 to the nearest int32, ties to even. */
INLINE i8x32_t i32_round(f32x8_t x) {
    return _mm256_cvtps_epi32(x);
}

/* 32 int32 to int8, saturated, in order. */
INLINE i8x32_t i8_pack(const i8x32_t x[4]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i all = _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    return _mm256_permutevar8x32_epi32(all, order);
}

INLINE int i8_sum(i8x32_t x) {
    const __m256i biased = _mm256_xor_si256(x, _mm256_set1_epi8(-128)); /* x + 128 */
    const __m256i quarters = _mm256_sad_epu8(biased, _mm256_setzero_si256());
    const __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi32(halves, 2) - 128 * 32;
}

/* Add products of unsigned and signed int8 to `sum`: four for each int32, or without VNNI, where `small` says that
   int16 hold the sums, two for each int16. */
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define SUMS_OF_TWO(small) 0
INLINE i8x32_t i8_dot(i8x32_t sum, i8x32_t u, i8x32_t s, const int small) {
    (void)small;
    return _mm256_dpbusd_epi32(sum, u, s);
}
#elif defined(__AVXVNNI__)
#define SUMS_OF_TWO(small) 0
INLINE i8x32_t i8_dot(i8x32_t sum, i8x32_t u, i8x32_t s, const int small) {
    (void)small;
    return _mm256_dpbusd_avx_epi32(sum, u, s);
}
#else
#define SUMS_OF_TWO(small) (small)
INLINE i8x32_t i8_dot(i8x32_t sum, i8x32_t u, i8x32_t s, const int small) {
    const __m256i twos = _mm256_maddubs_epi16(u, s);
    if (small) return _mm256_add_epi16(sum, twos);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
}
#endif

/* The sums of eight outputs, in order, from those of `i8_dot` for two times four. */
INLINE i8x32_t i8_dot_sums(i8x32_t first, i8x32_t second, const int small) {
    (void)small;
    const __m256 a = _mm256_castsi256_ps(first), b = _mm256_castsi256_ps(second);
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
    if (!SUMS_OF_TWO(small)) return _mm256_add_epi32(even, odd);
    return _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
}

#endif
