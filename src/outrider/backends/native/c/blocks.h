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

#define LINE 64 /* bytes that memory gives at a time */
#define WIDE_GROUP 256 /* numbers that share what their scales are multiplied by */
#define SUPER(kind) ((kind) == Q4K || (kind) == Q5K || (kind) == Q6K || (kind) == Q3K || (kind) == IQ4K)

/* How the numbers of a kind lie; kinds that differ in their scales alone share it. */
#define SHAPE(kind) ((kind) == Q4K ? Q4 : (kind) == Q5K ? Q5 : (kind) == IQ4K ? IQ4 : (kind))
#define KEPT(shape) /* bytes of a block of four rows, without their scales */ \
    ((shape) == Q4 || (shape) == Q3K || (shape) == IQ4 ? 64 \
     : (shape) == Q5                                    ? 80 \
     : (shape) == Q6K                                     ? 96 \
     : (shape) == Q8                                   ? 128 \
                                                          : 192)
#define SCALES(shape) ((shape) == Q3K ? 16 : (shape) == Q8 ? 4 : 8) /* scales, or scales and minima, of four rows */
#if LANES == 16
#define KNOWN(shape) SCALES(shape) /* floats that are made of these */
#else
#define KNOWN(shape) ((shape) == Q4 ? 32 : (shape) == Q8 ? 4 : 0)
#endif
INLINE int64_t bytes(int64_t kind, int64_t width) {
    if (kind == PLAIN) return width * (int64_t)sizeof(weight_t);
    if (kind == BF12) return width / BLOCK_WEIGHTS * 48 + 16;
    if (kind == W4A8 || kind == W8A8) return width / BLOCK_WEIGHTS * (kind == W4A8 ? 20 : 34);
    const int64_t shape = SHAPE(kind), numbers = width / BLOCK_WEIGHTS * KEPT(shape);
    const int64_t scales = SUPER(kind) ? width / WIDE_GROUP * (16 + 8 * SCALES(shape)) : width / BLOCK_WEIGHTS * 2 * SCALES(shape);
    return (numbers + scales) / 4;
}

static struct {
    int64_t first_cache; /* bytes of the first-level cache */
    int64_t second;      /* 1: weights are prefetched into the second-level cache, else into the first */
    int64_t ahead;       /* columns of weights from the one that is multiplied to the one that is prefetched */
} machine = {32768, 0, 1};

void tune(int64_t first_cache, int64_t second, int64_t ahead) {
    machine.first_cache = first_cache;
    machine.second = second;
    machine.ahead = ahead;
}

INLINE void prefetch(const void *line) {
    if (machine.second)
        _mm_prefetch(line, _MM_HINT_T1);
    else
        _mm_prefetch(line, _MM_HINT_T0);
}

#if defined(NARROW) || defined(HALVES) && LANES == 8
#if LANES == 8
#include "opened8.h"
#else
#include "opened16.h"
#endif

#include "arranged.h"

typedef struct {
    const Matrix *w;
    int64_t outputs, width;
    weight_t *to;
} Unpacking;

static void unpack_task(const Team *team, const void *call) {
    const Unpacking *of = call;
    const int64_t kind = of->w->kind, width = of->width, fours = of->outputs / 4;
    for (int64_t i = 4 * own_first(team, fours); i < 4 * own_last(team, fours); i += 4)
        unpack((const char *)of->w->data + i * bytes(kind, width), kind, width, 0, of->to + i * width);
}

/* All rows of a matrix, [outputs, width], of which there are four times some: for those who check them. */
void unpack_matrix(const Matrix *w, int64_t outputs, int64_t width, weight_t *to, int64_t threads) {
    run(threads, NULL, 0, unpack_task, &(Unpacking){w, outputs, width, to});
}

#endif
