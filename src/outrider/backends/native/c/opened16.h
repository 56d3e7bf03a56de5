/* Blocks opened in sixteen lanes: to pairs of bfloat16, as products of these read them. */

/* What is known of four rows in blocks, as floats: for each block and row scale and minimum; EIGHT: the scale; SIX: the
   scales of its halves; THIN: scale and minimum of each half. `ahead`: so many bytes further, memory is asked for what is
   read next. */
INLINE void know(const char *four, int64_t kind, int64_t width, int64_t ahead, float *known) {
    const int64_t shape = SHAPE(kind), count = width / BLOCK_WEIGHTS * SCALES(shape);
    const char *from = four + width / BLOCK_WEIGHTS * KEPT(shape);
    if (!SUPER(kind)) {
        for (int64_t i = 0; i < count; i += 16) {
            prefetch(from + 2 * i + ahead);
            const __mmask16 there = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
            STORE(known + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, from + 2 * i)));
        }
        return;
    }
    const __m512i halves = _mm512_setr_epi32(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7);
    const __m512i twice = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    for (int64_t k = 0; k < width; k += WIDE_GROUP) {
        const __m256 own = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
        const vector by = _mm512_permutexvar_ps(kind == Q3K ? halves : twice, _mm512_castps256_ps512(own));
        from += 16;
        for (int64_t i = 0; i < WIDE_GROUP / BLOCK_WEIGHTS * SCALES(shape); i += 16, from += 16, known += 16) {
            const __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
            STORE(known, MUL(_mm512_cvtepi32_ps(scales), by)); /* no product is rounded */
            if (i % 64 == 0) prefetch(from + ahead);
        }
    }
}

/* The weights that numbers of four bits stand for, 0 .. 15 or those of a table; `from`: what is added to them. */
INLINE vector table_of(const int shape, float from, const float *known) {
    const vector steps = shape == IQ4
                             ? _mm512_setr_ps(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
                             : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return FMA(ADD(steps, ALL(from)), ALL(known[0]), ALL(known[1])); /* no product is rounded */
}

/* Signed numbers with a scale for each sixteen. */
INLINE operand scaled_halves(__m512i low, __m512i high, float first, float second) {
    return (operand)_mm512_cvtne2ps_pbh(
        MUL(_mm512_cvtepi32_ps(high), ALL(second)), MUL(_mm512_cvtepi32_ps(low), ALL(first))
    );
}

/* The numbers of one block of four rows, which lie at `four`. */
INLINE void spread(const char *four, const int shape, const float *known, int64_t ahead, operand to[4]) {
    prefetch(four + ahead);
    if (shape == Q8) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const __m128i *from = (const __m128i *)(four + 32 * r);
            to[r] = scaled_halves(
                _mm512_cvtepi8_epi32(_mm_loadu_si128(from)), _mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)), known[r], known[r]
            );
        }
        prefetch(four + ahead + 64);
        return;
    }
    const __m512i words = _mm512_loadu_si512(four), nibble = _mm512_set1_epi16(15), fifth = _mm512_set1_epi16(16);
    if (shape == Q6K) {
        const __m512i upper = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(four + 64)));
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const __m512i low = _mm512_and_si512(_mm512_srli_epi16(words, 4 * r), nibble);
            const __m512i two = _mm512_and_si512(_mm512_srli_epi16(upper, 2 * r), _mm512_set1_epi16(3));
            const __m512i all = _mm512_sub_epi16(_mm512_or_si512(low, _mm512_slli_epi16(two, 4)), _mm512_set1_epi16(32));
            to[r] = scaled_halves(
                _mm512_cvtepi16_epi32(_mm512_castsi512_si256(all)), _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(all, 1)),
                known[2 * r], known[2 * r + 1]
            );
        }
        return;
    }
    if (shape == Q4 || shape == IQ4) {
#pragma GCC unroll 2
        for (int r = 0; r < 4; r += 2) { /* two rows share a table of 32: the fifth bit says whose */
            const vector one = table_of(shape, 0, known + 2 * r), two = table_of(shape, 0, known + 2 * r + 2);
            const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(two, one);
            const __m512i first = _mm512_and_si512(_mm512_srli_epi16(words, 4 * r), nibble);
            const __m512i second = _mm512_or_si512(_mm512_srli_epi16(words, 4 * r + 4), fifth);
            to[r] = (operand)_mm512_permutexvar_epi16(first, table);
            to[r + 1] = (operand)_mm512_permutexvar_epi16(second, table);
        }
        return;
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) { /* a table of 32 for each row: FIVE's own, or THIN's of both halves */
        const float *own = known + (shape == Q3K ? 4 : 2) * r;
        const vector one = table_of(shape, 0, own), two = table_of(shape, shape == Q5 ? 16 : 0, own + (shape == Q3K ? 2 : 0));
        const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(two, one);
        const __m512i low = _mm512_and_si512(_mm512_srli_epi16(words, 4 * r), nibble);
        const __mmask32 upper = shape == Q3K ? 0xffff0000u : word_at((const uint8_t *)four + 64 + 4 * r);
        const __m512i all = _mm512_or_si512(low, _mm512_maskz_mov_epi16(upper, fifth));
        to[r] = (operand)_mm512_permutexvar_epi16(all, table);
    }
}

/* Do the same for each shape: `DO(shape)`. */
#define EACH_SHAPE(shape, DO) \
    switch (shape) {          \
    case Q4: DO(Q4) break; \
    case Q5: DO(Q5) break; \
    case Q6K: DO(Q6K) break;   \
    case Q3K: DO(Q3K) break; \
    case IQ4: DO(IQ4) break;   \
    default: DO(Q8)         \
    }

/* Four rows of `width` numbers. */
INLINE void unpack(const char *four, int64_t kind, int64_t width, int64_t ahead, weight_t *to) {
    const int64_t groups = width / BLOCK_WEIGHTS;
    float known[SCALES(Q3K) * groups + 16];
    operand found[4];
    know(four, kind, width, ahead, known);
#define OPENED(shape)                                                                                       \
    for (int64_t i = 0; i < groups; i++) {                                                                  \
        spread(four + i * KEPT(shape), shape, known + i * KNOWN(shape), ahead, found);                      \
        for (int r = 0; r < 4; r++) _mm512_storeu_si512(to + r * width + i * BLOCK_WEIGHTS, (__m512i)found[r]);     \
    }
    EACH_SHAPE(SHAPE(kind), OPENED)
#undef OPENED
}
