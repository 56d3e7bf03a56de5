/* The int8 GEMM for eight lanes. Sixteen registers hold the sums of few rows only, so each block is opened once,
   and all rows are multiplied by it in turn; their sums lie in memory. */

#ifndef OUTRIDER_INT8_LANES8_H
#define OUTRIDER_INT8_LANES8_H

#include "int8_blocks.h"

/* Add the products of `count` steps with their quants to `sum`. */
INLINE i8_t dot_steps(const IntegerFormat f, const i8_t *w, const int8_t *quant, const int count, i8_t sum) {
#ifdef I8_DOT
    (void)f;
#pragma GCC unroll 8
    for (int s = 0; s < count; s++) sum = i8_dot(sum, w[s], quant + 4 * s);
#else
    const int largest = SIGNED(f) ? 128 : (1 << (f.low + f.high)) - 1, most = 32767 / (largest * 254);
    const int fit = most < count ? most : count; /* steps whose sums of pairs int16 holds */
#pragma GCC unroll 8
    for (int s = 0; s < count; s += fit) {
        const int end = s + fit < count ? s + fit : count;
        i8_t pairs = i8_zero();
#pragma GCC unroll 8
        for (int i = s; i < end; i++) {
            const i8_t acts = i8_repeat(quant + 4 * i);
            const i8_t own = SIGNED(f) ? i8_dot_twos(i8_abs(w[i]), i8_sign(acts, w[i])) : i8_dot_twos(w[i], acts);
            pairs = i == s ? own : i8_add_twos(pairs, own);
        }
        sum = i8_add_sums(sum, i8_twos_to_sums(pairs));
    }
#endif
    return sum;
}

/* The dot products of one row's block, times the integer scales where there are superblocks. */
INLINE vec_t dot_block(const IntegerFormat f, const i8_t w[8], const vec_t scale[2], const Activations *x) {
    if (f.halves == 1) {
        const vec_t dot = v_from_sums(dot_steps(f, w, x->quant, 8, offset_share(f, 0, x)));
        return f.superblock ? v_mul(dot, scale[0]) : dot;
    }
    const vec_t first = v_from_sums(dot_steps(f, w, x->quant, 4, offset_share(f, 0, x)));
    const vec_t last = v_from_sums(dot_steps(f, w + 4, x->quant + 16, 4, offset_share(f, 1, x)));
    return v_fma(last, scale[1], v_mul(first, scale[0]));
}

/* What is summed of a row. */
typedef struct {
    vec_t sum, part, least;
} Sums;

/* `n` rows of x, at most CHUNK_ROWS, with LANES outputs, as rows of LANES numbers. */
INLINE void multiply_int8_rows(const int64_t kind, const Activations *x, const int64_t n, Panel panel, float *y) {
    const IntegerFormat f = integer_format(kind);
    const int64_t blocks = panel.width / BLOCK_WEIGHTS, unit = f.superblock ? SUPERBLOCK / BLOCK_WEIGHTS : 1;
    const int64_t ahead = panel.ahead;
    const int own_scales = f.superblock ? f.halves : 0;
    const char *w = panel.quants, *scales = panel.scales;
    Sums of[CHUNK_ROWS];
    for (int64_t i = 0; i < n; i++) of[i].sum = v_zero();
    for (int64_t b = 0; b < blocks; b += unit) {
        const char *d = scales + 2 * panel.lane, *small = scales + 2 * PANEL_ROWS * (1 + f.minimum) + panel.lane;
        for (int64_t i = 0; ahead && i < unit_scale_bytes(f); i += CACHE_LINE) prefetch(scales + ahead + i);
        for (int64_t i = 0; i < n; i++) of[i].part = of[i].least = v_zero();
        for (int64_t u = 0; u < unit; u++, w += block_bytes(f), x += n) {
            i8_t own[8];
            vec_t scale[2], minimum[2];
            for (int64_t i = 0; ahead && i < block_bytes(f); i += CACHE_LINE) prefetch(w + ahead + i);
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) own[s] = open_steps(f, w, s);
            for (int h = 0; h < own_scales; h++) {
                scale[h] = v_load_i8(small + PANEL_ROWS * h);
                if (f.minimum) minimum[h] = v_load_i8(small + PANEL_ROWS * (f.halves + h));
            }
            small += PANEL_ROWS * own_scales * (1 + f.minimum);
            for (int64_t i = 0; i < n; i++) {
                const vec_t dot = dot_block(f, own, scale, x + i), own_scale = v_set1(x[i].scale);
                if (f.superblock)
                    of[i].part = v_fma(dot, own_scale, of[i].part);
                else
                    of[i].sum = v_fma(v_mul(dot, own_scale), v_load_f16_all(d), of[i].sum);
                if (!f.minimum) continue;
                if (!f.superblock)
                    of[i].sum = v_fma(v_set1(x[i].total), v_load_f16_all(d + 2 * PANEL_ROWS), of[i].sum);
                else if (f.halves == 1)
                    of[i].least = v_fma(minimum[0], v_set1(x[i].total), of[i].least);
                else {
                    of[i].least = v_fma(minimum[0], v_set1(x[i].totals[0]), of[i].least);
                    of[i].least = v_fma(minimum[1], v_set1(x[i].totals[1]), of[i].least);
                }
            }
        }
        for (int64_t i = 0; i < n; i++) {
            if (f.superblock) of[i].sum = v_fma(v_load_f16_all(d), of[i].part, of[i].sum);
            if (f.superblock && f.minimum)
                of[i].sum = v_fma(v_load_f16_all(d + 2 * PANEL_ROWS), of[i].least, of[i].sum);
        }
        scales += unit_scale_bytes(f);
    }
    for (int64_t i = 0; i < n; i++) v_store(y + i * LANES, of[i].sum);
}

INLINE void multiply_int8_of(const int64_t kind, const Activations *x, int64_t n, Panel panel, float *y) {
    if (n == 1)
        multiply_int8_rows(kind, x, 1, panel, y); /* its sums in registers */
    else
        multiply_int8_rows(kind, x, n, panel, y);
}

#endif
