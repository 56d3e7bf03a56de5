/* Blocks opened in eight lanes: to floats, whose upper halves are the bfloat16 numbers that the weights are. */

#define TIMES_MORE 65536.0f /* 2^16: numbers are made so many times too large, and rounding gives it back */

#include "twelve.h"

/* x / 2^16, to eight significant bits, to the nearest, ties to even: of x is taken what rounding leaves of x - x / 2^16
   (Veltkamp's splitting; all 2^23 fractions were tried). */
INLINE vector shortened(vector x) {
    return SUB(x, MUL(x, ALL(1.0f - 1.0f / TIMES_MORE)));
}

/* The scales of four rows in blocks of four or eight bits, times 2^16. Of four bits: [block, i, row, scale and minimum], divided by 16^i.
   `ahead`: so many bytes further, memory is asked for what is read next. */
INLINE void know(const char *four, const int kind, int64_t width, int64_t ahead, float *known) {
    const char *from = four + width / BLOCK_WEIGHTS * KEPT(kind);
    for (int64_t g = 0; g < width / BLOCK_WEIGHTS; g++, known += KNOWN(kind), from += 2 * SCALES(kind)) {
        if (g * SCALES(kind) % 32 == 0) prefetch(from + ahead);
        if (kind == Q4) {
            vector some = MUL(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)), ALL(TIMES_MORE));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++, some = MUL(some, ALL(1.0f / 16))) STORE(known + LANES * i, some);
        } else {
            const __m128 some = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)from));
            _mm_storeu_ps(known, _mm_mul_ps(some, _mm_set1_ps(TIMES_MORE)));
        }
    }
}

/* The numbers of one of four rows in the block at `four`, with its scales or its upper bytes. */
INLINE void spread(
    const char *four, const int kind, const int row, const float *known, __m256i table, vector to[4]
) {
    if (kind == Q4) { /* four bits are read where they lie in a word: 16^i times too large */
        const __m256i two = _mm256_loadu_si256((const __m256i *)(four + row / 2 * 32));
        const __m256i own = row % 2 ? _mm256_srli_epi32(two, 16) : two;
        const vector least = ALL(known[2 * row + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const vector found = _mm256_cvtepi32_ps(_mm256_and_si256(own, _mm256_set1_epi32(15 << 4 * i)));
            to[i] = shortened(FMA(found, ALL(known[LANES * i + 2 * row]), least)); /* no product is rounded */
        }
    } else if (kind == BF12) {
        const __m256i lower = _mm256_loadu_si256((const __m256i *)(four + 32 * row));
        const __m256i two = _mm256_loadu_si256((const __m256i *)(four + 4 * 32 + row / 2 * 32));
        const __m256i which = _mm256_and_si256(row % 2 ? _mm256_srli_epi16(two, 4) : two, _mm256_set1_epi8(15));
        const __m256i higher = _mm256_shuffle_epi8(table, which), first = _mm256_set1_epi32((int)0xffff0000);
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const __m256i both = i ? _mm256_unpackhi_epi8(lower, higher) : _mm256_unpacklo_epi8(lower, higher);
            to[i] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            to[i + 1] = _mm256_castsi256_ps(_mm256_and_si256(both, first));
        }
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *)(four + 32 * row + 8 * i));
            to[i] = shortened(MUL(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), ALL(known[row])));
        }
    }
}

/* Memory is asked for a block, `ahead` bytes further: for the share of it that stands for `own` of the four rows. */
INLINE void fetch(const char *four, const int kind, const int from, const int own, int64_t ahead) {
    const int lines = KEPT(kind) / LINE;
#pragma GCC unroll 3
    for (int i = from * lines / 4; i < (from + own) * lines / 4; i++) prefetch(four + ahead + i * LINE);
}

/* Four rows of `width` numbers, as floats. */
INLINE void open_four(const char *four, const int kind, int64_t width, const float *known, int64_t ahead, float *to) {
    Reader reader = reader_of(four, kind, width);
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS, four += KEPT(kind), known += KNOWN(kind)) {
        const __m256i table = table_at(&reader, four, kind);
        fetch(four, kind, 0, 4, ahead);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            vector found[4];
            spread(four, kind, r, known, table, found);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) STORE(to + r * width + k + LANES * i, found[i]);
        }
    }
}

/* The same as the model keeps them. */
static void unpack(const char *four, int64_t kind, int64_t width, int64_t ahead, weight_t *to) {
    float known[KNOWN(Q4) * (width / BLOCK_WEIGHTS)], opened[4 * width];
    if (kind == Q4) {
        know(four, Q4, width, ahead, known);
        open_four(four, Q4, width, known, ahead, opened);
    } else if (kind == BF12) {
        open_four(four, BF12, width, known, ahead, opened);
    } else {
        know(four, Q8, width, ahead, known);
        open_four(four, Q8, width, known, ahead, opened);
    }
    for (int64_t k = 0; k < 4 * width; k++) to[k] = rounded(opened[k]);
}
