/* int8 dot products: vectors of LANES int32, each of four bytes (`i8_t`). On x86 VNNI where the processor has it, else
   pairs of products in int16 (`maddubs`). */

#ifndef OUTRIDER_SIMD_INT8_H
#define OUTRIDER_SIMD_INT8_H

#include "vector.h"

#ifdef __aarch64__
#include "neon_int8.h"
#else

#if defined(__AVX512VNNI__) && LANES == 16 || defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
#define I8_DOT /* there is `i8_dot` */
#define UNSIGNED_DOT /* of unsigned bytes */
#endif

#if LANES == 16

typedef __m512i i8_t;

INLINE i8_t i8_zero(void) {
    return _mm512_setzero_si512();
}
INLINE i8_t i8_load(const void *p) {
    return _mm512_loadu_si512(p);
}
INLINE UNUSED void i8_store(void *p, i8_t x) {
    _mm512_storeu_si512(p, x);
}
INLINE i8_t i8_set1(int x) { /* in every byte */
    return _mm512_set1_epi8((char)x);
}
INLINE i8_t i8_set_sums(int32_t x) { /* in every int32 */
    return _mm512_set1_epi32(x);
}
INLINE i8_t i8_and(i8_t a, i8_t b) {
    return _mm512_and_si512(a, b);
}
INLINE i8_t i8_or(i8_t a, i8_t b) {
    return _mm512_or_si512(a, b);
}
INLINE i8_t i8_shift_right(i8_t x, int bits) { /* of 16-bit words: bits of a byte's neighbour enter it */
    return _mm512_srli_epi16(x, (unsigned)bits);
}
INLINE i8_t i8_shift_left(i8_t x, int bits) {
    return _mm512_slli_epi16(x, (unsigned)bits);
}
INLINE i8_t i8_xor(i8_t a, i8_t b) {
    return _mm512_xor_si512(a, b);
}
INLINE i8_t i8_table(const int8_t values[16]) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)values));
}
INLINE i8_t i8_lookup(i8_t table, i8_t at) {
    return _mm512_shuffle_epi8(table, at);
}
INLINE vec_t v_from_sums(i8_t x) {
    return _mm512_cvtepi32_ps(x);
}
INLINE vec_t v_load_f16_all(const char *p) {
    return v_load_f16(p, LANES);
}

#else

typedef __m256i i8_t;

INLINE i8_t i8_zero(void) {
    return _mm256_setzero_si256();
}
INLINE i8_t i8_load(const void *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}
INLINE UNUSED void i8_store(void *p, i8_t x) {
    _mm256_storeu_si256((__m256i *)p, x);
}
INLINE i8_t i8_set1(int x) {
    return _mm256_set1_epi8((char)x);
}
INLINE i8_t i8_set_sums(int32_t x) {
    return _mm256_set1_epi32(x);
}
INLINE i8_t i8_and(i8_t a, i8_t b) {
    return _mm256_and_si256(a, b);
}
INLINE i8_t i8_or(i8_t a, i8_t b) {
    return _mm256_or_si256(a, b);
}
INLINE i8_t i8_shift_right(i8_t x, int bits) {
    return _mm256_srli_epi16(x, bits);
}
INLINE i8_t i8_shift_left(i8_t x, int bits) {
    return _mm256_slli_epi16(x, bits);
}
INLINE i8_t i8_xor(i8_t a, i8_t b) {
    return _mm256_xor_si256(a, b);
}
INLINE i8_t i8_table(const int8_t values[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values));
}
INLINE i8_t i8_lookup(i8_t table, i8_t at) {
    return _mm256_shuffle_epi8(table, at);
}
INLINE vec_t v_from_sums(i8_t x) {
    return _mm256_cvtepi32_ps(x);
}
INLINE vec_t v_load_f16_all(const char *p) {
    return v_load_f16(p);
}

#endif

/* Four bytes in every int32. */
INLINE i8_t i8_repeat(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return i8_set_sums(four);
}

INLINE i8_t i8_shift_sums(i8_t x, int bits) { /* every int32, to the left */
    return (i8_t)((ints_t)IN_REGISTER(x) << bits);
}

#ifdef I8_DOT

/* Add the products of unsigned bytes and of the four signed ones at `p` to `sum`, four in each int32. */
INLINE i8_t i8_dot(i8_t sum, i8_t u, const int8_t *p) {
#if LANES == 16
    return _mm512_dpbusd_epi32(sum, u, i8_repeat(p));
#elif defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(sum, u, i8_repeat(p));
#else
    return _mm256_dpbusd_avx_epi32(sum, u, i8_repeat(p));
#endif
}

#elif LANES == 16

INLINE i8_t i8_add_sums(i8_t a, i8_t b) {
    return _mm512_add_epi32(a, b);
}
INLINE i8_t i8_add_twos(i8_t a, i8_t b) {
    return _mm512_add_epi16(a, b);
}
INLINE i8_t i8_dot_twos(i8_t u, i8_t s) { /* two products in each int16, saturated */
    return _mm512_maddubs_epi16(u, s);
}
INLINE i8_t i8_twos_to_sums(i8_t twos) {
    return _mm512_madd_epi16(twos, _mm512_set1_epi16(1));
}
INLINE i8_t i8_abs(i8_t x) {
    return _mm512_abs_epi8(x);
}
INLINE i8_t i8_sign(i8_t x, i8_t by) { /* -x where `by` is negative */
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(by), _mm512_setzero_si512(), x);
}

#else

INLINE i8_t i8_add_sums(i8_t a, i8_t b) {
    return _mm256_add_epi32(a, b);
}
INLINE i8_t i8_add_twos(i8_t a, i8_t b) {
    return _mm256_add_epi16(a, b);
}
INLINE i8_t i8_dot_twos(i8_t u, i8_t s) {
    return _mm256_maddubs_epi16(u, s);
}
INLINE i8_t i8_twos_to_sums(i8_t twos) {
    return _mm256_madd_epi16(twos, _mm256_set1_epi16(1));
}
INLINE i8_t i8_abs(i8_t x) {
    return _mm256_abs_epi8(x);
}
INLINE i8_t i8_sign(i8_t x, i8_t by) {
    return _mm256_sign_epi8(x, by);
}

#endif

/* Quantising activations, eight float32 at a time. */

typedef __m256 f32x8_t;

#ifdef BF16_ACTS
INLINE f32x8_t f8_load_acts(const act_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
#else
INLINE f32x8_t f8_load_acts(const act_t *p) {
    return _mm256_loadu_ps(p);
}
#endif

/* The largest magnitude of 32; NaN if one of them is: as bits it is the largest. */
INLINE float largest_magnitude(const f32x8_t x[4]) {
    const __m256i sign = _mm256_set1_epi32((int)0x80000000);
    __m256i most = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) most = _mm256_max_epi32(most, _mm256_andnot_si256(sign, _mm256_castps_si256(x[i])));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

/* 32 float32 times a factor, to the nearest int8, ties to even, in order. `sums`: of the first sixteen and the last. */
INLINE void round_to_int8(const f32x8_t x[4], float factor, int8_t *to, int32_t sums[2]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i rounded[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], _mm256_set1_ps(factor)));
    const __m256i words = _mm256_packs_epi32(rounded[0], rounded[1]), more = _mm256_packs_epi32(rounded[2], rounded[3]);
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words, more), order);
    _mm256_storeu_si256((__m256i *)to, all);
    const __m256i biased = _mm256_xor_si256(all, _mm256_set1_epi8(-128)); /* x + 128 */
    const __m256i eights = _mm256_sad_epu8(biased, _mm256_setzero_si256());
    const __m128i first = _mm256_castsi256_si128(eights), last = _mm256_extracti128_si256(eights, 1);
    sums[0] = _mm_cvtsi128_si32(first) + _mm_extract_epi32(first, 2) - 128 * 16;
    sums[1] = _mm_cvtsi128_si32(last) + _mm_extract_epi32(last, 2) - 128 * 16;
}

#endif

#endif
