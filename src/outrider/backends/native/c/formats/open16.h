/* Blocks opened in sixteen lanes, to the pairs of bfloat16 that a multiply-accumulate takes. */

#ifndef OUTRIDER_OPEN16_H
#define OUTRIDER_OPEN16_H

#include "../machine.h"
#include "layout.h"

/* The scales of four rows of `width` weights, as float32: for each block and row scale and minimum; Q8: the scale;
   Q6K: the scales of its halves; Q3K: scale and minimum of each half; MXFP4: the scale, and 0. `ahead`: distance
   in bytes of what is prefetched. */
INLINE void load_scales(const char *four, int64_t kind, int64_t width, int64_t ahead, float *scales) {
    const int64_t shape = SHAPE(kind), count = width / BLOCK_WEIGHTS * SCALE_COUNT(shape);
    const char *from = four + width / BLOCK_WEIGHTS * QUANT_BYTES(shape);
    if (kind == MXFP4) {
        for (int64_t i = 0; i < count; i += 16) { /* two blocks, or one */
            prefetch(from + i / 2 + ahead);
            v_store(scales + i, v_load_e8m0(from + i / 2, count - i < 16 ? 4 : 8));
        }
        return;
    }
    if (!HAS_SUPERBLOCKS(kind)) {
        for (int64_t i = 0; i < count; i += 16) {
            prefetch(from + 2 * i + ahead);
            v_store(scales + i, v_load_f16(from + 2 * i, count - i));
        }
        return;
    }
    for (int64_t k = 0; k < width; k += SUPERBLOCK) {
        const vec_t by = v_load_f16_twice(from, kind == Q3K);
        from += 16;
        for (int64_t i = 0; i < SUPERBLOCK / BLOCK_WEIGHTS * SCALE_COUNT(shape); i += 16, from += 16, scales += 16) {
            v_store(scales, v_mul(v_load_i8(from), by)); /* exact */
            if (i % 64 == 0) prefetch(from + ahead);
        }
    }
}

/* The sixteen weights that a quant of four bits can stand for; `from` is added to quants. */
INLINE vec_t weight_table(const int shape, float from, const float *scale) {
    static const float counting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const float iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const float mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const vec_t quants = v_load(shape == IQ4 ? iq4 : shape == MXFP4 ? mxfp4 : counting);
    return v_fma(v_add(quants, v_set1(from)), v_set1(scale[0]), v_set1(scale[1])); /* the product is exact */
}

/* Signed quants with a scale for each sixteen. */
INLINE mac_t scale_halves(vec_t low, vec_t high, float first, float second) {
    return (mac_t)w_bf16(v_mul(low, v_set1(first)), v_mul(high, v_set1(second)));
}

/* The weights of one block of four rows, which lie at `four`. */
INLINE void open_block(const char *four, const int shape, const float *scales, int64_t ahead, mac_t to[4]) {
    prefetch(four + ahead);
    if (shape == Q8) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const char *from = four + 32 * r;
            to[r] = scale_halves(v_load_i8(from), v_load_i8(from + 16), scales[r], scales[r]);
        }
        prefetch(four + ahead + 64);
        return;
    }
    const words_t words = w_load(four), nibble = w_set1(15), fifth = w_set1(16);
    if (shape == Q6K) {
        const words_t upper = w_load_bytes(four + 64);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const words_t low = w_and(w_shift_right(words, 4 * r), nibble);
            const words_t two = w_and(w_shift_right(upper, 2 * r), w_set1(3));
            const words_t all = w_sub(w_or(low, w_shift_left(two, 4)), w_set1(32));
            to[r] = scale_halves(w_low(all), w_high(all), scales[2 * r], scales[2 * r + 1]);
        }
        return;
    }
    if (shape == Q4 || shape == IQ4 || shape == MXFP4) {
#pragma GCC unroll 2
        for (int r = 0; r < 4; r += 2) { /* two rows share a table of 32: the fifth bit says whose */
            const vec_t one = weight_table(shape, 0, scales + 2 * r), two = weight_table(shape, 0, scales + 2 * r + 2);
            const words_t table = w_bf16(one, two);
            const words_t first = w_and(w_shift_right(words, 4 * r), nibble);
            const words_t second = w_or(w_shift_right(words, 4 * r + 4), fifth);
            to[r] = (mac_t)w_lookup(first, table);
            to[r + 1] = (mac_t)w_lookup(second, table);
        }
        return;
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) { /* a table of 32 for each row: Q5's own, or Q3K's of both halves */
        const float *own = scales + (shape == Q3K ? 4 : 2) * r;
        const vec_t one = weight_table(shape, 0, own);
        const vec_t two = weight_table(shape, shape == Q5 ? 16 : 0, own + (shape == Q3K ? 2 : 0));
        uint32_t upper = 0xffff0000u;
        if (shape != Q3K) memcpy(&upper, four + 64 + 4 * r, 4);
        const words_t low = w_and(w_shift_right(words, 4 * r), nibble);
        to[r] = (mac_t)w_lookup(w_or(low, w_where(upper, fifth)), w_bf16(one, two));
    }
}

/* Code for each shape: `DO(shape)`. */
#define EACH_SHAPE(shape, DO)                                                                                          \
    switch (shape) {                                                                                                   \
    case Q4: DO(Q4) break;                                                                                             \
    case Q5: DO(Q5) break;                                                                                             \
    case Q6K: DO(Q6K) break;                                                                                           \
    case Q3K: DO(Q3K) break;                                                                                           \
    case IQ4: DO(IQ4) break;                                                                                           \
    case MXFP4: DO(MXFP4) break;                                                                                       \
    default: DO(Q8)                                                                                                    \
    }

/* Four rows of `width` weights. `scales`: workspace, `SCALE_COUNT(Q3K)` for each block and 16 more. */
INLINE void unpack_four(const char *four, int64_t kind, int64_t width, float *scales, weight_t *to) {
    const int64_t blocks = width / BLOCK_WEIGHTS;
    mac_t opened[4];
    load_scales(four, kind, width, 0, scales);
#define UNPACK(shape)                                                                                                  \
    for (int64_t i = 0; i < blocks; i++) {                                                                             \
        open_block(four + i * QUANT_BYTES(shape), shape, scales + i * SCALE_FLOATS(shape), 0, opened);                 \
        for (int r = 0; r < 4; r++) w_store(to + r * width + i * BLOCK_WEIGHTS, (words_t)opened[r]);                   \
    }
    EACH_SHAPE(SHAPE(kind), UNPACK)
#undef UNPACK
}

#endif
