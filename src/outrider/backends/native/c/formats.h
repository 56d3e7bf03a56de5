/* The quantised kinds of .gguf files: what the numbers of a block are. A weight is

       (d * scale) * number - (dmin * minimum)

   in float32, where d and dmin are the block's, scale and minimum an integer of each sixteen weights, and the number an
   integer of its own, or one that a table has for it. No product is rounded, so a weight is rounded once, at the
   subtraction; gguf-py's reader comes to the same bits.

   A kind is one row of `formats`: its number in the file, how many weights a block has and in how many bytes, what its
   numbers stand for, and the function that takes a block apart. */

typedef struct {
    float d, dmin;
    int8_t number[256];
    int16_t scale[16], minimum[16];
} Taken;

typedef void Take(const uint8_t *block, Taken *to);

INLINE float half_at(const uint8_t *at) {
    _Float16 value;
    memcpy(&value, at, sizeof value);
    return (float)value;
}

INLINE uint32_t word_at(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* A block of 32 numbers with a scale, and with a minimum or 0. */
INLINE void one_scale(float d, float minimum, Taken *to) {
    to->d = d;
    to->dmin = -minimum;
    for (int g = 0; g < 2; g++) to->scale[g] = 1, to->minimum[g] = 1;
}

INLINE void lowered(Taken *to, int count, int by) {
    for (int i = 0; i < count; i++) to->number[i] = (int8_t)(to->number[i] - by);
}

/* 32 numbers of four bits, those of the first half in the lower ones; and of five, whose fifth ones stand in a word. */
INLINE void four_bits(const uint8_t *q, int8_t *to) {
    for (int i = 0; i < 16; i++) to[i] = (int8_t)(q[i] & 15), to[16 + i] = (int8_t)(q[i] >> 4);
}
INLINE void five_bits(const uint8_t *q, const uint8_t *fifth, int8_t *to) {
    const uint32_t bits = word_at(fifth);
    four_bits(q, to);
    for (int i = 0; i < 32; i++) to[i] = (int8_t)(to[i] | (bits >> i & 1) << 4);
}

static void take_q4_0(const uint8_t *block, Taken *to) {
    one_scale(half_at(block), -0.0f, to);
    four_bits(block + 2, to->number);
    lowered(to, 32, 8);
}

static void take_q4_1(const uint8_t *block, Taken *to) {
    one_scale(half_at(block), half_at(block + 2), to);
    four_bits(block + 4, to->number);
}

static void take_q5_0(const uint8_t *block, Taken *to) {
    one_scale(half_at(block), -0.0f, to);
    five_bits(block + 6, block + 2, to->number);
    lowered(to, 32, 16);
}

static void take_q5_1(const uint8_t *block, Taken *to) {
    one_scale(half_at(block), half_at(block + 2), to);
    five_bits(block + 8, block + 4, to->number);
}

static void take_q8_0(const uint8_t *block, Taken *to) {
    one_scale(half_at(block), -0.0f, to);
    memcpy(to->number, block + 2, 32);
}

static void take_q2_k(const uint8_t *block, Taken *to) {
    to->d = half_at(block + 80);
    to->dmin = half_at(block + 82);
    for (int g = 0; g < 16; g++) to->scale[g] = block[g] & 15, to->minimum[g] = block[g] >> 4;
    for (int i = 0; i < 256; i++) to->number[i] = block[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

static void take_q3_k(const uint8_t *block, Taken *to) {
    const uint8_t *high = block, *q = block + 32, *known = block + 96;
    to->d = half_at(block + 108);
    to->dmin = 0;
    for (int g = 0; g < 16; g++) {
        const int low = g < 8 ? known[g] & 15 : known[g - 8] >> 4;
        to->scale[g] = (int16_t)((low | (known[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
        to->minimum[g] = 0;
    }
    for (int i = 0; i < 256; i++)
        to->number[i] = (int8_t)((q[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (high[i % 32] >> i / 32 & 1) << 2);
    lowered(to, 256, 4);
}

/* Q4_K and Q5_K: a scale and a minimum of six bits for each 32 numbers, in twelve bytes behind d and dmin. */
INLINE void six_bits(const uint8_t *block, Taken *to) {
    const uint8_t *known = block + 4;
    to->d = half_at(block);
    to->dmin = half_at(block + 2);
    for (int i = 0; i < 16; i++) {
        const int g = i / 2;
        to->scale[i] = g < 4 ? known[g] & 63 : (known[g + 4] & 15) | known[g - 4] >> 6 << 4;
        to->minimum[i] = g < 4 ? known[g + 4] & 63 : known[g + 4] >> 4 | known[g] >> 6 << 4;
    }
}

static void take_q4_k(const uint8_t *block, Taken *to) {
    six_bits(block, to);
    for (int i = 0; i < 256; i++) to->number[i] = block[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
}

static void take_q5_k(const uint8_t *block, Taken *to) {
    six_bits(block, to);
    for (int i = 0; i < 256; i++)
        to->number[i] = (int8_t)((block[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15) | (block[16 + i % 32] >> i / 32 & 1) << 4);
}

static void take_q6_k(const uint8_t *block, Taken *to) {
    to->d = half_at(block + 208);
    to->dmin = 0;
    for (int g = 0; g < 16; g++) to->scale[g] = (int8_t)block[192 + g], to->minimum[g] = 0;
    for (int i = 0; i < 256; i++) {
        const int l = i % 32, part = i % 128 / 32;
        const uint8_t low = block[i / 128 * 64 + part % 2 * 32 + l] >> part / 2 * 4 & 15;
        const uint8_t high = block[128 + i / 128 * 32 + l] >> part * 2 & 3;
        to->number[i] = (int8_t)(low | high << 4);
    }
    lowered(to, 256, 32);
}

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void take_iq4_nl(const uint8_t *block, Taken *to) {
    one_scale(half_at(block), -0.0f, to);
    four_bits(block + 2, to->number);
}

static void take_iq4_xs(const uint8_t *block, Taken *to) {
    const int high = block[2] | block[3] << 8;
    to->d = half_at(block);
    to->dmin = 0;
    for (int g = 0; g < 8; g++) {
        const int scale = ((block[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4) - 32;
        to->scale[2 * g] = to->scale[2 * g + 1] = (int16_t)scale;
        to->minimum[2 * g] = to->minimum[2 * g + 1] = 0;
        four_bits(block + 8 + 16 * g, to->number + 32 * g);
    }
}

/* The table's values are doubled, so that all are integers, and d is half of two to the exponent. */
static void take_mxfp4(const uint8_t *block, Taken *to) {
    const uint32_t bits = block[0] < 2 ? 0x200000u << block[0] : (uint32_t)(block[0] - 1) << 23;
    float d;
    memcpy(&d, &bits, sizeof d);
    one_scale(d, -0.0f, to);
    four_bits(block + 1, to->number);
}

typedef struct {
    int64_t number, elements, bytes; /* of a block; `number` as in the file */
    int lowest;                      /* number, but for those of a table: minus this */
    const int8_t *values;            /* what numbers stand for; NULL: for themselves */
    Take *take;                      /* NULL: numbers as they are */
} Format;

enum {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39
};

static const Format formats[] = {
    {F32, 1, 4, 0, NULL, NULL},
    {F16, 1, 2, 0, NULL, NULL},
    {BF16, 1, 2, 0, NULL, NULL},
    {Q4_0, 32, 18, 8, NULL, take_q4_0},
    {Q4_1, 32, 20, 0, NULL, take_q4_1},
    {Q5_0, 32, 22, 16, NULL, take_q5_0},
    {Q5_1, 32, 24, 0, NULL, take_q5_1},
    {Q8_0, 32, 34, 128, NULL, take_q8_0},
    {Q2_K, 256, 84, 0, NULL, take_q2_k},
    {Q3_K, 256, 110, 4, NULL, take_q3_k},
    {Q4_K, 256, 144, 0, NULL, take_q4_k},
    {Q5_K, 256, 176, 0, NULL, take_q5_k},
    {Q6_K, 256, 210, 32, NULL, take_q6_k},
    {IQ4_NL, 32, 18, 0, iq4_values, take_iq4_nl},
    {IQ4_XS, 256, 136, 0, iq4_values, take_iq4_xs},
    {MXFP4, 32, 17, 0, mxfp4_values, take_mxfp4},
};

static const Format *format_of(int64_t number) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].number == number) return formats + i;
    return NULL;
}

/* The weights of one block. */
static void open_block_of(const Format *format, const uint8_t *block, float *to) {
    Taken taken;
    if (format->number == F32) {
        memcpy(to, block, sizeof *to);
    } else if (format->number == F16) {
        *to = half_at(block);
    } else if (format->number == BF16) {
        const uint32_t bits = (uint32_t)block[0] << 16 | (uint32_t)block[1] << 24;
        memcpy(to, &bits, sizeof bits);
    } else {
        format->take(block, &taken);
        for (int64_t i = 0; format->values && i < format->elements; i++) taken.number[i] = format->values[taken.number[i]];
        for (int64_t g = 0; g < format->elements / 16; g++) {
            const float scale = taken.d * (float)taken.scale[g], minimum = taken.dmin * (float)taken.minimum[g];
            for (int64_t i = 16 * g; i < 16 * (g + 1); i++) to[i] = scale * (float)taken.number[i] - minimum;
        }
    }
}

typedef struct {
    const Format *format;
    const uint8_t *from;
    int64_t rows, width;
    const int64_t *order;
    void *to;
    int64_t halves;
} Dequantising;

static void dequantise_task(const Team *team, const void *call) {
    const Dequantising *of = call;
    const Format *format = of->format;
    const int64_t width = of->width, blocks = width / format->elements;
    for (int64_t r = own_first(team, of->rows); r < own_last(team, of->rows); r++) {
        const uint8_t *block = of->from + (of->order ? of->order[r] : r) * blocks * format->bytes;
        float some[256];
        for (int64_t b = 0; b < blocks; b++, block += format->bytes) {
            const int64_t at = r * width + b * format->elements;
            if (!of->halves) {
                open_block_of(format, block, (float *)of->to + at);
                continue;
            }
            open_block_of(format, block, some);
            for (int64_t i = 0; i < format->elements; i++) ((uint16_t *)of->to)[at + i] = rounded(some[i]);
        }
    }
}

/* Rows of `width` numbers of a file's kind, as float32 or rounded to bfloat16. `order`: the file's row for each row that
   is written; NULL: the same. Returns how many rows were written: none where the kind is not in the table, or `width` is
   not a multiple of its blocks. */
int64_t dequantise(
    int64_t number, const uint8_t *from, int64_t rows, int64_t width, const int64_t *order, void *to, int64_t halves,
    int64_t threads
) {
    const Format *format = format_of(number);
    if (!format || width % format->elements) return 0;
    run(threads, NULL, 0, dequantise_task, &(Dequantising){format, from, rows, width, order, to, halves});
    return rows;
}
