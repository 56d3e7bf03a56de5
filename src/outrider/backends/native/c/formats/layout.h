/* How the rows of a matrix lie in memory, by kind (`abi.h`).

   PLAIN: a row of weights for each output. In all other kinds, weights lie in blocks of 32. Q4 and Q8 are what a .gguf
   file holds, in another order: opened, they are the weights that gguf-py's reader makes, rounded to bfloat16. BF12
   holds any bfloat16 weights. So a pass has the same bits either way.

   Rows lie in fours, as a product reads them: for each block the quants of four rows, and after all blocks the scales
   of four rows for each, as float16.

   Q8 (signed, with a scale): 32 bytes of each row.

   Q4 (0 .. 15, with a scale and a minimum each), sixteen lanes: 32 words, word i with quant i of each row, the first
   row's in the lowest bits. Eight lanes: 16 words of 16 bits of two rows in turn, and 16 of the other two; a row's
   word i has its quants i, 8 + i, 16 + i and 24 + i, the first in the lowest bits.

   BF12, eight lanes: bfloat16 weights, hardly any of which has another upper byte than the sixteen that are most
   frequent in its four rows. A block has the lower bytes of each row, and then which upper byte each weight has: 32
   bytes for two rows, the first row's in the lower four bits. Of a row's 32 bytes, byte 16 a + 8 b + 2 i + c is of
   weight 16 b + 8 c + 4 a + i. Behind all blocks lie the upper bytes, and then the address of other ones for single
   blocks, or 0.

   The other kinds of .gguf files, sixteen lanes. Q5: quants as Q4's, and then 32 bits for each row, the fifth ones.
   Q6K: as Q4's, and then 32 bytes, byte i with the upper two bits of quant i of each row, the first row's in the
   lowest ones; 32 is taken off each quant, and there is no minimum, but a scale for each sixteen. Q3K: as Q4, with
   scale and minimum for each sixteen. IQ4: quants stand for the values of a table. MXFP4: the same, with a byte for
   each row in place of the scales, the exponent as a .gguf file has it. Kinds with K have superblocks:
   their scales and minima are signed bytes, in the order of `load_scales`; before those of 256 weights stand eight
   float16, by which those of each row are multiplied. Kinds for integer products: `int8.h`. */

#ifndef OUTRIDER_LAYOUT_H
#define OUTRIDER_LAYOUT_H

#include "../simd/vector.h"

#define SUPERBLOCK 256 /* weights */

#define IS_INTEGER(kind) ((kind) >= INTEGER)
#define HAS_SUPERBLOCKS(kind) ((kind) == Q4K || (kind) == Q5K || (kind) == Q6K || (kind) == Q3K || (kind) == IQ4K)

/* How the quants of a kind lie; kinds that differ in their scales alone share it. */
#define SHAPE(kind) ((kind) == Q4K ? Q4 : (kind) == Q5K ? Q5 : (kind) == IQ4K ? IQ4 : (kind))

/* Bytes of a block of four rows, without their scales. */
#define QUANT_BYTES(shape)                                                                                             \
    ((shape) == Q4 || (shape) == Q3K || (shape) == IQ4 || (shape) == MXFP4 ? 64                                        \
     : (shape) == Q5                                   ? 80                                                            \
     : (shape) == Q6K                                  ? 96                                                            \
     : (shape) == Q8                                   ? 128                                                           \
                                                       : 192)

/* Scales and minima of a block of four rows, and the float32 that `load_scales` makes of them. */
#define SCALE_COUNT(shape) ((shape) == Q3K ? 16 : (shape) == Q8 ? 4 : 8)
#if LANES == 16
#define SCALE_FLOATS(shape) SCALE_COUNT(shape)
#define MOST_SCALE_FLOATS (LANES / 4 * 16) /* for each block of LANES rows */
#else
#define SCALE_FLOATS(shape) ((shape) == Q4 ? 32 : (shape) == Q8 ? 4 : 0)
#define MOST_SCALE_FLOATS 32 /* for each block of four rows */
#endif

/* Bytes of a row of `width` weights. */
INLINE int64_t row_bytes(int64_t kind, int64_t width) {
    if (kind == PLAIN) return width * (int64_t)sizeof(weight_t);
    if (kind == BF12) return width / BLOCK_WEIGHTS * 48 + 16;
    const int64_t shape = SHAPE(kind), quants = width / BLOCK_WEIGHTS * QUANT_BYTES(shape);
    const int64_t scales = HAS_SUPERBLOCKS(kind) ? width / SUPERBLOCK * (16 + 8 * SCALE_COUNT(shape))
                           : kind == MXFP4       ? width / BLOCK_WEIGHTS * 4
                                                 : width / BLOCK_WEIGHTS * 2 * SCALE_COUNT(shape);
    return (quants + scales) / 4;
}

/* Builds that open blocks. */
#if defined(BF16_ACTS) || defined(BF16_WEIGHTS) && LANES == 8
#define OPENS_BLOCKS
#endif

#endif
