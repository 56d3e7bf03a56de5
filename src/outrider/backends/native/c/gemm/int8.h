/* Integer products: a file's quants (`formats/int8.h`) with activations rounded to int8.

   32 activations of a row share a scale: x ~ scale * quant, scale = max |x| / 127, rounded to nearest even. The
   products of a block of 32 weights (or of sixteen, where these have a scale of their own) with quants are summed in
   int32, without rounding. Then in float32, block by block, in one order:

       kinds with a scale for each block     sum = fma(scale * dot, d, sum), sum = fma(scale * quants, -dmin, sum)
       with superblocks, of each block       part = fma(dot, scale, part),  least = fma(minimum, scale * quants, least)
           behind 256 weights                sum = fma(d, part, sum),       sum = fma(-dmin, least, sum)

   where `dot` is the integer sum times the block's integer scale (of both halves together), which float32 holds
   exactly, and `quants` the sum of the quants that a minimum counts for. A result depends on its row of x and its row
   of W alone, and all instruction sets give the same bits. */

#ifndef OUTRIDER_INT8_H
#define OUTRIDER_INT8_H

#include "../formats/int8.h"
#include "../machine.h"
#include "../simd/int8.h"
#ifdef AMX
#include "../simd/amx.h"
#endif
#include "rows.h"

#define TINY 1e-30f /* activations whose magnitudes are at most this become 0 */

/* 32 activations of one row: quant * scale. */
typedef struct {
    int8_t quant[BLOCK_WEIGHTS];
    int32_t negated[3];            /* minus the sum of the quants: of all, and of each half */
    float scale, total, totals[2]; /* the sums times the scale: of all, and of each half */
} Activations;

INLINE void quantise_block(const act_t *from, Activations *to) {
    f32x8_t x[4];
    int32_t sums[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = f8_load_acts(from + 8 * i);
    const float largest = largest_magnitude(x);
    round_to_int8(x, largest > TINY ? 127.0f / largest : 0.0f, to->quant, sums);
    to->scale = largest <= TINY ? 0.0f : largest * (1.0f / 127.0f);
    to->negated[0] = -(sums[0] + sums[1]);
    to->total = to->scale * (float)(sums[0] + sums[1]);
    for (int h = 0; h < 2; h++) {
        to->negated[1 + h] = -sums[h];
        to->totals[h] = to->scale * (float)sums[h];
    }
}

/* The blocks `first` .. `last` - 1 of `n` rows of x, to [block, row]. */
static void quantise_rows(const act_t *x, int64_t n, int64_t width, int64_t first, int64_t last, Activations *to) {
    for (int64_t b = first; b < last; b++)
        for (int64_t i = 0; i < n; i++) quantise_block(x + i * width + b * BLOCK_WEIGHTS, to + b * n + i);
}

/* Have quants that need eight bits a sign? Not where dot products take unsigned bytes. */
#ifdef UNSIGNED_DOT
#define SIGNED(f) 0
#else
#define SIGNED(f) ((f).offset == 128)
#endif

/* Step `s` of a block. */
INLINE i8_t open_steps(const IntegerFormat f, const char *block, const int s) {
    const int apart = f.low == 8 ? 8 : f.low == 4 ? 4 : 2, shift = s / apart * f.low;
    i8_t x = i8_load(block + s % apart * STEP_BYTES);
    if (shift) x = i8_shift_right(x, shift);
    if (f.low < 8) x = i8_and(x, i8_set1((1 << f.low) - 1));
    if (f.high) {
        const int at = f.high == 2 ? s / 2 * 2 : s, mask = ((1 << f.high) - 1) << f.low;
        i8_t high = i8_load(block + (f.low + (f.high == 2 ? s % 2 : 0)) * STEP_BYTES);
        if (at > f.low) high = i8_shift_right(high, at - f.low);
        if (at < f.low) high = i8_shift_left(high, f.low - at);
        x = i8_or(x, i8_and(high, i8_set1(mask)));
    }
    if (f.values) {
        const i8_t table = i8_table(f.values);
        return i8_lookup(SIGNED(f) ? table : i8_xor(table, i8_set1(-128)), x);
    }
    return SIGNED(f) ? i8_xor(x, i8_set1(-128)) : x;
}

/* Steps that are multiplied together: with dot products of four one; else as many as have sums of pairs that int16 holds. */
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

/* LANES outputs of a panel, from `lane` on. */
typedef struct {
    int64_t width, lane;
    const char *quants, *scales; /* of the first block; `quants`: of lane `lane` */
    int64_t ahead; /* distance in bytes of what is prefetched; 0: nothing is */
} Panel;

/* Rows of x that are multiplied together: step by step, so that products of several rows are under way. */
#define ROWS_TOGETHER (LANES == 16 ? 8 : 4)
#define MAX_ROWS_TOGETHER 16 /* with tiles */
#define EACH_ROW _Pragma("GCC unroll 8") for (int64_t i = 0; i < n; i++)

/* Minus what the offset adds to the dot products of a row with half `h` of a block. Offsets are powers of two. */
INLINE i8_t offset_share(const IntegerFormat f, const int h, const Activations *x) {
    const int offset = SIGNED(f) ? 0 : f.offset, bits = offset ? __builtin_ctz(offset) : 0;
    return offset ? i8_shift_sums(i8_set_sums(x->negated[f.halves == 1 ? 0 : 1 + h]), bits) : i8_zero();
}

#ifdef AMX

#define TILES_FROM 8 /* rows from which tiles are used; fewer than sixteen are read with what lies behind them */

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
#if LANES == 16
        case 4: ROWS(4)
        case 5: ROWS(5)
        case 6: ROWS(6)
        case 7: ROWS(7)
#endif
        default: ROWS(ROWS_TOGETHER)
        }
#undef ROWS
}

/* The results of `n` quantised rows of x for the LANES outputs from `first` on, as rows of LANES numbers. */
static void multiply_int8(const Activations *x, int64_t n, int64_t width, Matrix w, int64_t first, float *y) {
    const int64_t bytes = panel_bytes(w.kind, width), lane = first % PANEL_ROWS;
    const char *own = (const char *)w.data + first / PANEL_ROWS * bytes;
    const Panel panel = {
        width, lane, own + 4 * lane, own + width / BLOCK_WEIGHTS * block_bytes(integer_format(w.kind)),
        lane ? 0 : (machine.ahead * LANES + PANEL_ROWS - 1) / PANEL_ROWS * bytes
    };
#define MULTIPLY(kind) return multiply_int8_of(kind, x, n, panel, y);
    EACH_INTEGER_KIND(w.kind, MULTIPLY)
#undef MULTIPLY
}

#endif
