/* Integer products (W4A8, W8A8): weights of four or eight bits with activations that are rounded to eight bits, 32 at
   a time with a scale of their own. 32 products are one integer sum, which rounds nothing; such sums are added up in
   float32, block by block, however many rows there are. So a result depends on its row of x and its row of W alone. It
   is another target than the one whose activations are floating-point. Eight outputs are computed at a time; where the
   processor has VNNI, one instruction adds four products, and the sums are the same. */

#ifndef OUTRIDER_INT8_H
#define OUTRIDER_INT8_H

#include "../machine.h"
#include "../simd/int8.h"
#include "rows.h"

#define TINY 1e-30f /* activations whose magnitudes are at most this become 0 */

/* 32 activations of one row: quant * scale; and their sum. */
typedef struct {
    int8_t quant[BLOCK_WEIGHTS];
    float scale, sum;
} Activations;

#ifdef BF16_WEIGHTS

INLINE void quantise_block(const act_t *x, Activations *to) {
    i8x32_t rounded[4], most = i8_zero();
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) most = max_magnitude(most, f8_load_acts(x + 8 * i));
    const float largest = largest_magnitude(most);
    const f32x8_t factor = f8_set1(largest > TINY ? 127.0f / largest : 0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) rounded[i] = i32_round(f8_mul(f8_load_acts(x + 8 * i), factor));
    const i8x32_t quants = i8_pack(rounded);
    i8_store(to->quant, quants);
    to->scale = largest <= TINY ? 0.0f : largest * (1.0f / 127.0f);
    to->sum = to->scale * (float)i8_sum(quants);
}

/* `n` rows of x, block by block: all rows' first blocks, then all second ones. */
static const act_t *quantise_rows(const act_t *x, int64_t n, int64_t width, act_t *room) {
    Activations *to = (Activations *)room;
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS)
        for (int64_t i = 0; i < n; i++) quantise_block(x + i * width + k, to++);
    return room;
}

/* The eight vectors of a block: four with quants 8 v .. 8 v + 7 of rows 0, 1, 4 and 5, four with those of 2, 3, 6 and
   7. */
INLINE void load_int8_block(const int kind, const char *from, i8x32_t w[8]) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        const i8x32_t one = i8_load(from + 32 * v);
        w[v] = kind == W4A8 ? i8_low_nibbles(one) : one;
        w[v + 4] = kind == W4A8 ? i8_high_nibbles(one) : i8_load(from + 32 * (v + 4));
    }
}

/* The sums of 32 products for eight outputs, in order. */
INLINE i8x32_t dot_block(const int kind, const i8x32_t w[8], const int8_t *quant) {
    const int small = kind == W4A8; /* sums of sixteen products are at most 16 * 15 * 127, which int16 holds */
    i8x32_t acts[4], half[2];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) acts[v] = i8_repeat(quant + 8 * v);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        half[h] = i8_zero();
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const i8x32_t own = w[4 * h + v];
            const i8x32_t size = kind == W4A8 ? own : i8_abs(own);
            const i8x32_t with = kind == W4A8 ? acts[v] : i8_sign(acts[v], own);
            half[h] = i8_dot(half[h], size, with, small);
        }
    }
    return i8_dot_sums(half[0], half[1], small);
}

/* `n` rows of x with the eight outputs at `w`, as rows of LANES numbers. */
INLINE void multiply_int8_rows(
    const int kind, const int64_t n, const Activations *x, int64_t width, const char *w, int64_t ahead, float *y
) {
    const char *scales = w + width / BLOCK_WEIGHTS * 8 * (kind == W4A8 ? 16 : 32);
    f32x8_t sum[CHUNK_ROWS];
    for (int64_t i = 0; i < n; i++) sum[i] = f8_zero();
    for (int64_t g = 0; g < width / BLOCK_WEIGHTS; g++, x += n) {
        i8x32_t own[8];
        const f32x8_t scale = f8_load_f16(scales), least = f8_load_f16(scales + (kind == W4A8 ? 16 : 0));
        if (g % (kind == W4A8 ? 2 : 4) == 0) prefetch(scales + ahead);
        for (int i = 0; i < 8 * (kind == W4A8 ? 16 : 32); i += CACHE_LINE) prefetch(w + ahead + i);
        load_int8_block(kind, w, own);
        for (int64_t i = 0; i < n; i++) {
            const f32x8_t dot = f8_from_i32(dot_block(kind, own, x[i].quant));
            sum[i] = f8_fma(f8_mul(dot, f8_set1(x[i].scale)), scale, sum[i]);
            if (kind == W4A8) sum[i] = f8_fma(f8_set1(x[i].sum), least, sum[i]);
        }
        w += 8 * (kind == W4A8 ? 16 : 32);
        scales += kind == W4A8 ? 32 : 16;
    }
    for (int64_t i = 0; i < n; i++) f8_store(y + i * LANES, sum[i]);
}

/* The same for each kind; one to four rows have code of their own, in which their sums stay in registers. */
INLINE void multiply_int8_of(
    const int kind, const Activations *x, int64_t n, int64_t width, const char *w, int64_t ahead, float *y
) {
    if (n == 1) return multiply_int8_rows(kind, 1, x, width, w, ahead, y);
    if (n == 2) return multiply_int8_rows(kind, 2, x, width, w, ahead, y);
    if (n == 3) return multiply_int8_rows(kind, 3, x, width, w, ahead, y);
    if (n == 4) return multiply_int8_rows(kind, 4, x, width, w, ahead, y);
    multiply_int8_rows(kind, n, x, width, w, ahead, y);
}

/* The results of `n` quantised rows of x for LANES outputs from `first` on; those from `last` on are discarded. */
static void multiply_int8(const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, float *y) {
    const int64_t size = row_bytes(w.kind, width), ahead = machine.ahead * LANES * size;
    const Activations *acts = (const Activations *)x;
    for (int64_t j = 0; j < LANES && first + j < last; j += 8) {
        const char *from = (const char *)w.data + (first + j) * size;
        if (w.kind == W4A8)
            multiply_int8_of(W4A8, acts, n, width, from, ahead, y + j);
        else
            multiply_int8_of(W8A8, acts, n, width, from, ahead, y + j);
    }
}

#endif

#endif
