/* Weights as a .gguf file keeps them, in blocks of 32, and as numbers again when a product reads them. The numbers are
   those that the file's own reader makes, rounded to bfloat16 as the model's are: a pass has the same bits either way.

   Rows lie in fours, as a product reads them: for each block, the numbers of four rows, and behind all blocks the scales
   of four rows for each, of float16. Eight bits (signed, with a scale): 32 bytes of each row. Four bits (0 .. 15, with a
   scale and a minimum each), for sixteen lanes: 32 words, word i with number i of each row, the first row's in the lowest
   bits. For eight lanes: 32 bytes of two rows, the first one's in the lower bits, and 32 of the other two; where number
   8 i + 4 j + k of a row (k < 4) is in byte 16 j + 4 i + k. */

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

/* Where memory is fetched to, and how many columns ahead. AMD's processors, and tiles a little, gain by the second cache. */
#ifndef SOON
#define SOON _MM_HINT_T0
#endif
#ifndef AHEAD
#define AHEAD 1
#endif

#if defined(NARROW) || defined(HALVES) && LANES == 8
const integer block_lanes = LANES;

/* Scales, or scales and minima, in float. `ahead`: so many bytes further, memory is asked for what is read next. */
INLINE void scales(const char *from, integer count, integer ahead, float *to) {
#if LANES == 8
    for (integer i = 0; i < count; i += 4) {
        if (i % 32 == 0) _mm_prefetch(from + 2 * i + ahead, SOON);
        _mm_storeu_ps(to + i, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(from + 2 * i))));
    }
#else
    for (integer i = 0; i < count; i += 16) {
        _mm_prefetch(from + 2 * i + ahead, SOON);
        const __mmask16 there = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
        STORE(to + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, from + 2 * i)));
    }
#endif
}

/* The same of four rows in blocks, `known` [block, row, scale and minimum]. */
INLINE void know(const char *four, integer kind, integer width, integer ahead, float *known) {
    scales(four + width / GROUP * KEPT(kind), width / GROUP * KNOWN(kind), ahead, known);
}

#if LANES == 8
#include "opened8.h"
#else
#include "opened16.h"
#endif

/* All rows of a matrix, [outputs, width], of which there are four times some: for those who check them. */
void numbers(const Matrix *w, integer outputs, integer width, number *to) {
    for (integer i = 0; i < outputs; i += 4)
        unpack((const char *)w->data + i * bytes(w->kind, width), w->kind, width, 0, to + i * width);
}

#endif
