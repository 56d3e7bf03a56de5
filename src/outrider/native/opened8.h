/* Blocks opened in eight lanes: to floats, whose upper halves are the bfloat16 numbers that the weights are. */

#define TIMES_MORE 65536.0f /* 2^16: numbers are made so many times too large, and rounding gives it back */

/* x / 2^16, to eight significant bits, to the nearest, ties to even: of x is taken what rounding leaves of x - x / 2^16
   (Veltkamp's splitting; all 2^23 fractions were tried). */
INLINE vector shortened(vector x) {
    return SUB(x, MUL(x, ALL(1.0f - 1.0f / TIMES_MORE)));
}

/* The scales of four rows in blocks, times 2^16. Of four bits: [block, i, row, scale and minimum], divided by 16^i.
   `ahead`: so many bytes further, memory is asked for what is read next. */
INLINE void know(const char *four, const int kind, integer width, integer ahead, float *known) {
    const char *from = four + width / GROUP * KEPT(kind);
    for (integer g = 0; g < width / GROUP; g++, known += KNOWN(kind), from += 2 * SCALES(kind)) {
        if (g * SCALES(kind) % 32 == 0) _mm_prefetch(from + ahead, SOON);
        if (kind == FOUR) {
            vector some = MUL(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)), ALL(TIMES_MORE));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++, some = MUL(some, ALL(1.0f / 16))) STORE(known + LANES * i, some);
        } else {
            const __m128 some = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)from));
            _mm_storeu_ps(known, _mm_mul_ps(some, _mm_set1_ps(TIMES_MORE)));
        }
    }
}

/* The numbers of one of four rows in the block at `four`, whose scales are `known`. */
INLINE void spread(const char *four, const int kind, const int row, const float *known, vector to[4]) {
    if (kind == FOUR) { /* four bits are read where they lie in a word: 16^i times too large */
        const __m256i two = _mm256_loadu_si256((const __m256i *)(four + row / 2 * 32));
        const __m256i own = row % 2 ? _mm256_srli_epi32(two, 16) : two;
        const vector least = ALL(known[2 * row + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const vector found = _mm256_cvtepi32_ps(_mm256_and_si256(own, _mm256_set1_epi32(15 << 4 * i)));
            to[i] = shortened(FMA(found, ALL(known[LANES * i + 2 * row]), least)); /* no product is rounded */
        }
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *)(four + 32 * row + 8 * i));
            to[i] = shortened(MUL(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), ALL(known[row])));
        }
    }
}

/* Memory is asked for a block, `ahead` bytes further. */
INLINE void fetch(const char *four, const int kind, integer ahead) {
    _mm_prefetch(four + ahead, SOON);
    if (kind == EIGHT) _mm_prefetch(four + ahead + 64, SOON);
}

/* Four rows of `width` numbers, as floats. */
INLINE void open_four(const char *four, const int kind, integer width, const float *known, integer ahead, float *to) {
    for (integer k = 0; k < width; k += GROUP, four += KEPT(kind), known += KNOWN(kind)) {
        fetch(four, kind, ahead);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            vector found[4];
            spread(four, kind, r, known, found);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) STORE(to + r * width + k + LANES * i, found[i]);
        }
    }
}

/* The same as the model keeps them. */
static void unpack(const char *four, integer kind, integer width, integer ahead, number *to) {
    float known[KNOWN(FOUR) * (width / GROUP)], opened[4 * width];
    if (kind == FOUR) {
        know(four, FOUR, width, ahead, known);
        open_four(four, FOUR, width, known, ahead, opened);
    } else {
        know(four, EIGHT, width, ahead, known);
        open_four(four, EIGHT, width, known, ahead, opened);
    }
    for (integer k = 0; k < 4 * width; k++) to[k] = rounded(opened[k]);
}
