/* Products of many rows of x with tiles, as prompts have them. The weights of a column are opened and transposed once
   for all rows, and not the rows. 32 rows with two columns take four tiles of sums: each tile that is loaded is
   multiplied twice. A result is summed by the same steps as elsewhere (`tiles.h`), so its bits are the same. */

#ifndef OUTRIDER_TILES_MANY_H
#define OUTRIDER_TILES_MANY_H

#include "tiles.h"

#define FEWER 48 /* rows up to which this is not used */
#define CACHED_ROWS 256 /* rows that stay in the second-level cache while the columns pass by */
#define PAIR (2 * LANES) /* rows at a time, and outputs */

/* The weights of LANES outputs from `first` on, as tiles read them beside rows: for each step, pairs of all outputs. */
INLINE void
transpose_shape(const int shape, Matrix w, int64_t width, int64_t first, int64_t last, float *scales, weight_t *to) {
    const int64_t ahead = machine.ahead * LANES * row_bytes(w.kind, width);
    const int64_t apart = width / BLOCK_WEIGHTS * SCALE_FLOATS(shape);
    const char *rows[LANES];
    weight_t opened[LANES][MAC_WIDTH] __attribute__((aligned(64)));
    column_rows(shape, w, width, first, last, ahead, scales, rows);
    for (int64_t s = 0; s < width / MAC_WIDTH; s++) {
        vec_t pairs[LANES];
        open_step(shape, rows, scales, apart, s, ahead, opened);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) pairs[j] = v_load_packed(opened[j]);
        v_transpose(pairs);
#pragma GCC unroll 16
        for (int p = 0; p < LANES; p++) v_store((float *)(to + (s * LANES + p) * MAC_WIDTH), pairs[p]);
    }
}

static void transpose_column(Matrix w, int64_t width, int64_t first, int64_t last, float *scales, weight_t *to) {
#define TRANSPOSE(shape) return transpose_shape(shape, w, width, first, last, scales, to);
    if (w.kind == PLAIN) TRANSPOSE(PLAIN)
    EACH_SHAPE(SHAPE(w.kind), TRANSPOSE)
#undef TRANSPOSE
}

/* PAIR rows of x, sixteen and sixteen, with two columns of transposed weights. */
static void multiply_pair(
    const act_t *x, const act_t *others, int64_t width, const weight_t *left, const weight_t *right, float *y
) {
    tile_fence();
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t s = 0; s < width / MAC_WIDTH; s++) {
        tile_load(4, x + s * MAC_WIDTH, width * sizeof(act_t));
        tile_load(6, left + s * LANES * MAC_WIDTH, 64);
        tile_dot(0, 4, 6);
        tile_load(7, right + s * LANES * MAC_WIDTH, 64);
        tile_dot(1, 4, 7);
        tile_load(5, others + s * MAC_WIDTH, width * sizeof(act_t));
        tile_dot(2, 5, 6);
        tile_dot(3, 5, 7);
    }
    tile_store(0, y, PAIR * sizeof(float));
    tile_store(1, y + LANES, PAIR * sizeof(float));
    tile_store(2, y + LANES * PAIR, PAIR * sizeof(float));
    tile_store(3, y + LANES * PAIR + LANES, PAIR * sizeof(float));
}

/* The same for `n` of them: rows after the last one are zeros. `buffer`: workspace of LANES rows. */
static void multiply_up_to_pair(
    const act_t *x, int64_t n, int64_t width, const weight_t *left, const weight_t *right, act_t *buffer, float *y
) {
    const int64_t full = n / LANES * LANES;
    if (n < PAIR) {
        memset(buffer, 0, LANES * width * sizeof(act_t));
        memcpy(buffer, x + full * width, (n - full) * width * sizeof(act_t));
    }
    multiply_pair(full ? x : buffer, full == PAIR ? x + LANES * width : buffer, width, left, right, y);
}

/* Workspace of these products, after the scales: two columns of transposed weights, and LANES rows. */
typedef struct {
    float *scales;
    weight_t *columns[2];
    act_t *buffer;
} ManyScratch;

INLINE ManyScratch many_scratch(const Thread *thread, int64_t width) {
    const Scratch scratch = scratch_of(thread, width);
    weight_t *columns = (weight_t *)scratch.acts;
    act_t *buffer = (act_t *)(columns + 2 * LANES * width);
    EXPECT((char *)(buffer + LANES * width) <= thread->scratch + thread->region->bytes);
    return (ManyScratch){scratch.scales, {columns, columns + LANES * width}, buffer};
}

/* y[:, first .. last - 1] of `matmul`. */
static void matmul_many(
    const act_t *x, int64_t n, int64_t width, Matrix w, const float *bias, int64_t outputs, int64_t first, int64_t last,
    float *y, const int64_t *to, int64_t stride, int add, const Thread *thread
) {
    const ManyScratch scratch = many_scratch(thread, width);
    float results[PAIR * PAIR] __attribute__((aligned(64)));
    begin_product(2);
    for (int64_t m = 0; m < n; m += CACHED_ROWS)
        for (int64_t j = first; j < last; j += PAIR) {
            const int64_t end = m + CACHED_ROWS < n ? m + CACHED_ROWS : n, count = last - j < PAIR ? last - j : PAIR;
            transpose_column(w, width, j, outputs, scratch.scales, scratch.columns[0]);
            if (count > LANES) transpose_column(w, width, j + LANES, outputs, scratch.scales, scratch.columns[1]);
            for (int64_t b = m; b < end; b += PAIR) {
                const int64_t rows = end - b < PAIR ? end - b : PAIR;
                /* where there is one column alone it stands for both, and the second results are discarded */
                multiply_up_to_pair(
                    x + b * width, rows, width, scratch.columns[0], scratch.columns[count > LANES], scratch.buffer,
                    results
                );
                for (int64_t i = 0; i < rows; i++) {
                    float *own = y + (to ? to[b + i] : b + i) * stride + j, *from = results + i * PAIR;
                    int64_t k = 0;
                    for (; k + LANES <= count; k += LANES) {
                        const vec_t value = bias ? v_add(v_load(from + k), v_load(bias + j + k)) : v_load(from + k);
                        v_store(own + k, add ? v_add(v_load(own + k), value) : value);
                    }
                    for (; k < count; k++) {
                        const float value = bias ? from[k] + bias[j + k] : from[k];
                        own[k] = add ? own[k] + value : value;
                    }
                }
            }
        }
    end_product();
}

/* y[:, first .. last - 1] of `matmul_inner`. */
static void matmul_inner_many(
    const act_t *x, int64_t n, int64_t width, const Inner *inner, int64_t outputs, int64_t first, int64_t last,
    act_t *y, const Thread *thread
) {
    const ManyScratch scratch = many_scratch(thread, width);
    float results[PAIR * PAIR] __attribute__((aligned(64)));
    begin_product(2);
    for (int64_t m = 0; m < n; m += CACHED_ROWS)
        for (int64_t j = first; j < last; j += LANES) {
            const int64_t end = m + CACHED_ROWS < n ? m + CACHED_ROWS : n, count = last - j < LANES ? last - j : LANES;
            const int64_t gated = inner->gate.data != NULL; /* else the second results are discarded */
            transpose_column(inner->up, width, j, outputs, scratch.scales, scratch.columns[0]);
            if (gated) transpose_column(inner->gate, width, j, outputs, scratch.scales, scratch.columns[1]);
            for (int64_t b = m; b < end; b += PAIR) {
                const int64_t rows = end - b < PAIR ? end - b : PAIR;
                multiply_up_to_pair(
                    x + b * width, rows, width, scratch.columns[0], scratch.columns[gated], scratch.buffer, results
                );
                finish_inner(inner, results + LANES, results, PAIR, rows, j, count, y + b * outputs, outputs);
            }
        }
    end_product();
}

#endif
