/* Weights as a .gguf file keeps them, in blocks of 32, and as numbers again when a product reads them. The numbers are
   those that the file's own reader makes, rounded to bfloat16 as the model's are: a pass has the same bits either way.

   A row of four bits: 16 bytes a block (numbers 0 .. 15; the low half of byte i is number 2 i), then for each block its
   scale and minimum. A row of eight bits: 32 bytes a block, then for each its scale. Scales and minima are of float16. */

enum { PLAIN, FOUR, EIGHT };

typedef struct {
    const void *data; /* rows, each for one output */
    integer kind;
} Matrix;

#define GROUP 32
#define AHEAD 8192 /* bytes between what is unpacked and what memory is asked for: into the second cache, since the first
                      holds little more than the numbers themselves */

INLINE integer bytes(integer kind, integer width) {
    return kind == FOUR ? width / GROUP * 20 : kind == EIGHT ? width / GROUP * 34 : width * (integer)sizeof(number);
}

#ifdef NARROW

/* Scales, or scales and minima, in float. */
INLINE void scales(const char *from, integer count, float *to) {
    for (integer i = 0; i < count; i += 16) {
        const __mmask16 there = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
        STORE(to + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, from + 2 * i)));
    }
}

/* A row of `width` numbers. */
INLINE void unpack(const char *row, integer kind, integer width, number *to) {
    const vector steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const integer groups = width / GROUP;
    float known[2 * groups + 16];
    if (kind == FOUR) {
        scales(row + 16 * groups, 2 * groups, known);
        for (integer i = 0; i < groups; i++) { /* all sixteen numbers are made, and looked up */
            _mm_prefetch(row + 20 * i + AHEAD, _MM_HINT_T1);
            const vector exact = FMA(steps, ALL(known[2 * i]), ALL(known[2 * i + 1])); /* no product is rounded */
            const __m512i table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(exact));
            const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(row + 16 * i)));
            const __m512i both = _mm512_ternarylogic_epi32(
                pairs, _mm512_slli_epi32(pairs, 12), _mm512_set1_epi32(0x000f000f), 0xa8 /* (a | b) & c */
            );
            _mm512_storeu_si512(to + i * GROUP, _mm512_permutexvar_epi16(both, table));
        }
    } else {
        scales(row + 32 * groups, groups, known);
        for (integer i = 0; i < groups; i++) {
            _mm_prefetch(row + 34 * i + AHEAD, _MM_HINT_T1);
            const __m128i *from = (const __m128i *)(row + 32 * i);
            const vector scale = ALL(known[i]);
            const vector low = MUL(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))), scale);
            const vector high = MUL(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1))), scale);
            _mm512_storeu_si512(to + i * GROUP, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* All rows of a matrix, [outputs, width]: for those who check them. */
void numbers(const Matrix *w, integer outputs, integer width, number *to) {
    for (integer i = 0; i < outputs; i++)
        unpack((const char *)w->data + i * bytes(w->kind, width), w->kind, width, to + i * width);
}

#endif
