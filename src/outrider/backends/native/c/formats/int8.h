/* The layout of matrices for integer products (`gemm/int8.h`): a file's own quants, without a sign.

   Sixteen rows lie together, a panel. First come the quants, block by block of 32: a block has eight steps of 64 bytes,
   and byte 4 j + i of step s is weight 4 s + i of row j, plus the kind's `offset`. What is stored are the steps' low
   bits (8, 4 or 2), and after those of a block their high bits (0, 1 or 2):

       8 bits: the steps themselves           4: byte k has step k in the lower bits, and step k + 4 in the upper ones
       2: steps k, k + 2, k + 4, k + 6 in byte k, from the lowest bits on           1: all steps, from the lowest bit on

   Then come the scales, in the same order of blocks, each for all sixteen rows: float16 `d` and, where the kind has
   minima, float16 -dmin, of a block or, with superblocks, of 256 weights; with superblocks after these for each block
   int8 scales, one or two (of sixteen weights each), and as many minima. A panel is padded to a
   multiple of 64 bytes. */

#ifndef OUTRIDER_FORMATS_INT8_H
#define OUTRIDER_FORMATS_INT8_H

#include <stdlib.h>

#include "gguf.h"
#include "layout.h"

#define PANEL_ROWS 16 /* rows of a panel */
#define STEP_BYTES 64

/* How a kind's weights are stored. */
typedef struct {
    int low, high;  /* bits of a quant */
    int offset;     /* added to quants, or to the values of a table */
    int halves;     /* scales of a block */
    int superblock; /* has it superblocks? */
    int minimum;    /* has it minima? */
    const int8_t *values; /* what quants stand for; NULL: for themselves */
} IntegerFormat;

INLINE IntegerFormat integer_format(const int64_t kind) {
    switch (kind - INTEGER) {
    case GGUF_Q4_0: return (IntegerFormat){4, 0, 8, 1, 0, 0, NULL};
    case GGUF_Q4_1: return (IntegerFormat){4, 0, 0, 1, 0, 1, NULL};
    case GGUF_Q5_0: return (IntegerFormat){4, 1, 16, 1, 0, 0, NULL};
    case GGUF_Q5_1: return (IntegerFormat){4, 1, 0, 1, 0, 1, NULL};
    case GGUF_Q8_0: return (IntegerFormat){8, 0, 128, 1, 0, 0, NULL};
    case GGUF_Q2_K: return (IntegerFormat){2, 0, 0, 2, 1, 1, NULL};
    case GGUF_Q3_K: return (IntegerFormat){2, 1, 4, 2, 1, 0, NULL};
    case GGUF_Q4_K: return (IntegerFormat){4, 0, 0, 1, 1, 1, NULL};
    case GGUF_Q5_K: return (IntegerFormat){4, 1, 0, 1, 1, 1, NULL};
    case GGUF_Q6_K: return (IntegerFormat){4, 2, 32, 2, 1, 0, NULL};
    case GGUF_IQ4_NL: return (IntegerFormat){4, 0, 128, 1, 0, 0, iq4_values};
    case GGUF_IQ4_XS: return (IntegerFormat){4, 0, 128, 1, 1, 0, iq4_values};
    case GGUF_MXFP4: return (IntegerFormat){4, 0, 128, 1, 0, 0, mxfp4_values};
    default: return (IntegerFormat){0};
    }
}

/* Code for each kind: `DO(kind)`. */
#define EACH_INTEGER_KIND(kind, DO)                                                                                    \
    switch ((kind) - INTEGER) {                                                                                        \
    case GGUF_Q4_0: DO(INTEGER + GGUF_Q4_0) break;                                                                     \
    case GGUF_Q4_1: DO(INTEGER + GGUF_Q4_1) break;                                                                     \
    case GGUF_Q5_0: DO(INTEGER + GGUF_Q5_0) break;                                                                     \
    case GGUF_Q5_1: DO(INTEGER + GGUF_Q5_1) break;                                                                     \
    case GGUF_Q2_K: DO(INTEGER + GGUF_Q2_K) break;                                                                     \
    case GGUF_Q3_K: DO(INTEGER + GGUF_Q3_K) break;                                                                     \
    case GGUF_Q4_K: DO(INTEGER + GGUF_Q4_K) break;                                                                     \
    case GGUF_Q5_K: DO(INTEGER + GGUF_Q5_K) break;                                                                     \
    case GGUF_Q6_K: DO(INTEGER + GGUF_Q6_K) break;                                                                     \
    case GGUF_IQ4_NL: DO(INTEGER + GGUF_IQ4_NL) break;                                                                 \
    case GGUF_IQ4_XS: DO(INTEGER + GGUF_IQ4_XS) break;                                                                 \
    case GGUF_MXFP4: DO(INTEGER + GGUF_MXFP4) break;                                                                   \
    default: DO(INTEGER + GGUF_Q8_0)                                                                                   \
    }

/* Bytes of a block of sixteen rows, and of the scales of a unit: a block, or a superblock. */
INLINE int64_t block_bytes(const IntegerFormat f) {
    return STEP_BYTES * (f.low + f.high);
}
INLINE int64_t unit_scale_bytes(const IntegerFormat f) {
    const int64_t blocks = f.superblock ? SUPERBLOCK / BLOCK_WEIGHTS : 0;
    return (PANEL_ROWS * 2 + blocks * PANEL_ROWS * f.halves) * (1 + f.minimum);
}

INLINE int64_t panel_bytes(int64_t kind, int64_t width) {
    const IntegerFormat f = integer_format(kind);
    const int64_t blocks = width / BLOCK_WEIGHTS, units = f.superblock ? width / SUPERBLOCK : blocks;
    return (blocks * block_bytes(f) + units * unit_scale_bytes(f) + 63) / 64 * 64;
}

/* -- writing ------------------------------------------------------------------------------------------------------- */

/* A block's quants of sixteen rows, `at` of each decoded block on. */
INLINE void write_steps(const IntegerFormat f, const Block *rows, int at, uint8_t *to) {
    uint8_t step[8][STEP_BYTES];
    for (int j = 0; j < PANEL_ROWS; j++)
        for (int i = 0; i < 8; i++) memcpy(step[i] + 4 * j, rows[j].quant + at + 4 * i, 4);
    uint8_t *all = &step[0][0];
    for (int k = 0; k < (f.values ? 0 : (int)sizeof step); k++) all[k] = (uint8_t)(all[k] + f.offset);
    if (f.low == 8) {
        memcpy(to, step, sizeof step);
        return;
    }
    memset(to, 0, block_bytes(f));
    const int apart = f.low == 4 ? 4 : 2, mask = (1 << f.low) - 1;
    for (int s = 0; s < 8; s++) {
        uint8_t *low = to + s % apart * STEP_BYTES, *high = to + f.low * STEP_BYTES;
        if (f.high == 2) high += s % 2 * STEP_BYTES;
        const int shift = s / apart * f.low, at_high = f.high == 2 ? s / 2 * 2 : s;
        for (int k = 0; k < STEP_BYTES; k++) low[k] |= (uint8_t)((step[s][k] & mask) << shift);
        for (int k = 0; k < STEP_BYTES && f.high; k++) high[k] |= (uint8_t)(step[s][k] >> f.low << at_high);
    }
}

INLINE int write_half(float value, uint8_t *to) { /* 0 where float16 does not hold it, or it is not finite */
    const uint16_t half = to_half(value);
    memcpy(to, &half, sizeof half);
    return from_half(half) == value && value - value == 0;
}

/* The scales of a unit of sixteen decoded rows; `at`: its first weight. Returns their end. */
static uint8_t *write_unit_scales(const IntegerFormat f, const Block *rows, int at, uint8_t *to, int *fits) {
    for (int m = 0; m <= f.minimum; m++)
        for (int j = 0; j < PANEL_ROWS; j++, to += 2) *fits &= write_half(m ? -rows[j].dmin : rows[j].d, to);
    for (int g = at / 16; f.superblock && g < (at + SUPERBLOCK) / 16; g += 2)
        for (int m = 0; m <= f.minimum; m++)
            for (int h = 0; h < f.halves; h++)
                for (int j = 0; j < PANEL_ROWS; j++)
                    *to++ = (uint8_t)(m ? rows[j].minimum[g + h] : rows[j].scale[g + h]);
    return to;
}

/* A panel of rows, which begin at `from`; NULL: a row of zeros. Returns 0 where a scale does not fit. */
static int
write_panel(const Format *format, const uint8_t *const from[PANEL_ROWS], int64_t width, char *to) {
    const IntegerFormat f = integer_format(INTEGER + format->kind);
    const int64_t unit = f.superblock ? SUPERBLOCK : BLOCK_WEIGHTS;
    uint8_t *quants = (uint8_t *)to, *scales = (uint8_t *)to + width / BLOCK_WEIGHTS * block_bytes(f);
    Block rows[PANEL_ROWS];
    int fits = 1;
    memset(rows, 0, sizeof rows);
    for (int64_t b = 0; b < width / unit; b++) {
        for (int j = 0; j < PANEL_ROWS; j++)
            if (from[j]) format->decode(from[j] + b * format->bytes, rows + j);
        scales = write_unit_scales(f, rows, 0, scales, &fits);
        for (int at = 0; at < unit; at += BLOCK_WEIGHTS, quants += block_bytes(f)) write_steps(f, rows, at, quants);
    }
    memset(scales, 0, to + panel_bytes(INTEGER + format->kind, width) - (char *)scales);
    return fits;
}

/* A row of numbers rounded to blocks of Q8_0: symmetric, with the scale of the largest magnitude. */
static void round_to_q8_0(const float *from, int64_t width, uint8_t *to) {
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS, to += 34) {
        float most = 0;
        for (int i = 0; i < BLOCK_WEIGHTS; i++) {
            const float size = from[k + i] < 0 ? -from[k + i] : from[k + i];
            if (size > most || size != size) most = size; /* NaN stays: nothing is larger */
        }
        const uint16_t half = to_half(most / 127 < 1e-7f ? 1e-7f : most / 127);
        const float d = from_half(half);
        memcpy(to, &half, sizeof half);
        for (int i = 0; i < BLOCK_WEIGHTS; i++) {
            const float n = __builtin_rintf(from[k + i] / d);
            to[2 + i] = (uint8_t)(int8_t)(n > 127 ? 127 : n < -127 ? -127 : n == n ? (int)n : 0);
        }
    }
}

typedef struct {
    const Format *format;
    const uint8_t *from;
    const int64_t *order;
    int64_t rows, width, rounded;
    char *to;
    int64_t *fits;
} PackInt8;

static void pack_int8_task(const Thread *thread, const void *call) {
    const PackInt8 *of = call;
    const Format *format = of->rounded ? format_of(GGUF_Q8_0) : of->format;
    const int64_t size = of->width / of->format->weights * of->format->bytes, width = of->width;
    const int64_t panel = panel_bytes(INTEGER + format->kind, width), panels = (of->rows + 15) / 16;
    const int64_t q8_bytes = width / BLOCK_WEIGHTS * 34;
    float *row = (float *)thread->scratch;
    uint8_t *q8 = (uint8_t *)(row + width);
    for (int64_t t = share_begin(thread, panels); t < share_end(thread, panels); t++) {
        const uint8_t *from[PANEL_ROWS];
        for (int64_t j = 0; j < PANEL_ROWS; j++) {
            const int64_t r = 16 * t + j;
            from[j] = r < of->rows ? of->from + (of->order ? of->order[r] : r) * size : NULL;
            if (!from[j] || !of->rounded) continue;
            for (int64_t b = 0; b < width / of->format->weights; b++)
                dequantise_block(of->format, from[j] + b * of->format->bytes, row + b * of->format->weights);
            round_to_q8_0(row, width, q8 + j * q8_bytes);
            from[j] = q8 + j * q8_bytes;
        }
        if (!write_panel(format, from, width, of->to + t * panel)) __atomic_store_n(of->fits, 0, __ATOMIC_RELAXED);
    }
}

int64_t int8_bytes(int64_t kind, int64_t rows, int64_t width) {
    const Format *format = format_of(kind);
    const IntegerFormat f = integer_format(INTEGER + kind);
    return f.low && width % format->weights == 0 ? (rows + 15) / 16 * panel_bytes(INTEGER + kind, width) : 0;
}

int64_t pack_int8(
    int64_t kind, const uint8_t *from, int64_t rows, int64_t width, const int64_t *order, int64_t rounded, char *to,
    int64_t threads
) {
    const int64_t scratch = rounded ? width * (int64_t)sizeof(float) + 16 * (width / BLOCK_WEIGHTS) * 34 : 0;
    int64_t fits = 1;
    char *buffer = malloc(threads * scratch + 1);
    if (!buffer) abort();
    run(threads, buffer, scratch, pack_int8_task,
        &(PackInt8){format_of(kind), from, order, rows, width, rounded, to, &fits});
    free(buffer);
    return fits ? INTEGER + (rounded ? (int64_t)GGUF_Q8_0 : kind) : PLAIN;
}

/* -- reading: the weights of a panel, by its layout alone ---------------------------------------------------------- */

INLINE int quant_at(const IntegerFormat f, const uint8_t *block, int row, int i) {
    const int s = i / 4, k = 4 * row + i % 4, apart = f.low == 4 ? 4 : 2;
    if (f.low == 8) return block[s * STEP_BYTES + k];
    const int low = block[s % apart * STEP_BYTES + k] >> s / apart * f.low & ((1 << f.low) - 1);
    const uint8_t *high = block + f.low * STEP_BYTES + k;
    if (f.high == 1) return low | (high[0] >> s & 1) << f.low;
    if (f.high == 2) return low | (high[s % 2 * STEP_BYTES] >> s / 2 * 2 & 3) << f.low;
    return low;
}

void unpack_int8(const Matrix *matrix, int64_t rows, int64_t width, float *to) {
    const IntegerFormat f = integer_format(matrix->kind);
    const int64_t unit = f.superblock ? SUPERBLOCK : BLOCK_WEIGHTS, panel = panel_bytes(matrix->kind, width);
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *own = (const uint8_t *)matrix->data + r / 16 * panel;
        const uint8_t *scales = own + width / BLOCK_WEIGHTS * block_bytes(f);
        const int row = (int)(r % 16);
        for (int64_t k = 0; k < width; k++) {
            const uint8_t *d = scales + k / unit * unit_scale_bytes(f) + 2 * row;
            const uint8_t *small = d - row + 2 * PANEL_ROWS * (1 + f.minimum) +
                                   PANEL_ROWS * (k % unit / 32 * f.halves * (1 + f.minimum) + k / 16 % f.halves);
            const int q = quant_at(f, own + k / BLOCK_WEIGHTS * block_bytes(f), row, (int)(k % BLOCK_WEIGHTS));
            const float scale = f.superblock ? half_at(d) * (float)(int8_t)*small : half_at(d);
            float least = f.minimum ? half_at(d + 32) : 0;
            if (f.minimum && f.superblock) least *= (float)(int8_t)small[PANEL_ROWS * f.halves];
            to[r * width + k] = scale * (float)(f.values ? f.values[q] : q - f.offset) + least;
        }
    }
}

#endif
