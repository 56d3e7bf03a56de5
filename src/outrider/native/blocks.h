/* Weights as a .gguf file keeps them, in blocks of 32, and as numbers again when a product reads them. The numbers are
   those that the file's own reader makes, rounded to bfloat16 as the model's are: a pass has the same bits either way.

   Rows lie in fours, as a product reads them: for each block, the numbers of four rows, and behind all blocks the scales
   of four rows for each, of float16. Four bits (0 .. 15, with a scale and a minimum each): 32 words, word i with number i
   of each row, the first row's in the lowest bits. Eight bits (signed, with a scale): 32 bytes of each row. */

enum { PLAIN, FOUR, EIGHT };

typedef struct {
    const void *data; /* rows, each for one output */
    integer kind;
} Matrix;

#define GROUP 32
#define KEPT(kind) ((kind) == FOUR ? 64 : 128) /* bytes of a block of four rows, without their scales */
#define KNOWN(kind) ((kind) == FOUR ? 8 : 4)    /* their scales and minima */
INLINE integer bytes(integer kind, integer width) {
    return kind == FOUR ? width / GROUP * 20 : kind == EIGHT ? width / GROUP * 34 : width * (integer)sizeof(number);
}

#ifdef NARROW

/* Where memory is fetched to, and how many columns ahead. AMD's processors, and tiles a little, gain by the second cache. */
#ifndef SOON
#define SOON _MM_HINT_T0
#endif
#ifndef AHEAD
#define AHEAD 1
#endif

/* Scales, or scales and minima, in float. `ahead`: so many bytes further, memory is asked for what is read next. */
INLINE void scales(const char *from, integer count, integer ahead, float *to) {
    for (integer i = 0; i < count; i += 16) {
        _mm_prefetch(from + 2 * i + ahead, SOON);
        const __mmask16 there = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
        STORE(to + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, from + 2 * i)));
    }
}

/* The same of four rows in blocks, `known` [block, row, scale and minimum]. */
INLINE void know(const char *four, integer kind, integer width, integer ahead, float *known) {
    scales(four + width / GROUP * KEPT(kind), width / GROUP * KNOWN(kind), ahead, known);
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

/* All rows of a matrix, [outputs, width], of which there are four times some: for those who check them. */
void numbers(const Matrix *w, integer outputs, integer width, number *to) {
    for (integer i = 0; i < outputs; i += 4)
        unpack((const char *)w->data + i * bytes(w->kind, width), w->kind, width, 0, to + i * width);
}

#endif
