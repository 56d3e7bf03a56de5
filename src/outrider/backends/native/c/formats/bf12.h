/* BF12: bfloat16 weights in twelve bits, to the last bit. Most upper bytes, a sign and seven bits of the exponent, are
   one of sixteen: of normally distributed weights one in some 10,000 is not. */

#ifndef OUTRIDER_BF12_H
#define OUTRIDER_BF12_H

#include <stdlib.h>

#include "../threads.h"
#include "layout.h"

/* Sixteen upper bytes of one block. */
typedef struct {
    int64_t block; /* of the four rows; -1: there are no more */
    uint8_t upper[16], unused[8];
} BlockTable;

/* Behind the blocks of four rows. */
typedef struct {
    uint8_t upper[16];
    const BlockTable *others; /* of blocks with other upper bytes, ascending; NULL: none */
    uint8_t unused[40];
} RowTable;

INLINE RowTable *row_table(const char *four, int64_t width) {
    return (RowTable *)(four + width / BLOCK_WEIGHTS * QUANT_BYTES(BF12));
}

/* Finds the upper bytes of the blocks of four rows, one after the other. */
typedef struct {
    bytes_t usual;
    const char *from, *next; /* the first block; the next one with a table of its own, or NULL */
    const BlockTable *other;
} TableReader;

INLINE TableReader table_reader(const char *four, const int kind, int64_t width) {
    TableReader reader = {(bytes_t){0}, four, NULL, NULL};
    if (kind == BF12) {
        const RowTable *table = row_table(four, width);
        reader.usual = b_load_twice(table->upper);
        reader.other = table->others;
        if (table->others) reader.next = four + table->others->block * QUANT_BYTES(BF12);
    }
    return reader;
}

/* The upper bytes of the block at `four`. */
INLINE bytes_t table_at(TableReader *reader, const char *four, const int kind) {
    if (kind != BF12 || four != reader->next) return reader->usual;
    const bytes_t own = b_load_twice(reader->other->upper);
    reader->other++;
    reader->next = reader->other->block < 0 ? NULL : reader->from + reader->other->block * QUANT_BYTES(BF12);
    return own;
}

/* The most frequent bytes, at most sixteen, most frequent first. Returns how many distinct bytes there are. */
static int most_frequent(const int64_t counts[256], uint8_t upper[16]) {
    uint8_t byte[256];
    int distinct = 0;
    for (int i = 0; i < 256; i++)
        if (counts[i]) byte[distinct++] = (uint8_t)i;
    for (int i = 0; i < 16 && i < distinct; i++)
        for (int j = i + 1; j < distinct; j++)
            if (counts[byte[j]] > counts[byte[i]]) {
                const uint8_t one = byte[i];
                byte[i] = byte[j];
                byte[j] = one;
            }
    for (int i = 0; i < 16; i++) upper[i] = byte[i < distinct ? i : 0];
    return distinct;
}

/* Count the upper bytes of the 128 weights of a block. */
static void count_block(const weight_t *four, int64_t width, int64_t counts[256]) {
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < BLOCK_WEIGHTS; i++) counts[four[r * width + i] >> 8]++;
}

/* The lower and the upper bytes of a row's block, in the order of `layout.h`. */
static void split_bytes(const weight_t *row, uint64_t lower[4], uint64_t upper[4]) {
    typedef uint16_t eight_t __attribute__((vector_size(16)));
    for (int b = 0; b < 2; b++) {
        eight_t one, two;
        memcpy(&one, row + 16 * b, sizeof one);
        memcpy(&two, row + 16 * b + 8, sizeof two);
        const eight_t low = (one & 255) | two << 8, high = one >> 8 | (two & 0xff00);
        for (int a = 0; a < 2; a++) {
            memcpy(lower + 2 * a + b, (const char *)&low + 8 * a, 8);
            memcpy(upper + 2 * a + b, (const char *)&high + 8 * a, 8);
        }
    }
}

/* Write one block with these upper bytes. Returns 0 where a weight has another one. */
static int write_block(const weight_t *four, int64_t width, const uint8_t upper[16], char *to) {
    bytes_t all = (bytes_t){0} - 1, index[4];
    for (int r = 0; r < 4; r++, four += width) {
        uint64_t lower[4], higher[4];
        bytes_t known = {0};
        split_bytes(four, lower, higher);
        memcpy(to + 32 * r, lower, 32);
        index[r] = (bytes_t){0};
        for (int i = 15; i >= 0; i--) { /* a byte that stands there twice has its last index */
            const bytes_t same = (bytes_t)(b_load(higher) == upper[i]) & ~known;
            index[r] |= same & (uint8_t)i;
            known |= same;
        }
        all &= known;
    }
    for (int r = 0; r < 4; r += 2) {
        const bytes_t both = index[r] | index[r + 1] << 4;
        memcpy(to + 4 * 32 + r / 2 * 32, &both, 32);
    }
    const bytes_t every = (bytes_t){0} - 1;
    return !memcmp(&all, &every, sizeof all);
}

/* Four rows of bfloat16 weights as BF12. `own`: workspace for a table of each block and one more; `others`: `capacity`
   tables that all rows share, of which `used` are taken. Returns 0 where that is too few, or where a block has more
   than sixteen upper bytes. */
static int pack_four(
    const weight_t *four, int64_t width, char *to, BlockTable *own, BlockTable *others, int64_t capacity, int64_t *used
) {
    int64_t counts[256] = {0}, count = 0;
    RowTable *table = row_table(to, width);
    memset(table, 0, sizeof *table);
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) count_block(four + k, width, counts);
    most_frequent(counts, table->upper);
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) {
        char *block = to + k / BLOCK_WEIGHTS * QUANT_BYTES(BF12);
        if (write_block(four + k, width, table->upper, block)) continue;
        int64_t here[256] = {0};
        count_block(four + k, width, here);
        own[count] = (BlockTable){.block = k / BLOCK_WEIGHTS};
        if (most_frequent(here, own[count].upper) > 16) return 0;
        write_block(four + k, width, own[count].upper, block);
        count++;
    }
    if (!count) return 1;
    own[count++] = (BlockTable){.block = -1};
    const int64_t first = __atomic_fetch_add(used, count, __ATOMIC_RELAXED);
    if (first + count > capacity) return 0;
    memcpy(others + first, own, count * sizeof *own);
    table->others = others + first;
    return 1;
}

typedef struct {
    const weight_t *from;
    int64_t outputs, width;
    char *to;
    BlockTable *others;
    int64_t capacity, *used, *done;
} PackBf12;

static void pack_bf12_task(const Thread *thread, const void *call) {
    const PackBf12 *of = call;
    const int64_t width = of->width, fours = of->outputs / 4;
    BlockTable *own = malloc((width / BLOCK_WEIGHTS + 1) * sizeof *own);
    int done = own != NULL;
    for (int64_t i = 4 * share_begin(thread, fours); done && i < 4 * share_end(thread, fours); i += 4)
        done = pack_four(
            of->from + i * width, width, of->to + i * row_bytes(BF12, width), own, of->others, of->capacity, of->used
        );
    if (!done) __atomic_store_n(of->done, 0, __ATOMIC_RELAXED);
    free(own);
}

int64_t pack_bf12(
    const weight_t *from, int64_t outputs, int64_t width, char *to, void *others, int64_t capacity, int64_t threads
) {
    int64_t done = 1, used = 0;
    run(threads, NULL, 0, pack_bf12_task, &(PackBf12){from, outputs, width, to, others, capacity, &used, &done});
    return done;
}

#endif
