/* Weights in blocks of 32, and as numbers again when a product reads them. Four and eight bits are as a .gguf file keeps
   them: the numbers are those that the file's own reader makes, rounded to bfloat16 as the model's are. Twelve bits are
   any bfloat16 numbers. So a pass has the same bits either way.

   Rows lie in fours, as a product reads them: for each block, the numbers of four rows, and behind all blocks the scales
   of four rows for each, of float16. Eight bits (signed, with a scale): 32 bytes of each row. Four bits (0 .. 15, with a
   scale and a minimum each), for sixteen lanes: 32 words, word i with number i of each row, the first row's in the lowest
   bits. For eight lanes: 16 words of 16 bits of two rows in turn, and 16 of the other two; a row's word i has its
   numbers i, 8 + i, 16 + i and 24 + i, the first in the lowest bits.

   Twelve bits, for eight lanes: bfloat16 numbers of which hardly any has another upper byte than the sixteen that are
   most frequent in its four rows. A block has the lower bytes of each row, and then which upper byte each number has: 32
   bytes for two rows, the first row's in the lower four bits. Of a row's 32 bytes, byte 16 a + 8 b + 2 i + c is of number
   16 b + 8 c + 4 a + i. Behind all blocks lie the upper bytes, and then the address of other ones for single blocks, or 0.

   The other kinds of a .gguf file, for sixteen lanes. Numbers of five bits (FIVE): those of four, and then 32 bits for each
   row, the fifth ones. Of six (SIX): those of four, and then 32 bytes, byte i with the upper two bits of number i of each
   row, the first row's in the lowest ones; 32 is taken off each number, and there is no minimum, but a scale for each
   sixteen numbers. THIN has numbers of four bits with scale and minimum for each sixteen. The numbers of IQ4 stand for those
   of a table. Scales and minima of FOUR_K, FIVE_K, SIX, THIN and IQ4_K are signed bytes, in the order of `know`; before those
   of 256 numbers stand eight float16: what scales and minima of each row are multiplied by.

   W4A8 and W8A8 are four and eight bits for products of whole numbers (`integers.h`), in code without tiles. Rows lie in
   eights: a block has eight vectors, four with eight numbers each of rows 0, 1, 4 and 5, and four of rows 2, 3, 6 and 7.
   Of four bits two share their bytes, the first one's numbers in the lower bits. Behind
   all blocks lie eight scales for each, and of four bits eight minima. */

enum { PLAIN, FOUR, EIGHT, TWELVE, W4A8, W8A8, FOUR_K, FIVE, FIVE_K, SIX, THIN, IQ4, IQ4_K };

typedef struct {
    const void *data; /* rows, each for one output */
    integer kind;
} Matrix;

#define LINE 64 /* bytes that memory gives at a time */
#define GROUP 32
#define WIDE_GROUP 256 /* numbers that share what their scales are multiplied by */
#define SUPER(kind) ((kind) == FOUR_K || (kind) == FIVE_K || (kind) == SIX || (kind) == THIN || (kind) == IQ4_K)

/* How the numbers of a kind lie; kinds that differ in their scales alone share it. */
#define SHAPE(kind) ((kind) == FOUR_K ? FOUR : (kind) == FIVE_K ? FIVE : (kind) == IQ4_K ? IQ4 : (kind))
#define KEPT(shape) /* bytes of a block of four rows, without their scales */ \
    ((shape) == FOUR || (shape) == THIN || (shape) == IQ4 ? 64 \
     : (shape) == FIVE                                    ? 80 \
     : (shape) == SIX                                     ? 96 \
     : (shape) == EIGHT                                   ? 128 \
                                                          : 192)
#define SCALES(shape) ((shape) == THIN ? 16 : (shape) == EIGHT ? 4 : 8) /* scales, or scales and minima, of four rows */
#if LANES == 16
#define KNOWN(shape) SCALES(shape) /* floats that are made of these */
#else
#define KNOWN(shape) ((shape) == FOUR ? 32 : (shape) == EIGHT ? 4 : 0)
#endif
INLINE integer bytes(integer kind, integer width) {
    if (kind == PLAIN) return width * (integer)sizeof(number);
    if (kind == TWELVE) return width / GROUP * 48 + 16;
    if (kind == W4A8 || kind == W8A8) return width / GROUP * (kind == W4A8 ? 20 : 34);
    const integer shape = SHAPE(kind), numbers = width / GROUP * KEPT(shape);
    const integer scales = SUPER(kind) ? width / WIDE_GROUP * (16 + 8 * SCALES(shape)) : width / GROUP * 2 * SCALES(shape);
    return (numbers + scales) / 4;
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

#include "arranged.h"

/* All rows of a matrix, [outputs, width], of which there are four times some: for those who check them. */
void numbers(const Matrix *w, integer outputs, integer width, number *to, integer threads) {
#pragma omp parallel for num_threads((int)threads)
    for (integer i = 0; i < outputs; i += 4)
        unpack((const char *)w->data + i * bytes(w->kind, width), w->kind, width, 0, to + i * width);
}

#endif
