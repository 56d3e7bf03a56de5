/* Product kernels for sixteen lanes. A result is summed in lanes along its row, step by step, and then over the lanes;
   so it depends on its row of x and its row of W alone. */

#ifndef OUTRIDER_LANES16_H
#define OUTRIDER_LANES16_H

#include "../machine.h"
#include "rows.h"
#ifdef OPENS_BLOCKS
#include "../formats/open16.h"
#endif

#define MAX_ROWS 6 /* rows of x at once: the sums of so many with four outputs fit into the registers */
#define TILE_ROWS 4 /* of more rows, so many at once but for the last ones */

/* Memory that is prefetched while a column is multiplied. */
typedef struct {
    const char *from, *to;
    int64_t lines; /* in each step */
    int near; /* into the first-level cache or the second? */
    int64_t ahead; /* bytes from a block to the one that is prefetched beside it */
} Prefetch;

/* `n` rows of x with so many outputs: LANES results, or those of MAX_ROWS rows with four outputs. The outputs' rows
   lie at `rows`, or in fours if they are in blocks, with `scales`. `opened`: where their weights are written, or NULL.
   Results are written as rows of LANES numbers. */
INLINE void multiply_tile(
    const int n, const int outputs, const int kind, const act_t *x, int64_t width, const char *const *rows,
    const float *scales, weight_t *opened, Prefetch *prefetched, float *y
) {
    const int64_t lines = prefetched->from < prefetched->to ? prefetched->lines : 0;
    const char *line = prefetched->from;
    const int near = prefetched->near;
    const int results = n * outputs <= LANES ? LANES : 2 * LANES;
    float totals[2 * LANES];
    vec_t sum[2 * LANES];
#pragma GCC unroll 32
    for (int i = 0; i < results; i++) sum[i] = v_zero();
    for (int64_t k = 0, at = 0; k < width; k += MAC_WIDTH, at += QUANT_BYTES(kind), scales += SCALE_FLOATS(kind)) {
        mac_t acts[4], weights[4];
        for (int64_t i = 0; i < lines; i++, line += CACHE_LINE) {
            if (near)
                prefetch_near(line);
            else
                prefetch_far(line);
        }
#pragma GCC unroll 4
        for (int i = 0; i < n && n <= 4; i++) acts[i] = IN_REGISTER(mac_load_acts(x + i * width + k));
#pragma GCC unroll 4
        for (int j = 0; j < outputs; j += 4) {
            if (kind == PLAIN)
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) weights[r] = mac_load_weights((const weight_t *)rows[j + r] + k);
#ifdef OPENS_BLOCKS
            else
                open_block(
                    rows[j / 4] + at, kind, scales + j / 4 * (width / BLOCK_WEIGHTS) * SCALE_FLOATS(kind),
                    prefetched->ahead, weights
                );
            if (opened)
                for (int r = 0; r < 4; r++) w_store(opened + r * width + k, (words_t)weights[r]);
#endif
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++)
#pragma GCC unroll 6
                for (int i = 0; i < n; i++)
                    sum[i * outputs + j + r] =
                        mac(sum[i * outputs + j + r], n <= 4 ? acts[i] : mac_load_acts(x + i * width + k), weights[r]);
        }
    }
    prefetched->from = line;
    for (int i = 0; i < results; i += LANES) v_store(totals + i, v_sums(sum + i));
#pragma GCC unroll 6
    for (int i = 0; i < n; i++) memcpy(y + i * LANES, totals + i * outputs, outputs * sizeof(float));
    (void)opened;
}

/* A few rows of x with LANES outputs: all weights are read once. */
INLINE void multiply_rows(
    const int n, const int kind, const act_t *x, int64_t width, const char *const *rows, const float *scales,
    Prefetch *prefetched, float *y
) {
    const int outputs = n == 3 || n > 4 ? 4 : LANES / n;
    for (int j = 0; j < LANES; j += outputs) {
        const float *own = kind == PLAIN ? NULL : scales + j / 4 * (width / BLOCK_WEIGHTS) * SCALE_FLOATS(kind);
        multiply_tile(n, outputs, kind, x, width, rows + (kind == PLAIN ? j : j / 4), own, NULL, prefetched, y + j);
    }
}

/* The same for each number of rows. */
INLINE void multiply_few(
    const int kind, const act_t *x, int64_t n, int64_t width, const char *const *rows, const float *scales,
    Prefetch *prefetched, float *y
) {
    if (n == 1)
        multiply_rows(1, kind, x, width, rows, scales, prefetched, y);
    else if (n == 2)
        multiply_rows(2, kind, x, width, rows, scales, prefetched, y);
    else if (n == 3)
        multiply_rows(3, kind, x, width, rows, scales, prefetched, y);
    else if (n == 4)
        multiply_rows(4, kind, x, width, rows, scales, prefetched, y);
    else if (n == 5)
        multiply_rows(5, kind, x, width, rows, scales, prefetched, y);
    else
        multiply_rows(6, kind, x, width, rows, scales, prefetched, y);
}

/* The results of `n` rows of x for the LANES outputs from `first` on, as rows of LANES numbers. Outputs from `last` on
   repeat the last one; their results are discarded. */
static void multiply_column(
    const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, Scratch scratch, float *y
) {
    const char *rows[LANES], *data = w.data;
    const int64_t size = row_bytes(w.kind, width), column = LANES * size, steps = width / MAC_WIDTH;
    const int64_t tiles = n < 3 ? n : n > MAX_ROWS ? (n + TILE_ROWS - 1) / TILE_ROWS * 4 : 4;
    const int near = 2 * column <= machine.first_cache * 4 / 5; /* this column and the next, beside rows of x */
    const char *next = data + first * size + (near ? 1 : 2) * column;
    const int64_t lines = (column / CACHE_LINE + steps * tiles - 1) / (steps * tiles);
    Prefetch prefetched = {next, next + column, lines, near, machine.ahead * column};
    for (int64_t j = 0; j < LANES; j++) rows[j] = data + (first + j < last ? first + j : last - 1) * size;
#ifdef OPENS_BLOCKS
    const int64_t shape = SHAPE(w.kind), apart = width / BLOCK_WEIGHTS * SCALE_FLOATS(shape);
    float *scales = scratch.scales;
    weight_t *buffer = scratch.weights;
    if (w.kind != PLAIN) {
        prefetched.to = next; /* blocks are prefetched one by one */
        for (int64_t j = 0; j < LANES / 4; j++) {
            rows[j] = data + (first + 4 * j < last ? first + 4 * j : (last - 1) / 4 * 4) * size;
            load_scales(rows[j], w.kind, width, machine.ahead * column, scales + j * apart);
        }
#define FEW(shape) return multiply_few(shape, x, n, width, rows, scales, &prefetched, y);
        if (n <= MAX_ROWS) EACH_SHAPE(shape, FEW)
#undef FEW
    }
#else
    (void)scratch;
#endif
    if (n <= MAX_ROWS) return multiply_few(PLAIN, x, n, width, rows, NULL, &prefetched, y);
    for (int64_t j = 0; j < LANES; j += 4) { /* a few outputs stay in the first-level cache while rows pass by */
        const char *const *from = rows + j;
        float *to = y + j;
        int64_t i = 0;
#ifdef OPENS_BLOCKS
        const char *opened[4];
        if (w.kind != PLAIN) {
            for (int64_t r = 0; r < 4; r++) opened[r] = (const char *)(buffer + r * width);
            from = opened;
            i = 4;
#define FIRST_FOUR(shape)                                                                                              \
    multiply_tile(4, 4, shape, x, width, rows + j / 4, scales + j / 4 * apart, buffer, &prefetched, to);
            EACH_SHAPE(shape, FIRST_FOUR)
#undef FIRST_FOUR
        }
#endif
#define REST(rows, left)                                                                                               \
    for (; i < n && (left); i += rows)                                                                                 \
        multiply_tile(rows, 4, PLAIN, x + i * width, width, from, NULL, NULL, &prefetched, to + i * LANES);
        REST(TILE_ROWS, n - i > MAX_ROWS || n - i == TILE_ROWS)
        REST(6, n - i == 6)
        REST(5, n - i == 5)
        REST(3, n - i == 3)
        REST(2, n - i == 2)
        REST(1, n - i == 1)
#undef REST
    }
}

#endif
