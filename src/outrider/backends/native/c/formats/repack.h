/* A file's blocks in the order of the product kernels (`layout.h`), and back. */

#ifndef OUTRIDER_REPACK_H
#define OUTRIDER_REPACK_H

#include <stdlib.h>

#include "gguf.h"
#include "layout.h"
#if LANES == 8
#include "open8.h"
#else
#include "open16.h"
#endif

/* The kind that a file's rows become; PLAIN: this build reads none of its kind. */
static int64_t repacked_kind(const Format *format) {
    return LANES == 16 || format->repacked == Q4 || format->repacked == Q8 ? format->repacked : PLAIN;
}

/* The quants of one block of four rows, from `at` on; without a sign, but for Q8's. */
static void write_quants(const int64_t shape, const Block *rows, int at, int lowest, uint8_t *to) {
    uint8_t n[4][BLOCK_WEIGHTS];
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < BLOCK_WEIGHTS; i++) n[r][i] = (uint8_t)(rows[r].quant[at + i] + (shape == Q8 ? 0 : lowest));
    if (shape == Q8) {
        memcpy(to, n, sizeof n);
        return;
    }
#if LANES == 16
    for (int i = 0; i < BLOCK_WEIGHTS; i++) {
        to[2 * i] = (uint8_t)((n[0][i] & 15) | n[1][i] << 4);
        to[2 * i + 1] = (uint8_t)((n[2][i] & 15) | n[3][i] << 4);
    }
    to += 64;
    for (int r = 0; r < 4 && shape == Q5; r++) {
        uint32_t fifth = 0;
        for (int i = 0; i < BLOCK_WEIGHTS; i++) fifth |= (uint32_t)(n[r][i] >> 4) << i;
        memcpy(to + 4 * r, &fifth, sizeof fifth);
    }
    for (int i = 0; i < BLOCK_WEIGHTS && shape == Q6K; i++)
        to[i] = (uint8_t)(n[0][i] >> 4 | n[1][i] >> 4 << 2 | n[2][i] >> 4 << 4 | n[3][i] >> 4 << 6);
#else
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < 8; i++) { /* words of two rows in turn */
            uint8_t *word = to + r / 2 * 32 + 4 * i + r % 2 * 2;
            word[0] = (uint8_t)(n[r][i] | n[r][8 + i] << 4);
            word[1] = (uint8_t)(n[r][16 + i] | n[r][24 + i] << 4);
        }
#endif
}

/* Returns 0 where float16 does not hold the value. */
INLINE int write_f16(float value, uint8_t *to) {
    const uint16_t half = to_half(value);
    memcpy(to, &half, sizeof half);
    return from_half(half) == value;
}

/* The e of 2^(e - 128); 0 for a row of zeros. */
INLINE uint8_t exponent_of(float power) {
    uint32_t bits;
    memcpy(&bits, &power, sizeof bits);
    return bits >> 23 ? (uint8_t)((bits >> 23) + 1) : bits >> 22;
}

/* Write the scales of one block of four rows, and what is added to products with them. Returns their end; `fits`
   becomes 0 where float16 does not hold one. */
static uint8_t *write_scales(const int64_t kind, const Block *rows, int at, int lowest, uint8_t *to, int *fits) {
    const int64_t shape = SHAPE(kind);
    const int g = at / 16;
    for (int r = 0; r < 4; r++) {
        const Block *own = rows + r;
        if (kind == MXFP4) {
            *to++ = exponent_of(own->d);
            continue;
        }
        if (!HAS_SUPERBLOCKS(kind)) {
            *fits &= write_f16(own->d, to);
            if (shape != Q8) *fits &= write_f16(-own->dmin - (float)lowest * own->d, to + 2);
            to += shape == Q8 ? 2 : 4;
            continue;
        }
        for (int h = 0; h < (shape == Q3K ? 2 : 1); h++) {
            const int second = shape == Q6K ? own->scale[g + 1]
                               : lowest     ? lowest * own->scale[g + h]
                                            : own->minimum[g + h];
            *to++ = (uint8_t)own->scale[g + h];
            *to++ = (uint8_t)second;
        }
    }
    return to;
}

/* What the scales and minima of 256 weights of four rows are multiplied by. */
static uint8_t *write_factors(const int64_t kind, const Block *rows, int lowest, uint8_t *to, int *fits) {
    for (int r = 0; r < 4; r++, to += 4) {
        *fits &= write_f16(rows[r].d, to);
        *fits &= write_f16(kind == Q6K ? rows[r].d : lowest ? -rows[r].d : -rows[r].dmin, to + 2);
    }
    return to;
}

/* Four rows of a file, which begin at `from`; NULL: rows of zeros. Returns 0 where a scale does not fit. */
static int repack_four(const Format *format, const uint8_t *const from[4], int64_t width, char *to) {
    const int64_t kind = repacked_kind(format), shape = SHAPE(kind), size = QUANT_BYTES(shape);
    uint8_t *quants = (uint8_t *)to, *scales = (uint8_t *)to + width / BLOCK_WEIGHTS * size;
    Block rows[4];
    int fits = 1;
    memset(rows, 0, sizeof rows);
    for (int64_t b = 0; b < width / format->weights; b++) {
        for (int r = 0; r < 4; r++)
            if (from[r]) format->decode(from[r] + b * format->bytes, rows + r);
        if (HAS_SUPERBLOCKS(kind)) scales = write_factors(kind, rows, format->lowest, scales, &fits);
        for (int at = 0; at < format->weights; at += BLOCK_WEIGHTS, quants += size) {
            write_quants(shape, rows, at, format->lowest, quants);
            scales = write_scales(kind, rows, at, format->lowest, scales, &fits);
        }
    }
    return fits;
}

int64_t repacked_bytes(int64_t kind, int64_t width) {
    const Format *format = format_of(kind);
    const int64_t own = format && width % format->weights == 0 ? repacked_kind(format) : PLAIN;
    return own == PLAIN ? 0 : row_bytes(own, width);
}

typedef struct {
    const Format *format;
    const uint8_t *from;
    const int64_t *order;
    int64_t rows, width;
    char *to;
    int64_t *fits;
} Repack;

static void repack_task(const Thread *thread, const void *call) {
    const Repack *of = call;
    const Format *format = of->format;
    const int64_t size = of->width / format->weights * format->bytes, own = row_bytes(repacked_kind(format), of->width);
    const int64_t fours = (of->rows + 3) / 4;
    for (int64_t i = 4 * share_begin(thread, fours); i < 4 * share_end(thread, fours); i += 4) {
        const uint8_t *four[4];
        for (int64_t r = 0; r < 4; r++)
            four[r] = i + r < of->rows ? of->from + (of->order ? of->order[i + r] : i + r) * size : NULL;
        if (!repack_four(format, four, of->width, of->to + i * own)) __atomic_store_n(of->fits, 0, __ATOMIC_RELAXED);
    }
}

int64_t repack(
    int64_t kind, const uint8_t *from, int64_t rows, int64_t width, const int64_t *order, char *to, int64_t threads
) {
    const Format *format = format_of(kind);
    int64_t fits = 1;
    run(threads, NULL, 0, repack_task, &(Repack){format, from, order, rows, width, to, &fits});
    return fits ? repacked_kind(format) : PLAIN;
}

typedef struct {
    const Matrix *matrix;
    int64_t outputs, width;
    weight_t *to;
} Unpack;

static void unpack_task(const Thread *thread, const void *call) {
    const Unpack *of = call;
    const int64_t kind = of->matrix->kind, width = of->width, fours = of->outputs / 4;
    float *scales = (float *)thread->scratch;
    for (int64_t i = 4 * share_begin(thread, fours); i < 4 * share_end(thread, fours); i += 4)
        unpack_four(
            (const char *)of->matrix->data + i * row_bytes(kind, width), kind, width, scales, of->to + i * width
        );
}

void unpack_matrix(const Matrix *matrix, int64_t outputs, int64_t width, weight_t *to, int64_t threads) {
    const int64_t bytes = (width / BLOCK_WEIGHTS * MOST_SCALE_FLOATS + 16) * (int64_t)sizeof(float);
    char *scales = malloc(threads * bytes);
    if (!scales) abort();
    run(threads, scales, bytes, unpack_task, &(Unpack){matrix, outputs, width, to});
    free(scales);
}

#endif
