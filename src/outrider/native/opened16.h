/* Blocks opened in sixteen lanes: to pairs of bfloat16, as products of these read them. */

/* The scales of four rows in blocks: [block, row, scale and minimum], or [block, row]. `ahead`: so many bytes further,
   memory is asked for what is read next. */
INLINE void know(const char *four, integer kind, integer width, integer ahead, float *known) {
    const char *from = four + width / GROUP * KEPT(kind);
    const integer count = width / GROUP * SCALES(kind);
    for (integer i = 0; i < count; i += 16) {
        _mm_prefetch(from + 2 * i + ahead, SOON);
        const __mmask16 there = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
        STORE(known + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, from + 2 * i)));
    }
}

/* The numbers of one block of four rows, which lie at `four`. */
INLINE void spread(const char *four, const int kind, const float *known, integer ahead, operand to[4]) {
    if (kind == FOUR) { /* all sixteen numbers are made, and looked up */
        const vector steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i words = _mm512_loadu_si512(four);
        _mm_prefetch(four + ahead, SOON);
#pragma GCC unroll 2
        for (int r = 0; r < 4; r += 2) { /* two rows share a table of 32: the fifth bit says whose */
            const vector one = FMA(steps, ALL(known[2 * r]), ALL(known[2 * r + 1])); /* no product is rounded */
            const vector two = FMA(steps, ALL(known[2 * r + 2]), ALL(known[2 * r + 3]));
            const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(two, one);
            const __m512i first = _mm512_and_si512(_mm512_srli_epi16(words, 4 * r), _mm512_set1_epi16(15));
            const __m512i second = _mm512_or_si512(_mm512_srli_epi16(words, 4 * r + 4), _mm512_set1_epi16(16));
            to[r] = (operand)_mm512_permutexvar_epi16(first, table);
            to[r + 1] = (operand)_mm512_permutexvar_epi16(second, table);
        }
    } else {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const __m128i *from = (const __m128i *)(four + 32 * r);
            const vector scale = ALL(known[r]);
            const vector low = MUL(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))), scale);
            const vector high = MUL(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1))), scale);
            to[r] = (operand)_mm512_cvtne2ps_pbh(high, low);
        }
        _mm_prefetch(four + ahead, SOON);
        _mm_prefetch(four + ahead + 64, SOON);
    }
}

/* Four rows of `width` numbers. */
INLINE void unpack(const char *four, integer kind, integer width, integer ahead, number *to) {
    const integer groups = width / GROUP;
    float known[8 * groups + 16];
    operand found[4];
    know(four, kind, width, ahead, known);
#define OPENED(kind)                                                                                             \
    for (integer i = 0; i < groups; i++) {                                                                       \
        spread(four + i * KEPT(kind), kind, known + i * KNOWN(kind), ahead, found);                                                                     \
        for (int r = 0; r < 4; r++) _mm512_storeu_si512(to + r * width + i * GROUP, (__m512i)found[r]);          \
    }
    if (kind == FOUR) {
        OPENED(FOUR)
    } else {
        OPENED(EIGHT)
    }
#undef OPENED
}
