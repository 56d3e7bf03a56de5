/* The quantised kinds of .gguf files. A weight is

       (d * scale) * quant - (dmin * minimum)

   in float32, where d and dmin are the block's, scale and minimum an integer for each sixteen weights, and the quant
   an integer of its own, or a table's value for it. No product is rounded, so a weight is rounded once, at the
   subtraction; gguf-py's reader comes to the same bits.

   A kind is one row of `formats`. */

#ifndef OUTRIDER_GGUF_H
#define OUTRIDER_GGUF_H

#include "../simd/half.h"
#include "../threads.h"
#include "../types.h"

typedef struct {
    float d, dmin;
    int8_t quant[256];
    int16_t scale[16], minimum[16];
} Block;

typedef void Decode(const uint8_t *block, Block *to);

INLINE float half_at(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return from_half(bits);
}

INLINE uint32_t word_at(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* A block of 32 quants with a scale, and with a minimum or 0. */
INLINE void set_scale(float d, float minimum, Block *to) {
    to->d = d;
    to->dmin = -minimum;
    for (int g = 0; g < 2; g++) to->scale[g] = 1, to->minimum[g] = 1;
}

INLINE void subtract(Block *to, int count, int by) {
    for (int i = 0; i < count; i++) to->quant[i] = (int8_t)(to->quant[i] - by);
}

/* 32 quants of four bits, those of the first half in the lower ones; and of five, whose fifth ones stand in a word. */
INLINE void unpack_4(const uint8_t *q, int8_t *to) {
    for (int i = 0; i < 16; i++) to[i] = (int8_t)(q[i] & 15), to[16 + i] = (int8_t)(q[i] >> 4);
}
INLINE void unpack_5(const uint8_t *q, const uint8_t *fifth, int8_t *to) {
    const uint32_t bits = word_at(fifth);
    unpack_4(q, to);
    for (int i = 0; i < 32; i++) to[i] = (int8_t)(to[i] | (bits >> i & 1) << 4);
}

static void decode_q4_0(const uint8_t *block, Block *to) {
    set_scale(half_at(block), -0.0f, to);
    unpack_4(block + 2, to->quant);
    subtract(to, 32, 8);
}

static void decode_q4_1(const uint8_t *block, Block *to) {
    set_scale(half_at(block), half_at(block + 2), to);
    unpack_4(block + 4, to->quant);
}

static void decode_q5_0(const uint8_t *block, Block *to) {
    set_scale(half_at(block), -0.0f, to);
    unpack_5(block + 6, block + 2, to->quant);
    subtract(to, 32, 16);
}

static void decode_q5_1(const uint8_t *block, Block *to) {
    set_scale(half_at(block), half_at(block + 2), to);
    unpack_5(block + 8, block + 4, to->quant);
}

static void decode_q8_0(const uint8_t *block, Block *to) {
    set_scale(half_at(block), -0.0f, to);
    memcpy(to->quant, block + 2, 32);
}

static void decode_q2_k(const uint8_t *block, Block *to) {
    to->d = half_at(block + 80);
    to->dmin = half_at(block + 82);
    for (int g = 0; g < 16; g++) to->scale[g] = block[g] & 15, to->minimum[g] = block[g] >> 4;
    for (int i = 0; i < 256; i++) to->quant[i] = block[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

static void decode_q3_k(const uint8_t *block, Block *to) {
    const uint8_t *high = block, *q = block + 32, *packed = block + 96;
    to->d = half_at(block + 108);
    to->dmin = 0;
    for (int g = 0; g < 16; g++) {
        const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
        to->scale[g] = (int16_t)((low | (packed[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
        to->minimum[g] = 0;
    }
    for (int i = 0; i < 256; i++)
        to->quant[i] = (int8_t)((q[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (high[i % 32] >> i / 32 & 1) << 2);
    subtract(to, 256, 4);
}

/* Q4_K and Q5_K: a scale and a minimum of six bits for each 32 quants, in twelve bytes after d and dmin. */
INLINE void unpack_scales_6(const uint8_t *block, Block *to) {
    const uint8_t *packed = block + 4;
    to->d = half_at(block);
    to->dmin = half_at(block + 2);
    for (int i = 0; i < 16; i++) {
        const int g = i / 2;
        to->scale[i] = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
        to->minimum[i] = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
    }
}

static void decode_q4_k(const uint8_t *block, Block *to) {
    unpack_scales_6(block, to);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) {
            const uint8_t q = block[16 + 32 * j + i];
            to->quant[64 * j + i] = (int8_t)(q & 15);
            to->quant[64 * j + 32 + i] = (int8_t)(q >> 4);
        }
}

static void decode_q5_k(const uint8_t *block, Block *to) {
    unpack_scales_6(block, to);
    for (int i = 0; i < 256; i++)
        to->quant[i] = (int8_t)((block[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15) |
                                (block[16 + i % 32] >> i / 32 & 1) << 4);
}

static void decode_q6_k(const uint8_t *block, Block *to) {
    to->d = half_at(block + 208);
    to->dmin = 0;
    for (int g = 0; g < 16; g++) to->scale[g] = (int8_t)block[192 + g], to->minimum[g] = 0;
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
        int8_t *quant = to->quant + 128 * half;
        for (int i = 0; i < 32; i++) {
            quant[i] = (int8_t)(((low[i] & 15) | (high[i] & 3) << 4) - 32);
            quant[32 + i] = (int8_t)(((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) - 32);
            quant[64 + i] = (int8_t)((low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32);
            quant[96 + i] = (int8_t)((low[32 + i] >> 4 | high[i] >> 6 << 4) - 32);
        }
    }
}

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void decode_iq4_nl(const uint8_t *block, Block *to) {
    set_scale(half_at(block), -0.0f, to);
    unpack_4(block + 2, to->quant);
}

static void decode_iq4_xs(const uint8_t *block, Block *to) {
    const int high = block[2] | block[3] << 8;
    to->d = half_at(block);
    to->dmin = 0;
    for (int g = 0; g < 8; g++) {
        const int scale = ((block[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4) - 32;
        to->scale[2 * g] = to->scale[2 * g + 1] = (int16_t)scale;
        to->minimum[2 * g] = to->minimum[2 * g + 1] = 0;
        unpack_4(block + 8 + 16 * g, to->quant + 32 * g);
    }
}

/* The table's values are doubled, so that all are integers, and d is half of two to the exponent. */
static void decode_mxfp4(const uint8_t *block, Block *to) {
    const uint32_t bits = block[0] < 2 ? 0x200000u << block[0] : (uint32_t)(block[0] - 1) << 23;
    float d;
    memcpy(&d, &bits, sizeof d);
    set_scale(d, -0.0f, to);
    unpack_4(block + 1, to->quant);
}

typedef struct {
    int64_t kind;           /* in the file */
    int64_t weights, bytes; /* of a block */
    int lowest;             /* quants are at least minus this; 0 for those of a table */
    const int8_t *values;   /* what quants stand for; NULL: for themselves */
    Decode *decode;         /* NULL: weights as they are */
    int64_t repacked;       /* the kind of `layout.h` that it becomes; PLAIN: none */
} Format;

enum {
    GGUF_F32 = 0,
    GGUF_F16 = 1,
    GGUF_Q4_0 = 2,
    GGUF_Q4_1 = 3,
    GGUF_Q5_0 = 6,
    GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8,
    GGUF_Q2_K = 10,
    GGUF_Q3_K = 11,
    GGUF_Q4_K = 12,
    GGUF_Q5_K = 13,
    GGUF_Q6_K = 14,
    GGUF_IQ4_NL = 20,
    GGUF_IQ4_XS = 23,
    GGUF_BF16 = 30,
    GGUF_MXFP4 = 39
};

static const Format formats[] = {
    {GGUF_F32, 1, 4, 0, NULL, NULL, PLAIN},
    {GGUF_F16, 1, 2, 0, NULL, NULL, PLAIN},
    {GGUF_BF16, 1, 2, 0, NULL, NULL, PLAIN},
    {GGUF_Q4_0, 32, 18, 8, NULL, decode_q4_0, Q4},
    {GGUF_Q4_1, 32, 20, 0, NULL, decode_q4_1, Q4},
    {GGUF_Q5_0, 32, 22, 16, NULL, decode_q5_0, Q5},
    {GGUF_Q5_1, 32, 24, 0, NULL, decode_q5_1, Q5},
    {GGUF_Q8_0, 32, 34, 128, NULL, decode_q8_0, Q8},
    {GGUF_Q2_K, 256, 84, 0, NULL, decode_q2_k, Q3K},
    {GGUF_Q3_K, 256, 110, 4, NULL, decode_q3_k, Q3K},
    {GGUF_Q4_K, 256, 144, 0, NULL, decode_q4_k, Q4K},
    {GGUF_Q5_K, 256, 176, 0, NULL, decode_q5_k, Q5K},
    {GGUF_Q6_K, 256, 210, 32, NULL, decode_q6_k, Q6K},
    {GGUF_IQ4_NL, 32, 18, 0, iq4_values, decode_iq4_nl, IQ4},
    {GGUF_IQ4_XS, 256, 136, 0, iq4_values, decode_iq4_xs, IQ4K},
    {GGUF_MXFP4, 32, 17, 0, mxfp4_values, decode_mxfp4, MXFP4},
};

static const Format *format_of(int64_t kind) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].kind == kind) return formats + i;
    return NULL;
}

/* The weights of one block. */
static void dequantise_block(const Format *format, const uint8_t *block, float *to) {
    Block decoded;
    if (format->kind == GGUF_F32) {
        memcpy(to, block, sizeof *to);
    } else if (format->kind == GGUF_F16) {
        *to = half_at(block);
    } else if (format->kind == GGUF_BF16) {
        const uint32_t bits = (uint32_t)block[0] << 16 | (uint32_t)block[1] << 24;
        memcpy(to, &bits, sizeof bits);
    } else {
        format->decode(block, &decoded);
        for (int64_t i = 0; format->values && i < format->weights; i++)
            decoded.quant[i] = format->values[decoded.quant[i]];
        for (int64_t g = 0; g < format->weights / 16; g++) {
            const float scale = decoded.d * (float)decoded.scale[g], minimum = decoded.dmin * (float)decoded.minimum[g];
            for (int64_t i = 16 * g; i < 16 * (g + 1); i++) to[i] = scale * (float)decoded.quant[i] - minimum;
        }
    }
}

typedef struct {
    const Format *format;
    const uint8_t *from;
    int64_t rows, width;
    const int64_t *order;
    void *to;
    int64_t bf16;
} Dequantise;

/* A row of weights, which are rounded to bfloat16 if `bf16`, in float32. `width`: a multiple of 16. */
static void
dequantise_row(const Format *format, const uint8_t *from, int64_t row, int64_t width, int64_t bf16, float *to) {
    const int64_t blocks = width / format->weights;
    const uint8_t *block = from + row * blocks * format->bytes;
    if (format->kind == GGUF_F32)
        memcpy(to, block, width * sizeof *to);
    else if (format->kind == GGUF_BF16)
        for (int64_t i = 0; i < width; i++) to[i] = from_bf16((uint16_t)(block[2 * i] | block[2 * i + 1] << 8));
    else
        for (int64_t b = 0; b < blocks; b++)
            dequantise_block(format, block + b * format->bytes, to + b * format->weights);
    for (int64_t i = 0; i < width && bf16 && format->kind != GGUF_BF16; i++) to[i] = from_bf16(to_bf16(to[i]));
}

static void dequantise_task(const Thread *thread, const void *call) {
    const Dequantise *of = call;
    const Format *format = of->format;
    const int64_t width = of->width, blocks = width / format->weights;
    for (int64_t r = share_begin(thread, of->rows); r < share_end(thread, of->rows); r++) {
        const uint8_t *block = of->from + (of->order ? of->order[r] : r) * blocks * format->bytes;
        float block_weights[256];
        for (int64_t b = 0; b < blocks; b++, block += format->bytes) {
            const int64_t at = r * width + b * format->weights;
            if (!of->bf16) {
                dequantise_block(format, block, (float *)of->to + at);
                continue;
            }
            dequantise_block(format, block, block_weights);
            for (int64_t i = 0; i < format->weights; i++) ((uint16_t *)of->to)[at + i] = to_bf16(block_weights[i]);
        }
    }
}

int64_t dequantise(
    int64_t kind, const uint8_t *from, int64_t rows, int64_t width, const int64_t *order, void *to, int64_t bf16,
    int64_t threads
) {
    const Format *format = format_of(kind);
    if (!format || width % format->weights) return 0;
    run(threads, NULL, 0, dequantise_task, &(Dequantise){format, from, rows, width, order, to, bf16});
    return rows;
}

#endif
