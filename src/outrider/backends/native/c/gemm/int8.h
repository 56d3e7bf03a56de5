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
#include "rows.h"

#define TINY 1e-30f /* activations whose magnitudes are at most this become 0 */

/* 32 activations of one row: quant * scale. */
typedef struct {
    int8_t quant[BLOCK_WEIGHTS];
    int32_t sums[2]; /* of the quants of each half */
    float scale, total, totals[2]; /* the sums times the scale: of all, and of each half */
} Activations;

INLINE void quantise_block(const act_t *from, Activations *to) {
    f32x8_t x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = f8_load_acts(from + 8 * i);
    const float largest = largest_magnitude(x);
    round_to_int8(x, largest > TINY ? 127.0f / largest : 0.0f, to->quant, to->sums);
    to->scale = largest <= TINY ? 0.0f : largest * (1.0f / 127.0f);
    to->total = to->scale * (float)(to->sums[0] + to->sums[1]);
    for (int h = 0; h < 2; h++) to->totals[h] = to->scale * (float)to->sums[h];
}

/* `n` rows of x, block by block: all rows' first blocks, then all second ones. */
static const Activations *quantise_rows(const act_t *x, int64_t n, int64_t width, void *room) {
    Activations *to = room;
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS)
        for (int64_t i = 0; i < n; i++) quantise_block(x + i * width + k, to++);
    return room;
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

/* The sums of the products of `count` steps with their quants, plus `start`. */
INLINE i8_t dot_steps(const IntegerFormat f, const i8_t *w, const int8_t *quant, const int count, int32_t start) {
    i8_t sum = i8_set_sums(start);
#ifdef I8_DOT
    (void)f;
#pragma GCC unroll 8
    for (int s = 0; s < count; s++) sum = i8_dot(sum, w[s], quant + 4 * s);
#else
    const int most = SIGNED(f) ? 128 : (1 << (f.low + f.high)) - 1;
    const int fit = 32767 / (most * 254) < count ? 32767 / (most * 254) : count; /* steps whose sums int16 holds */
#pragma GCC unroll 8
    for (int s = 0; s < count; s += fit) {
        const int end = s + fit < count ? s + fit : count;
        i8_t twos = i8_zero();
#pragma GCC unroll 8
        for (int i = s; i < end; i++) {
            const i8_t acts = i8_repeat(quant + 4 * i);
            const i8_t own = SIGNED(f) ? i8_dot_twos(i8_abs(w[i]), i8_sign(acts, w[i])) : i8_dot_twos(w[i], acts);
            twos = i == s ? own : i8_add_twos(twos, own);
        }
        sum = i8_add_sums(sum, i8_twos_to_sums(twos));
    }
#endif
    return sum;
}

/* The products of one row's block with LANES outputs, times the integer scales where there are superblocks. */
INLINE vec_t dot_block(const IntegerFormat f, const i8_t w[8], const vec_t scale[2], const Activations *x) {
    const int off = SIGNED(f) ? 0 : f.offset;
    if (f.halves == 1) {
        const vec_t dot = v_from_sums(dot_steps(f, w, x->quant, 8, off ? -off * (x->sums[0] + x->sums[1]) : 0));
        return f.superblock ? v_mul(dot, scale[0]) : dot;
    }
    const vec_t first = v_from_sums(dot_steps(f, w, x->quant, 4, off ? -off * x->sums[0] : 0));
    const vec_t last = v_from_sums(dot_steps(f, w + 4, x->quant + 16, 4, off ? -off * x->sums[1] : 0));
    return v_fma(last, scale[1], v_mul(first, scale[0]));
}

/* What is summed of a row. */
typedef struct {
    vec_t sum, part, least;
} Sums;

/* 32 registers hold the sums of eight rows, where loops over them are unrolled. */
#if LANES == 16
#define EACH_ROW _Pragma("GCC unroll 8")
#else
#define EACH_ROW
#endif

/* `n` rows of x, of the `stride` whose blocks lie together, with LANES outputs of a panel, from `lane` on, as rows of
   LANES numbers. `w`: the first one's quants; `scales`: the panel's. `ahead`: distance in bytes of what is prefetched;
   0: nothing is. */
INLINE void multiply_int8_rows(
    const int64_t kind, const int64_t n, const Activations *x, int64_t stride, int64_t width, const char *w,
    const char *scales, int64_t lane, int64_t ahead, float *y
) {
    const IntegerFormat f = integer_format(kind);
    const int64_t blocks = width / BLOCK_WEIGHTS, unit = f.superblock ? SUPERBLOCK / BLOCK_WEIGHTS : 1;
    const int own_scales = f.superblock ? f.halves : 0;
    Sums of[CHUNK_ROWS];
    EACH_ROW for (int64_t i = 0; i < n; i++) of[i].sum = v_zero();
    for (int64_t b = 0; b < blocks; b += unit) {
        const char *d = scales + 2 * lane, *small = scales + 2 * PANEL_ROWS * (1 + f.minimum) + lane;
        for (int64_t i = 0; ahead && i < unit_scale_bytes(f); i += CACHE_LINE) prefetch(scales + ahead + i);
        EACH_ROW for (int64_t i = 0; i < n; i++) of[i].part = of[i].least = v_zero();
        for (int64_t u = 0; u < unit; u++, w += block_bytes(f), x += stride) {
            i8_t own[8];
            vec_t scale[2], minimum[2];
            for (int64_t i = 0; ahead && i < block_bytes(f); i += CACHE_LINE) prefetch(w + ahead + i);
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) own[s] = open_steps(f, w, s);
#pragma GCC unroll 2
            for (int h = 0; h < own_scales; h++) {
                scale[h] = v_load_i8(small + PANEL_ROWS * h);
                if (f.minimum) minimum[h] = v_load_i8(small + PANEL_ROWS * (f.halves + h));
            }
            small += PANEL_ROWS * own_scales * (1 + f.minimum);
            EACH_ROW for (int64_t i = 0; i < n; i++) {
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
        EACH_ROW for (int64_t i = 0; i < n; i++) {
            if (f.superblock) of[i].sum = v_fma(v_load_f16_all(d), of[i].part, of[i].sum);
            if (f.superblock && f.minimum)
                of[i].sum = v_fma(v_load_f16_all(d + 2 * PANEL_ROWS), of[i].least, of[i].sum);
        }
        scales += unit_scale_bytes(f);
    }
    EACH_ROW for (int64_t i = 0; i < n; i++) v_store(y + i * LANES, of[i].sum);
}

/* The same for any number of rows. With 32 registers at most eight at a time, whose sums stay in them: the panel lies in
   the cache then. With sixteen, sums of many rows lie in memory, and the panel is opened once. */
INLINE void multiply_int8_of(
    const int64_t kind, const Activations *x, int64_t n, int64_t width, const char *w, const char *scales,
    int64_t lane, int64_t ahead, float *y
) {
#define ROWS(count) multiply_int8_rows(kind, done = (count), x, stride, width, w, scales, lane, ahead, y)
    const int64_t stride = n;
    for (int64_t done; n; n -= done, x += done, y += done * LANES, ahead = 0) {
        if (n == 1)
            ROWS(1);
        else if (LANES == 8)
            ROWS(n);
        else if (n == 2)
            ROWS(2);
        else if (n == 3)
            ROWS(3);
        else if (n < 8)
            ROWS(4);
        else
            ROWS(8);
    }
#undef ROWS
}

/* The results of `n` quantised rows of x for the LANES outputs from `first` on, as rows of LANES numbers. */
static void multiply_int8(const Activations *x, int64_t n, int64_t width, Matrix w, int64_t first, float *y) {
    const int64_t panel = panel_bytes(w.kind, width), lane = first % PANEL_ROWS;
    const char *own = (const char *)w.data + first / PANEL_ROWS * panel;
    const char *scales = own + width / BLOCK_WEIGHTS * block_bytes(integer_format(w.kind));
    const int64_t ahead = lane ? 0 : (machine.ahead * LANES + PANEL_ROWS - 1) / PANEL_ROWS * panel;
#define MULTIPLY(kind) return multiply_int8_of(kind, x, n, width, own + 4 * lane, scales, lane, ahead, y);
    EACH_INTEGER_KIND(w.kind, MULTIPLY)
#undef MULTIPLY
}

#endif
