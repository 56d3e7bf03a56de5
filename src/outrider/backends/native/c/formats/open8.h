/* Blocks opened in eight lanes, to float32 whose upper halves are the bfloat16 weights. */

#ifndef OUTRIDER_OPEN8_H
#define OUTRIDER_OPEN8_H

#include "../machine.h"
#include "bf12.h"
#include "layout.h"

#define ENLARGED 65536.0f /* 2^16: weights are made so many times too large, and rounding divides by it */

/* x / 2^16, rounded to eight significant bits, to nearest even: of x is left what rounding leaves of x - x / 2^16
   (Veltkamp's splitting; exact for all 2^23 fractions, as a test shows). */
INLINE vec_t round_to_bf16(vec_t x) {
    return v_sub(x, v_mul(x, v_set1(1.0f - 1.0f / ENLARGED)));
}

/* The scales of four rows of Q4 or Q8, times 2^16. Q4: [block, i, row, scale and minimum], divided by 16^i. `ahead`:
   distance in bytes of what is prefetched. */
INLINE void load_scales(const char *four, const int kind, int64_t width, int64_t ahead, float *scales) {
    const char *from = four + width / BLOCK_WEIGHTS * QUANT_BYTES(kind);
    for (int64_t g = 0; g < width / BLOCK_WEIGHTS; g++, scales += SCALE_FLOATS(kind), from += 2 * SCALE_COUNT(kind)) {
        if (g * SCALE_COUNT(kind) % 32 == 0) prefetch(from + ahead);
        if (kind == Q4) {
            vec_t some = v_mul(v_load_f16(from), v_set1(ENLARGED));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++, some = v_mul(some, v_set1(1.0f / 16))) v_store(scales + LANES * i, some);
        } else {
            scale_four_f16(from, ENLARGED, scales);
        }
    }
}

/* The weights of one of four rows in the block at `four`, with its scales, or for BF12 with its upper bytes. */
INLINE void open_row(const char *four, const int kind, const int row, const float *scales, bytes_t table, vec_t to[4]) {
    if (kind == Q4) { /* quants are read where they lie in a word: 16^i times too large */
        const ints_t two = i_load(four + row / 2 * 32);
        const ints_t own = row % 2 ? (ints_t)((uint32_t __attribute__((vector_size(4 * LANES)))) two >> 16) : two;
        const vec_t least = v_set1(scales[2 * row + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const vec_t quants = i_to_floats(own & (15 << 4 * i));
            to[i] = round_to_bf16(v_fma(quants, v_set1(scales[LANES * i + 2 * row]), least)); /* the product is exact */
        }
    } else if (kind == BF12) {
        const bytes_t lower = b_load(four + 32 * row), two = b_load(four + 4 * 32 + row / 2 * 32);
        const bytes_t upper = b_lookup(table, (row % 2 ? b_shift_right(two, 4) : two) & 15);
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const ints_t both = b_interleave(lower, upper, i != 0);
            to[i] = (vec_t)(both << 16);
            to[i + 1] = (vec_t)(both & (int32_t)0xffff0000);
        }
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            to[i] = round_to_bf16(v_mul(v_load_i8(four + 32 * row + 8 * i), v_set1(scales[row])));
    }
}

/* Prefetch the share of a block, `ahead` bytes from here, that stands for `own` of the four rows. */
INLINE void prefetch_block(const char *four, const int kind, const int from, const int own, int64_t ahead) {
    const int lines = QUANT_BYTES(kind) / CACHE_LINE;
#pragma GCC unroll 3
    for (int i = from * lines / 4; i < (from + own) * lines / 4; i++) prefetch(four + ahead + i * CACHE_LINE);
}

/* Four rows of `width` weights, as float32. */
INLINE void open_four(const char *four, const int kind, int64_t width, const float *scales, int64_t ahead, float *to) {
    TableReader reader = table_reader(four, kind, width);
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS, four += QUANT_BYTES(kind), scales += SCALE_FLOATS(kind)) {
        const bytes_t table = table_at(&reader, four, kind);
        prefetch_block(four, kind, 0, 4, ahead);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            vec_t opened[4];
            open_row(four, kind, r, scales, table, opened);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) v_store(to + r * width + k + LANES * i, opened[i]);
        }
    }
}

/* The same as bfloat16. `scales`: workspace, `SCALE_FLOATS(Q4)` for each block. */
static void unpack_four(const char *four, int64_t kind, int64_t width, float *scales, weight_t *to) {
    float opened[4 * BLOCK_WEIGHTS];
    TableReader reader = table_reader(four, (int)kind, width);
    if (kind == Q4) load_scales(four, Q4, width, 0, scales);
    if (kind == Q8) load_scales(four, Q8, width, 0, scales);
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) {
        const char *block = four + k / BLOCK_WEIGHTS * QUANT_BYTES(kind);
        const bytes_t table = table_at(&reader, block, (int)kind);
        const float *own = scales + k / BLOCK_WEIGHTS * SCALE_FLOATS(kind);
        for (int r = 0; r < 4; r++) {
            vec_t some[4];
            if (kind == Q4)
                open_row(block, Q4, r, own, table, some);
            else if (kind == BF12)
                open_row(block, BF12, r, own, table, some);
            else
                open_row(block, Q8, r, own, table, some);
            for (int i = 0; i < 4; i++) v_store(opened + r * BLOCK_WEIGHTS + LANES * i, some[i]);
            for (int64_t i = 0; i < BLOCK_WEIGHTS; i++) to[r * width + k + i] = to_bf16(opened[r * BLOCK_WEIGHTS + i]);
        }
    }
}

#endif
