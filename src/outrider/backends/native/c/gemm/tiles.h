/* Product kernels with tiles of bfloat16 (AMX): sixteen outputs by sixteen rows of x by 32 weights in one instruction,
   so that sixteen rows cost little more than one. A result is summed along its row, step by step; so here, too, it
   depends on its row of x and its row of W alone. Attention's scores (`layers/scores.h`: keys are its weights, and
   queries its x) and values (`layers/values.h`) are such products as well. */

#ifndef OUTRIDER_TILES_H
#define OUTRIDER_TILES_H

#include "../formats/open16.h"
#include "../simd/amx.h"
#include "rows.h"

#define RING 8 /* opened steps for which there is memory: more than DELAY */
#define DELAY 4 /* steps that are opened before the first is multiplied: opening one and multiplying another overlap */
#define PADDED_ROWS(n) (((n) + LANES - 1) / LANES * LANES)

/* Rows of x as tiles read them: for each sixteen rows and each step, sixteen pairs of all rows. One row stays as it
   is. */
static const act_t *pack_acts(const act_t *x, int64_t n, int64_t width, act_t *buffer) {
    if (n == 1) return x;
    for (int64_t m = 0; m < n; m += LANES)
        for (int64_t k = 0; k < width; k += MAC_WIDTH) {
            vec_t pairs[LANES];
            const act_t *from = x + m * width + k;
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) pairs[i] = m + i < n ? v_load_packed(from + i * width) : v_zero();
            v_transpose(pairs);
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++)
                v_store((float *)(buffer + (m * width + (k + 2 * i) * LANES)), pairs[i]);
        }
    return buffer;
}

/* Shape this thread's tiles for so many rows of x: 0 to 3 are sums; 4 and 5 weights or x; 6 and 7 have only `few`
   rows. */
INLINE void begin_product_few(int64_t n, int64_t few) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = (uint8_t)(i < 6 ? 16 : few);
        shapes.bytes[i] = n == 1 && i != 4 ? 4 : 64;
    }
    tile_configure(&shapes);
}

INLINE void begin_product(int64_t n) {
    begin_product_few(n, 16);
}
INLINE void end_product(void) {
    tile_release();
}

/* Step `s` of LANES outputs, whose rows (or fours of rows) these are, as weights. */
INLINE void open_step(
    const int shape, const char *const *rows, const float *scales, int64_t apart, int64_t s, int64_t ahead,
    weight_t (*opened)[MAC_WIDTH]
) {
    if (shape == PLAIN) {
        for (int64_t j = 0; j < LANES; j++) w_store(opened[j], w_load(rows[j] + s * MAC_WIDTH * 2));
        tile_fence();
        return;
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < LANES / 4; j++) {
        mac_t weights[4];
        open_block(
            rows[j] + s * QUANT_BYTES(shape), shape, scales + j * apart + s * SCALE_FLOATS(shape), ahead, weights
        );
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) w_store(opened[4 * j + r], (words_t)weights[r]);
    }
    tile_fence();
}

/* Where the rows of LANES outputs lie, or fours of them, whose scales are loaded. Outputs from `last` on repeat the
   last one; their results are discarded. */
INLINE void column_rows(
    const int shape, Matrix w, int64_t width, int64_t first, int64_t last, int64_t ahead, float *scales,
    const char **rows
) {
    const int64_t size = row_bytes(w.kind, width), apart = width / BLOCK_WEIGHTS * SCALE_FLOATS(shape);
    const char *data = w.data;
    for (int64_t j = 0; j < LANES && shape == PLAIN; j++)
        rows[j] = data + (first + j < last ? first + j : last - 1) * size;
    for (int64_t j = 0; j < LANES / 4 && shape != PLAIN; j++) {
        rows[j] = data + (first + 4 * j < last ? first + 4 * j : (last - 1) / 4 * 4) * size;
        load_scales(rows[j], w.kind, width, ahead, scales + j * apart);
    }
}

/* The results of `n` rows of x, packed in so many groups of sixteen, for the LANES outputs from `first` on, as rows of
   LANES numbers. */
INLINE void multiply_groups(
    const int shape, const int groups, const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last,
    Scratch scratch, float *y
) {
    const int64_t size = row_bytes(w.kind, width), ahead = machine.ahead * LANES * size;
    const int64_t apart = width / BLOCK_WEIGHTS * SCALE_FLOATS(shape), steps = width / MAC_WIDTH;
    const int64_t stride = n == 1 ? 4 : 64, next = n == 1 ? MAC_WIDTH : LANES * MAC_WIDTH;
    const int64_t direct = shape == PLAIN && first + LANES <= last; /* tiles can be loaded where the weights lie */
    const char *rows[LANES], *own = (const char *)w.data + first * size;
    float *scales = scratch.scales;
    weight_t opened[RING][LANES][MAC_WIDTH] __attribute__((aligned(64)));
    column_rows(shape, w, width, first, last, ahead, scales, rows);
    tile_zero(0);
    if (groups > 1) tile_zero(1);
    if (groups > 2) tile_zero(2);
    if (groups > 3) tile_zero(3);
    for (int64_t s = 0; s < steps && s < DELAY && !direct; s++)
        open_step(shape, rows, scales, apart, s, ahead, opened[s % RING]);
    for (int64_t s = 0; s < steps; s++) {
        if (direct) {
#pragma GCC unroll 16
            for (int64_t j = 0; j < LANES; j++) /* of the column after the next */
                prefetch_far(own + (j + 2 * LANES) * size + s * MAC_WIDTH * 2);
            tile_load(4, own + s * MAC_WIDTH * 2, size);
        } else {
            tile_load(4, opened[s % RING], 64);
        }
        const act_t *from = x + s * next;
#define GROUP(g)                                                                                                       \
    if (g < groups) {                                                                                                  \
        tile_load(5, from + g * LANES * width, stride);                                                                \
        tile_dot(g, 4, 5);                                                                                             \
    }
        GROUP(0)
        GROUP(1)
        GROUP(2)
        GROUP(3)
#undef GROUP
        if (s + DELAY < steps && !direct)
            open_step(shape, rows, scales, apart, s + DELAY, ahead, opened[(s + DELAY) % RING]);
    }
    tile_store(0, y, stride);
    if (n == 1) return;
    if (groups > 1) tile_store(1, y + LANES * LANES, 64);
    if (groups > 2) tile_store(2, y + 2 * LANES * LANES, 64);
    if (groups > 3) tile_store(3, y + 3 * LANES * LANES, 64);
    for (int64_t g = 0; g < groups; g++) {
        vec_t sum[LANES];
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i++) sum[i] = v_load(y + (g * LANES + i) * LANES);
        v_transpose(sum);
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i++) v_store(y + (g * LANES + i) * LANES, sum[i]);
    }
}

/* The same for each shape of weights and number of groups. */
static void multiply_column(
    const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, Scratch scratch, float *y
) {
#define GROUPS(shape)                                                                                                  \
    switch (PADDED_ROWS(n) / LANES) {                                                                                  \
    case 1: return multiply_groups(shape, 1, x, n, width, w, first, last, scratch, y);                                 \
    case 2: return multiply_groups(shape, 2, x, n, width, w, first, last, scratch, y);                                 \
    case 3: return multiply_groups(shape, 3, x, n, width, w, first, last, scratch, y);                                 \
    default: return multiply_groups(shape, 4, x, n, width, w, first, last, scratch, y);                                \
    }
    if (w.kind == PLAIN) GROUPS(PLAIN)
    EACH_SHAPE(SHAPE(w.kind), GROUPS)
#undef GROUPS
}

#endif
