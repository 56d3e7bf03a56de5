/* Weights as a .gguf file keeps them, in blocks of 32, and as numbers again when a product reads them. The numbers are
   those that the file's own reader makes, rounded to bfloat16 as the model's are: a pass has the same bits either way.

   Rows lie in fours, as a product reads them: for each block, the numbers of four rows, and behind all blocks the scales
   of four rows for each, of float16. Eight bits (signed, with a scale): 32 bytes of each row. Four bits (0 .. 15, with a
   scale and a minimum each), for sixteen lanes: 32 words, word i with number i of each row, the first row's in the lowest
   bits. For eight lanes: 16 words of 16 bits of two rows in turn, and 16 of the other two; a row's word i has its
   numbers i, 8 + i, 16 + i and 24 + i, the first in the lowest bits. */

enum { PLAIN, FOUR, EIGHT };

typedef struct {
    const void *data; /* rows, each for one output */
    integer kind;
} Matrix;

#define GROUP 32
#define KEPT(kind) ((kind) == FOUR ? 64 : 128) /* bytes of a block of four rows, without their scales */
#define SCALES(kind) ((kind) == FOUR ? 8 : 4)   /* their scales, or scales and minima */
#if LANES == 16
#define KNOWN(kind) SCALES(kind) /* floats that are made of these */
#else
#define KNOWN(kind) ((kind) == FOUR ? 32 : 4)
#endif
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
