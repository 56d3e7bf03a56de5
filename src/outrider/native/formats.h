/* The quantised kinds of .gguf files: what the numbers of a block are. Each is the float32 that gguf-py's reader makes of
   it, by the same operations in the same order; none of the products is rounded, so a sum is rounded once.

   A kind is one row of `formats`: its number in the file, how many numbers a block has and in how many bytes, and the
   function that opens one. */

typedef void Open(const uint8_t *block, float *to);

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

static void open_f32(const uint8_t *block, float *to) { memcpy(to, block, sizeof *to); }
static void open_f16(const uint8_t *block, float *to) { *to = half_at(block); }
static void open_bf16(const uint8_t *block, float *to) {
    const uint32_t bits = (uint32_t)block[0] << 16 | (uint32_t)block[1] << 24;
    memcpy(to, &bits, sizeof *to);
}

static void open_q4_0(const uint8_t *block, float *to) {
    const float d = half_at(block);
    for (int i = 0; i < 16; i++) {
        to[i] = d * (float)((block[2 + i] & 15) - 8);
        to[16 + i] = d * (float)((block[2 + i] >> 4) - 8);
    }
}

static void open_q4_1(const uint8_t *block, float *to) {
    const float d = half_at(block), m = half_at(block + 2);
    for (int i = 0; i < 16; i++) {
        to[i] = d * (float)(block[4 + i] & 15) + m;
        to[16 + i] = d * (float)(block[4 + i] >> 4) + m;
    }
}

/* Five bits: the fifth ones of all 32 stand in one word. */
INLINE int fifth(uint32_t bits, int i) { return (int)(bits >> i & 1) << 4; }

static void open_q5_0(const uint8_t *block, float *to) {
    const float d = half_at(block);
    const uint32_t bits = word_at(block + 2);
    for (int i = 0; i < 16; i++) {
        to[i] = d * (float)(((block[6 + i] & 15) | fifth(bits, i)) - 16);
        to[16 + i] = d * (float)((block[6 + i] >> 4 | fifth(bits, 16 + i)) - 16);
    }
}

static void open_q5_1(const uint8_t *block, float *to) {
    const float d = half_at(block), m = half_at(block + 2);
    const uint32_t bits = word_at(block + 4);
    for (int i = 0; i < 16; i++) {
        to[i] = d * (float)((block[8 + i] & 15) | fifth(bits, i)) + m;
        to[16 + i] = d * (float)(block[8 + i] >> 4 | fifth(bits, 16 + i)) + m;
    }
}

static void open_q8_0(const uint8_t *block, float *to) {
    const float d = half_at(block);
    for (int i = 0; i < 32; i++) to[i] = d * (float)(int8_t)block[2 + i];
}

static void open_q2_k(const uint8_t *block, float *to) {
    const uint8_t *q = block + 16;
    const float d = half_at(block + 80), dmin = half_at(block + 82);
    for (int i = 0; i < 256; i++) {
        const uint8_t known = block[i / 16];
        const int at = i / 128 * 32 + i % 32, shift = i % 128 / 32 * 2;
        to[i] = d * (float)(known & 15) * (float)(q[at] >> shift & 3) - dmin * (float)(known >> 4);
    }
}

static void open_q3_k(const uint8_t *block, float *to) {
    const uint8_t *high = block, *q = block + 32, *known = block + 96;
    const float d = half_at(block + 108);
    for (int i = 0; i < 256; i++) {
        const int g = i / 16, at = i / 128 * 32 + i % 32, shift = i % 128 / 32 * 2;
        const int low = g < 8 ? known[g] & 15 : known[g - 8] >> 4;
        const int scale = (low | (known[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32;
        const int number = (q[at] >> shift & 3) - (high[i % 32] >> i / 32 & 1 ? 0 : 4);
        to[i] = d * (float)scale * (float)number;
    }
}

/* Scale and minimum of the g-th 32 numbers: six bits each, in twelve bytes. */
INLINE void six_bits(const uint8_t *known, int g, int *scale, int *minimum) {
    *scale = g < 4 ? known[g] & 63 : (known[g + 4] & 15) | known[g - 4] >> 6 << 4;
    *minimum = g < 4 ? known[g + 4] & 63 : known[g + 4] >> 4 | known[g] >> 6 << 4;
}

static void open_q4_k(const uint8_t *block, float *to) {
    const float d = half_at(block), dmin = half_at(block + 2);
    for (int g = 0; g < 8; g++) {
        const uint8_t *q = block + 16 + g / 2 * 32;
        int scale, minimum;
        six_bits(block + 4, g, &scale, &minimum);
        for (int i = 0; i < 32; i++)
            to[32 * g + i] = d * (float)scale * (float)(q[i] >> g % 2 * 4 & 15) - dmin * (float)minimum;
    }
}

static void open_q5_k(const uint8_t *block, float *to) {
    const float d = half_at(block), dmin = half_at(block + 2);
    for (int g = 0; g < 8; g++) {
        const uint8_t *high = block + 16, *q = block + 48 + g / 2 * 32;
        int scale, minimum;
        six_bits(block + 4, g, &scale, &minimum);
        for (int i = 0; i < 32; i++) {
            const int number = (q[i] >> g % 2 * 4 & 15) | (high[i] >> g & 1) << 4;
            to[32 * g + i] = d * (float)scale * (float)number - dmin * (float)minimum;
        }
    }
}

static void open_q6_k(const uint8_t *block, float *to) {
    const float d = half_at(block + 208);
    for (int i = 0; i < 256; i++) {
        const int l = i % 32, part = i % 128 / 32;
        const uint8_t low = block[i / 128 * 64 + part % 2 * 32 + l] >> part / 2 * 4 & 15;
        const uint8_t high = block[128 + i / 128 * 32 + l] >> part * 2 & 3;
        to[i] = d * (float)(int8_t)block[192 + i / 16] * (float)((low | high << 4) - 32);
    }
}

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void open_iq4_nl(const uint8_t *block, float *to) {
    const float d = half_at(block);
    for (int i = 0; i < 16; i++) {
        to[i] = d * (float)iq4_values[block[2 + i] & 15];
        to[16 + i] = d * (float)iq4_values[block[2 + i] >> 4];
    }
}

static void open_iq4_xs(const uint8_t *block, float *to) {
    const float d = half_at(block);
    const int high = block[2] | block[3] << 8;
    for (int g = 0; g < 8; g++) {
        const int scale = ((block[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4) - 32;
        for (int i = 0; i < 16; i++) {
            const uint8_t both = block[8 + 16 * g + i];
            to[32 * g + i] = d * (float)scale * (float)iq4_values[both & 15];
            to[32 * g + 16 + i] = d * (float)scale * (float)iq4_values[both >> 4];
        }
    }
}

/* Half of two to the exponent: the values of MXFP4 are doubled, so that all of them are integers. */
static void open_mxfp4(const uint8_t *block, float *to) {
    static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const uint32_t bits = block[0] < 2 ? 0x200000u << block[0] : (uint32_t)(block[0] - 1) << 23;
    float d;
    memcpy(&d, &bits, sizeof d);
    for (int i = 0; i < 16; i++) {
        to[i] = d * (float)values[block[1 + i] & 15];
        to[16 + i] = d * (float)values[block[1 + i] >> 4];
    }
}

typedef struct {
    integer number, elements, bytes; /* of a block; `number` as in the file */
    Open *open;
} Format;

static const Format formats[] = {
    {0, 1, 4, open_f32},        {1, 1, 2, open_f16},        {30, 1, 2, open_bf16},      {2, 32, 18, open_q4_0},
    {3, 32, 20, open_q4_1},     {6, 32, 22, open_q5_0},     {7, 32, 24, open_q5_1},     {8, 32, 34, open_q8_0},
    {10, 256, 84, open_q2_k},   {11, 256, 110, open_q3_k},  {12, 256, 144, open_q4_k},  {13, 256, 176, open_q5_k},
    {14, 256, 210, open_q6_k},  {20, 32, 18, open_iq4_nl},  {23, 256, 136, open_iq4_xs}, {39, 32, 17, open_mxfp4},
};

/* Rows of `width` numbers of a file's kind, as float32 or rounded to bfloat16. `order`: the file's row for each row that
   is written; NULL: the same. Returns how many rows were written: none where the kind is not in the table, or `width` is
   not a multiple of its blocks. */
integer dequantise(
    integer number, const uint8_t *from, integer rows, integer width, const integer *order, void *to, integer halves,
    integer threads
) {
    const Format *format = NULL;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].number == number) format = formats + i;
    if (!format || width % format->elements) return 0;
    const integer blocks = width / format->elements;
#pragma omp parallel for num_threads((int)threads)
    for (integer r = 0; r < rows; r++) {
        const uint8_t *block = from + (order ? order[r] : r) * blocks * format->bytes;
        float some[256];
        for (integer b = 0; b < blocks; b++, block += format->bytes) {
            const integer at = r * width + b * format->elements;
            if (!halves) {
                format->open(block, (float *)to + at);
                continue;
            }
            format->open(block, some);
            for (integer i = 0; i < format->elements; i++) ((uint16_t *)to)[at + i] = rounded(some[i]);
        }
    }
    return rows;
}
