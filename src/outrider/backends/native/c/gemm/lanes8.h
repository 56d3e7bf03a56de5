/* Product kernels for eight lanes. A result is summed in lanes along its row, step by step, and then over the lanes;
   so it depends on its row of x and its row of W alone. A few rows of x are multiplied by the weights in place. For
   more, the weights of four outputs are dequantised to float32 once, and multiplied by three rows of x at a time: twelve
   sums, three vectors of x and one of weights are what sixteen registers hold. */

#ifndef OUTRIDER_LANES8_H
#define OUTRIDER_LANES8_H

#include "../machine.h"
#include "rows.h"
#ifdef OPENS_BLOCKS
#include "../formats/open8.h"
#endif

/* `n` rows of x with `own` of four outputs, from the one that is `from`: sum[4 * row + output], in lanes. The outputs
   lie in blocks (of which one is at rows[0], with `scales`) or not. */
INLINE void multiply_in_place(
    const int n, const int from, const int own, const int kind, const act_t *x, int64_t width, const char *const *rows,
    const float *scales, int64_t ahead, vec_t *sums
) {
    const char *four = rows[0];
    vec_t sum[16];
#ifdef OPENS_BLOCKS
    TableReader reader = table_reader(four, kind, width);
#endif
#pragma GCC unroll 16
    for (int i = 0; i < own * n; i++) sum[i] = v_zero();
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) {
#ifdef OPENS_BLOCKS
        const bytes_t table = table_at(&reader, four, kind);
        if (kind != PLAIN) prefetch_block(four, kind, from, own, ahead);
#endif
#pragma GCC unroll 4
        for (int r = from; r < from + own; r++) {
            vec_t weights[4];
            if (kind == PLAIN) {
                const weight_t *row = (const weight_t *)rows[r] + k;
                const char *line = rows[0] + ahead +
                                   (4 * k + r * BLOCK_WEIGHTS) * (int64_t)sizeof(weight_t); /* as memory lies */
                prefetch(line);
                if (sizeof(weight_t) == 4) prefetch(line + CACHE_LINE);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) weights[i] = load_weights(row + LANES * i);
            }
#ifdef OPENS_BLOCKS
            else
                open_row(four, kind, r, scales, table, weights);
#endif
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
                for (int m = 0; m < n; m++) {
                    vec_t *to = sum + own * m + r - from;
                    *to = v_fma(v_load(x + m * width + k + LANES * i), weights[i], *to);
                }
        }
        four += QUANT_BYTES(kind);
        scales += SCALE_FLOATS(kind);
    }
#pragma GCC unroll 4
    for (int m = 0; m < n; m++)
#pragma GCC unroll 4
        for (int r = 0; r < own; r++) sums[4 * m + from + r] = sum[own * m + r];
}

/* The sums over lanes of `n` rows with four outputs, as rows of LANES numbers; sum[4 * n ..] are zeros. */
INLINE void write_sums(const int n, const vec_t *sum, float *y) {
    float totals[2 * LANES];
    v_store(totals, v_sums(sum));
    if (n > 2) v_store(totals + LANES, v_sums(sum + LANES));
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) memcpy(y + i * LANES, totals + 4 * i, 4 * sizeof(float));
}

/* One to four rows of x with four outputs; four rows with two outputs at a time, for registers. */
INLINE void multiply_rows(
    const int n, const int kind, const act_t *x, int64_t width, const char *const *rows, const float *scales,
    int64_t ahead, float *y
) {
    const int own = n < 4 ? 4 : 2;
    vec_t sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = v_zero();
#pragma GCC unroll 2
    for (int from = 0; from < 4; from += own) multiply_in_place(n, from, own, kind, x, width, rows, scales, ahead, sum);
    write_sums(n, sum, y);
}

/* `n` rows of x, two or three, with the float32 weights of four outputs. `ahead`: distance in bytes of what is
   prefetched, where float32 is what the model holds. */
INLINE void
multiply_opened(const int n, const act_t *x, int64_t width, const float *const *w, int64_t ahead, float *y) {
    vec_t sum[16], acts[3];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = v_zero();
    for (int64_t k = 0; k < width; k += LANES) {
#pragma GCC unroll 3
        for (int i = 0; i < n; i++) acts[i] = IN_REGISTER(v_load(x + i * width + k));
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const vec_t weights = IN_REGISTER(v_load(w[r] + k));
#ifndef BF16_WEIGHTS
            if (r % 2 == 0) prefetch((const char *)(w[0] + 4 * k + r * LANES) + ahead);
#endif
#pragma GCC unroll 3
            for (int i = 0; i < n; i++) sum[4 * i + r] = v_fma(acts[i], weights, sum[4 * i + r]);
        }
    }
    write_sums(n, sum, y);
    (void)ahead;
}

static __attribute__((noinline)) void
multiply_two(const act_t *x, int64_t width, const float *const *w, int64_t ahead, float *y) {
    multiply_opened(2, x, width, w, ahead, y);
}

static __attribute__((noinline)) void
multiply_three(const act_t *x, int64_t width, const float *const *w, int64_t ahead, float *y) {
    multiply_opened(3, x, width, w, ahead, y);
}

#ifdef BF16_WEIGHTS
/* Four rows of weights as float32. */
INLINE void widen_four(const char *const *rows, int64_t width, int64_t ahead, float *to) {
    for (int64_t r = 0; r < 4; r++)
        for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) {
            const weight_t *own = (const weight_t *)rows[r] + k;
            prefetch((const char *)own + ahead); /* line by line */
#pragma GCC unroll 4
            for (int i = 0; i < BLOCK_WEIGHTS; i += LANES) v_store(to + r * width + k + i, load_weights(own + i));
        }
}
#endif

/* Rows of x that are multiplied by the weights in place: more where weights are cheap to dequantise. */
#define ROWS_IN_PLACE(kind) ((kind) == Q4 ? 2 : 4)

/* The results of `n` rows of x for four outputs, as rows of LANES numbers. */
INLINE void multiply_four(
    const int kind, const act_t *x, int64_t n, int64_t width, const char *const *rows, int64_t ahead, Scratch scratch,
    float *y
) {
    const float *scales = scratch.scales;
#ifdef OPENS_BLOCKS
    if (kind == Q4 || kind == Q8) load_scales(rows[0], kind, width, ahead, scratch.scales);
    if (kind == BF12) prefetch((const char *)row_table(rows[0], width) + ahead);
#endif
    if (n == 1) return multiply_rows(1, kind, x, width, rows, scales, ahead, y);
    if (n == 2) return multiply_rows(2, kind, x, width, rows, scales, ahead, y);
    if (n == 3 && ROWS_IN_PLACE(kind) > 2) return multiply_rows(3, kind, x, width, rows, scales, ahead, y);
    if (n == 4 && ROWS_IN_PLACE(kind) > 3) return multiply_rows(4, kind, x, width, rows, scales, ahead, y);
    const float *opened[4]; /* a few outputs stay in the first-level cache while rows pass by */
#ifdef BF16_WEIGHTS
    float *buffer = scratch.weights;
    for (int64_t r = 0; r < 4; r++) opened[r] = buffer + r * width;
    if (kind != PLAIN)
        open_four(rows[0], kind, width, scales, ahead, buffer);
    else
        widen_four(rows, width, ahead, buffer);
#else
    for (int64_t r = 0; r < 4; r++) opened[r] = (const float *)rows[r];
#endif
    for (int64_t i = 0; i < n;) {
        const int64_t left = n - i, now = left == 2 || left == 4 ? 2 : 3; /* never one alone, whose sums are few */
        if (now == 2)
            multiply_two(x + i * width, width, opened, i ? 0 : ahead, y + i * LANES);
        else
            multiply_three(x + i * width, width, opened, i ? 0 : ahead, y + i * LANES);
        i += now;
    }
}

/* The results of `n` rows of x for the LANES outputs from `first` on, as rows of LANES numbers. Outputs from `last` on
   repeat the last one; their results are discarded. */
INLINE void multiply_column_of(
    const int kind, const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, Scratch scratch,
    float *y
) {
    const int64_t size = row_bytes(kind, width), ahead = machine.ahead * LANES * size;
    const char *data = w.data;
    for (int64_t j = first; j < first + LANES; j += 4, y += 4) {
        const char *rows[4];
        if (kind == PLAIN)
            for (int64_t r = 0; r < 4; r++) rows[r] = data + (j + r < last ? j + r : last - 1) * size;
        else
            rows[0] = data + (j < last ? j : (last - 1) / 4 * 4) * size;
        multiply_four(kind, x, n, width, rows, ahead, scratch, y);
    }
}

static void multiply_column(
    const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, Scratch scratch, float *y
) {
#ifdef BF16_WEIGHTS
    if (w.kind == Q4) return multiply_column_of(Q4, x, n, width, w, first, last, scratch, y);
    if (w.kind == Q8) return multiply_column_of(Q8, x, n, width, w, first, last, scratch, y);
    if (w.kind == BF12) return multiply_column_of(BF12, x, n, width, w, first, last, scratch, y);
#endif
    multiply_column_of(PLAIN, x, n, width, w, first, last, scratch, y);
}

#endif
