/* The int8 GEMM for sixteen lanes: a few rows at a time, step by step, so that their sums stay in registers and no dot
   product waits for the one before. With AMX, tiles of sixteen rows. */

#ifndef OUTRIDER_INT8_LANES16_H
#define OUTRIDER_INT8_LANES16_H

#include "int8_blocks.h"
#ifdef AMX
#include "../simd/amx.h"
#endif

/* Steps that are multiplied together: with dot products of four one; else as many as have sums of pairs that int16
   holds. */
INLINE int steps_together(const IntegerFormat f) {
#ifdef I8_DOT
    (void)f;
    return 1;
#else
    const int largest = SIGNED(f) ? 128 : (1 << (f.low + f.high)) - 1, fit = 32767 / (largest * 254);
    return fit < 4 ? fit : 4;
#endif
}

/* Add the products of so many steps with their quants to `sum`. */
INLINE i8_t dot_steps(const IntegerFormat f, i8_t sum, const i8_t *w, const int8_t *quant, const int count) {
#ifdef I8_DOT
    (void)f, (void)count;
    return i8_dot(sum, w[0], quant);
#else
    i8_t pairs = i8_zero();
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
        const i8_t acts = i8_repeat(quant + 4 * i);
        const i8_t own = SIGNED(f) ? i8_dot_twos(i8_abs(w[i]), i8_sign(acts, w[i])) : i8_dot_twos(w[i], acts);
        pairs = i ? i8_add_twos(pairs, own) : own;
    }
    return i8_add_sums(sum, i8_twos_to_sums(pairs));
#endif
}

/* Rows of x that are multiplied together: step by step, so that products of several rows are under way. */
#define ROWS_TOGETHER 8
#define MAX_ROWS_TOGETHER 16 /* with tiles */
#define EACH_ROW _Pragma("GCC unroll 8") for (int64_t i = 0; i < n; i++)

#ifdef AMX

#define TILES_FROM 8 /* rows from which tiles are used; fewer than sixteen are read with what lies after them */

INLINE void begin_int8_product(void) { /* 0: sums; 4 and 5: x and weights; 6 and 7: of half a block */
    const TileShapes shapes = {
        .palette = 1, .bytes = {64, 0, 0, 0, 32, 64, 16, 64}, .rows = {16, 0, 0, 0, 16, 8, 16, 4}
    };
    tile_configure(&shapes);
}

/* `dot_half` of sixteen rows. */
INLINE void dot_half_tiles(const IntegerFormat f, const int h, const Activations *x, const char *block, vec_t *dot) {
    const int64_t n = 16;
    const int steps = 8 / f.halves;
    char opened[8 * STEP_BYTES] __attribute__((aligned(64)));
    int32_t sums[16][LANES] __attribute__((aligned(64)));
#pragma GCC unroll 8
    for (int s = 0; s < steps; s++) i8_store(opened + s * STEP_BYTES, open_steps(f, block, h * steps + s));
    tile_fence();
    tile_zero(0);
    if (f.halves == 1) {
        tile_load(4, x->quant, sizeof *x);
        tile_load(5, opened, STEP_BYTES);
        tile_dot_int8(0, 4, 5);
    } else {
        tile_load(6, x->quant + 4 * steps * h, sizeof *x);
        tile_load(7, opened, STEP_BYTES);
        tile_dot_int8(0, 6, 7);
    }
    tile_store(0, sums, STEP_BYTES);
    EACH_ROW dot[i] = v_from_sums((i8_t)((ints_t)i8_load(sums[i]) + (ints_t)offset_share(f, h, x + i)));
}

#endif

/* The integer dot products of `n` rows with half `h` of a block (or all of it), less what the offset adds. */
INLINE void dot_half(
    const IntegerFormat f, const int64_t n, const int h, const Activations *x, const char *block, vec_t *dot
) {
    const int steps = 8 / f.halves, together = steps_together(f);
    i8_t sum[ROWS_TOGETHER];
#ifdef AMX
    if (n > ROWS_TOGETHER) return dot_half_tiles(f, h, x, block, dot);
#endif
    EACH_ROW sum[i] = offset_share(f, h, x + i);
#pragma GCC unroll 8
    for (int s = h * steps; s < (h + 1) * steps; s += together) {
        i8_t own[4];
#pragma GCC unroll 4
        for (int i = 0; i < together; i++) own[i] = open_steps(f, block, s + i);
        EACH_ROW sum[i] = dot_steps(f, sum[i], own, x[i].quant + 4 * s, together);
    }
    EACH_ROW dot[i] = v_from_sums(sum[i]);
}

/* `n` rows of x, of the `stride` whose blocks lie together, with LANES outputs, as rows of LANES numbers. */
INLINE void multiply_int8_rows(
    const int64_t kind, const int64_t n, const Activations *x, int64_t stride, Panel panel, float *y
) {
    const IntegerFormat f = integer_format(kind);
    const int64_t blocks = panel.width / BLOCK_WEIGHTS, unit = f.superblock ? SUPERBLOCK / BLOCK_WEIGHTS : 1;
    const int64_t ahead = panel.ahead, size = block_bytes(f);
    const char *w = panel.quants, *scales = panel.scales;
    vec_t sum[MAX_ROWS_TOGETHER], part[MAX_ROWS_TOGETHER], least[MAX_ROWS_TOGETHER];
    EACH_ROW sum[i] = v_zero();
    for (int64_t b = 0; b < blocks; b += unit) {
        const char *d = scales + 2 * panel.lane, *small = scales + 2 * PANEL_ROWS * (1 + f.minimum) + panel.lane;
        for (int64_t i = 0; ahead && i < unit_scale_bytes(f); i += CACHE_LINE) prefetch(scales + ahead + i);
        EACH_ROW part[i] = least[i] = v_zero();
        for (int64_t u = 0; u < unit; u++, w += size, x += stride) {
            vec_t dot[MAX_ROWS_TOGETHER], halves[MAX_ROWS_TOGETHER];
            for (int64_t i = 0; ahead && i < size; i += CACHE_LINE) prefetch(w + ahead + i);
#pragma GCC unroll 2
            for (int h = 0; h < f.halves; h++) {
                dot_half(f, n, h, x, w, halves);
                const vec_t scale = f.superblock ? v_load_i8(small + PANEL_ROWS * h) : v_zero();
                EACH_ROW dot[i] = !f.superblock ? halves[i]
                                  : h           ? v_fma(halves[i], scale, dot[i])
                                                : v_mul(halves[i], scale);
            }
            if (!f.superblock) {
                EACH_ROW sum[i] = v_fma(v_mul(dot[i], v_set1(x[i].scale)), v_load_f16_all(d), sum[i]);
                EACH_ROW if (f.minimum)
                    sum[i] = v_fma(v_set1(x[i].total), v_load_f16_all(d + 2 * PANEL_ROWS), sum[i]);
                continue;
            }
            EACH_ROW part[i] = v_fma(dot[i], v_set1(x[i].scale), part[i]);
            small += PANEL_ROWS * f.halves;
#pragma GCC unroll 2
            for (int h = 0; h < f.halves; h++, small += f.minimum * PANEL_ROWS) {
                const vec_t minimum = f.minimum ? v_load_i8(small) : v_zero();
                EACH_ROW if (f.minimum)
                    least[i] = v_fma(minimum, v_set1(f.halves == 1 ? x[i].total : x[i].totals[h]), least[i]);
            }
        }
        if (f.superblock) EACH_ROW sum[i] = v_fma(v_load_f16_all(d), part[i], sum[i]);
        if (f.superblock && f.minimum) EACH_ROW sum[i] = v_fma(v_load_f16_all(d + 2 * PANEL_ROWS), least[i], sum[i]);
        scales += unit_scale_bytes(f);
    }
    EACH_ROW v_store(y + i * LANES, sum[i]);
}

/* At most CHUNK_ROWS rows of x with LANES outputs. */
INLINE void multiply_int8_of(const int64_t kind, const Activations *x, int64_t n, Panel panel, float *y) {
#define ROWS(count) multiply_int8_rows(kind, count, x, stride, panel, y); break;
    const int64_t stride = n;
#ifdef AMX
    for (; n >= TILES_FROM; n -= 16, x += 16, y += 16 * LANES, panel.ahead = 0)
        multiply_int8_rows(kind, 16, x, stride, panel, y);
#endif
    for (; n > 0; n -= ROWS_TOGETHER, x += ROWS_TOGETHER, y += ROWS_TOGETHER * LANES, panel.ahead = 0)
        switch (n) {
        case 1: ROWS(1)
        case 2: ROWS(2)
        case 3: ROWS(3)
        case 4: ROWS(4)
        case 5: ROWS(5)
        case 6: ROWS(6)
        case 7: ROWS(7)
        default: ROWS(ROWS_TOGETHER)
        }
#undef ROWS
}

#endif
