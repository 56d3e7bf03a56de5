/* Vectors of float, for processors with AVX2 or AVX-512; numbers in memory, which are float or bfloat16.

   HALVES is set where weights are bfloat16, and WIDE where nothing else is. Without WIDE, keys and values are bfloat16
   too, and where the processor multiplies these, activations are rounded to it before a product (NARROW). Sums are
   always of float. Every sum here has one order, whatever is computed beside it: multiply-adds are written out, and the
   compiler contracts and reorders nothing. */

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "types.h"

#if !defined(NARROW) || !defined(__AMX_BF16__)
#undef TILES /* they multiply bfloat16 */
#endif

#ifdef __AVX512F__
#define LANES 16
typedef __m512 vector;
#define ZERO _mm512_setzero_ps()
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define ALL(x) _mm512_set1_ps(x)
#define ADD(a, b) _mm512_add_ps(a, b)
#define SUB(a, b) _mm512_sub_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define DIV(a, b) _mm512_div_ps(a, b)
#define MAX(a, b) _mm512_max_ps(a, b) /* b where either is no number */
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define NEAREST(a) _mm512_roundscale_ps(a, 8)
#define POWER(n) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23))
#define ZERO_BELOW(v, x, low) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), v)
#define ABOVE(a, b) (_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0) /* is any? */
#define MAYBE_ABOVE(a, b) (_mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ) != 0) /* or no number? */
#define WIDEN(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#else
#define LANES 8
typedef __m256 vector;
#define ZERO _mm256_setzero_ps()
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define ALL(x) _mm256_set1_ps(x)
#define ADD(a, b) _mm256_add_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define DIV(a, b) _mm256_div_ps(a, b)
#define MAX(a, b) _mm256_max_ps(a, b)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define NEAREST(a) _mm256_round_ps(a, 8)
#define POWER(n) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23))
#define ZERO_BELOW(v, x, low) _mm256_and_ps(v, _mm256_cmp_ps(x, low, _CMP_NLT_UQ))
#define ABOVE(a, b) (_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0)
#define MAYBE_ABOVE(a, b) (_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)) != 0)
#define WIDEN(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#endif

#ifdef HALVES
#define READ(p) WIDEN(p)
#else
#define READ(p) LOAD(p)
#endif

#if defined(HALVES) && !defined(WIDE)
#define HELD(p) WIDEN(p)
#else
#define HELD(p) LOAD(p)
#endif

#ifdef NARROW
#define STEP 32 /* numbers that one multiply-add takes */
#define LOADED(p) ((__m512bh)_mm512_loadu_si512(p))
typedef __m512bh operand;
#define TIMES(sum, x, w) _mm512_dpbf16_ps(sum, x, w)
#define INPUT(p) LOADED(p)
#define WEIGHT(p) LOADED(p)
#define UNIT 2 /* numbers in the width of a float */
#define UNITS(p) _mm512_castsi512_ps(_mm512_loadu_si512(p))
#define REPEATED(p) ((__m512bh)_mm512_set1_epi32(*(const int *)(p)))
#else
#define STEP LANES
typedef vector operand;
#define TIMES(sum, x, w) FMA(x, w, sum)
#define INPUT(p) LOAD(p)
#define WEIGHT(p) READ(p)
#define UNIT 1
#define UNITS(p) HELD(p)
#define REPEATED(p) ALL(*(p))
#endif

/* In a register from here on: the compiler would read it again for each use. */
#define PINNED(x) \
    __extension__({ \
        __typeof__(x) pinned = (x); \
        __asm__("" : "+v"(pinned)); \
        pinned; \
    })

/* To bfloat16, to the nearest, ties to even. */
INLINE uint16_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(HALVES) && !defined(WIDE)
INLINE kv_t to_held(float x) { return rounded(x); }
INLINE float from_held(kv_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}
#else
INLINE kv_t to_held(float x) { return x; }
INLINE float from_held(kv_t x) { return x; }
#endif

/* LANES numbers as the input of a product. */
INLINE void STORE_INPUT(act_t *to, vector x) {
#ifdef NARROW
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); /* what is too small for a normal number is 0 */
#else
    STORE(to, x);
#endif
}

/* `count` of them, which are LANES times some. */
INLINE void to_inputs(const float *from, int64_t count, act_t *to) {
    for (int64_t k = 0; k < count; k += LANES) STORE_INPUT(to + k, LOAD(from + k));
}

/* e^x for x <= 88; 0 below -87; no number stays none. */
INLINE vector exponential(vector x) {
    const vector low = ALL(-87.0f), bounded = MAX(low, x);
    const vector n = NEAREST(MUL(bounded, ALL(1.44269504f)));
    vector r = FMA(n, ALL(-0.693359375f), bounded), y = ALL(1.3888889e-3f);
    r = FMA(n, ALL(2.12194440e-4f), r);
    y = FMA(y, r, ALL(8.3333333e-3f));
    y = FMA(y, r, ALL(4.1666667e-2f));
    y = FMA(y, r, ALL(1.6666667e-1f));
    y = FMA(y, r, ALL(0.5f));
    y = FMA(y, r, ALL(1.0f));
    y = FMA(y, r, ALL(1.0f));
    return ZERO_BELOW(MUL(y, POWER(n)), x, low);
}

/* The sums of LANES vectors, as one vector: lane i has that of a[i]. */
INLINE vector sums(const vector a[LANES]) {
#if LANES == 16
    vector b[8], c[4], d[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) /* lanes 4k, 4k+2: of a[i], lanes 4k+1, 4k+3: of a[i + 8] */
        b[i] = ADD(_mm512_unpacklo_ps(a[i], a[i + 8]), _mm512_unpackhi_ps(a[i], a[i + 8]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* a[i], a[i + 8], a[i + 4], a[i + 12] in every four lanes */
        c[i] = ADD(_mm512_shuffle_ps(b[i], b[i + 4], 0x44), _mm512_shuffle_ps(b[i], b[i + 4], 0xee));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        d[i] = ADD(_mm512_shuffle_f32x4(c[i], c[i + 2], 0x88), _mm512_shuffle_f32x4(c[i], c[i + 2], 0xdd));
    /* four lanes each of a[0]..., a[0]..., a[2]..., a[2]... and of a[1], a[3] */
    const vector e = ADD(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
    /* now lanes are of 0 8 4 12, 2 10 6 14, 1 9 5 13, 3 11 7 15 */
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15), e);
#else
    vector b[4], c[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        b[i] = ADD(_mm256_unpacklo_ps(a[i], a[i + 4]), _mm256_unpackhi_ps(a[i], a[i + 4]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        c[i] = ADD(_mm256_shuffle_ps(b[i], b[i + 2], 0x44), _mm256_shuffle_ps(b[i], b[i + 2], 0xee));
    /* in four lanes a[0] a[4] a[2] a[6], and a[1] a[5] a[3] a[7] */
    const vector d = ADD(_mm256_permute2f128_ps(c[0], c[1], 0x20), _mm256_permute2f128_ps(c[0], c[1], 0x31));
    return _mm256_permutevar8x32_ps(d, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
#endif
}

/* Rows to columns: a[i] gets lane i of all. */
INLINE void transpose(vector a[LANES]) {
#if LANES == 16
    vector b[16], c[16];
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
        const vector low = _mm512_shuffle_f32x4(c[k], c[k + 4], 0x44), high = _mm512_shuffle_f32x4(c[k], c[k + 4], 0xee);
        const vector low2 = _mm512_shuffle_f32x4(c[k + 8], c[k + 12], 0x44);
        const vector high2 = _mm512_shuffle_f32x4(c[k + 8], c[k + 12], 0xee);
        a[k] = _mm512_shuffle_f32x4(low, low2, 0x88);
        a[k + 4] = _mm512_shuffle_f32x4(low, low2, 0xdd);
        a[k + 8] = _mm512_shuffle_f32x4(high, high2, 0x88);
        a[k + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
#else
    vector b[8], c[8];
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
#endif
}

INLINE float sum_of(vector v) {
    float lanes[LANES], total = 0;
    STORE(lanes, v);
    for (int i = 0; i < LANES; i++) total += lanes[i];
    return total;
}

/* The largest; what is no number may be passed over. */
INLINE float most_of(vector v) {
#if LANES == 16
    return _mm512_reduce_max_ps(v);
#else
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#endif
}
