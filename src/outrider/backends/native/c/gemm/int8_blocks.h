/* What int8 GEMMs are made of: quantised activations, and the steps of a block of weights. */

#ifndef OUTRIDER_INT8_BLOCKS_H
#define OUTRIDER_INT8_BLOCKS_H

#include "../formats/int8.h"
#include "../machine.h"
#include "../simd/int8.h"
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

/* Minus what the offset adds to the dot products of a row with half `h` of a block. Offsets are powers of two. */
INLINE i8_t offset_share(const IntegerFormat f, const int h, const Activations *x) {
    const int offset = SIGNED(f) ? 0 : f.offset, bits = offset ? __builtin_ctz(offset) : 0;
    return offset ? i8_shift_sums(i8_set_sums(x->negated[f.halves == 1 ? 0 : 1 + h]), bits) : i8_zero();
}

/* LANES outputs of a panel, from `lane` on. */
typedef struct {
    int64_t width, lane;
    const char *quants, *scales; /* of the first block; `quants`: of lane `lane` */
    int64_t ahead; /* distance in bytes of what is prefetched; 0: nothing is */
} Panel;

#endif
