/* A file's blocks in the order in which passes read them (`blocks.h`). */

/* Of which kind a file's rows become; PLAIN: of none that this code reads. */
static int64_t kind_of(const Format *format) {
    switch (format->number) {
    case Q4_0:
    case Q4_1: return Q4;
    case Q8_0: return Q8;
#if LANES == 16
    case Q5_0:
    case Q5_1: return Q5;
    case Q2_K:
    case Q3_K: return Q3K;
    case Q4_K: return Q4K;
    case Q5_K: return Q5K;
    case Q6_K: return Q6K;
    case IQ4_NL: return IQ4;
    case IQ4_XS: return IQ4K;
#endif
    default: return PLAIN;
    }
}

/* The numbers of one block of four rows, from `at` on of what was taken of each; without a sign, but for EIGHT's. */
static void write_numbers(const int64_t shape, const Taken *rows, int at, int lowest, uint8_t *to) {
    uint8_t n[4][BLOCK_WEIGHTS];
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < BLOCK_WEIGHTS; i++) n[r][i] = (uint8_t)(rows[r].number[at + i] + (shape == Q8 ? 0 : lowest));
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
    if (shape == Q5) memset(to, 0, 16);
    for (int i = 0; i < BLOCK_WEIGHTS && shape == Q5; i++)
        for (int r = 0; r < 4; r++) to[4 * r + i / 8] |= (uint8_t)((n[r][i] >> 4) << i % 8);
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

/* Returns 0 where float16 does not hold the number. */
INLINE int write_half(float value, uint8_t *to) {
    const _Float16 half = (_Float16)value;
    memcpy(to, &half, sizeof half);
    return (float)half == value;
}

/* What is known of one block of four rows: its scales, and what is added. Returns where it ends; `fits` becomes 0 where
   float16 does not hold one of them. */
static uint8_t *write_scales(const int64_t kind, const Taken *rows, int at, int lowest, uint8_t *to, int *fits) {
    const int64_t shape = SHAPE(kind);
    const int g = at / 16;
    for (int r = 0; r < 4; r++) {
        const Taken *own = rows + r;
        if (!SUPER(kind)) {
            *fits &= write_half(own->d, to);
            if (shape != Q8) *fits &= write_half(-own->dmin - (float)lowest * own->d, to + 2);
            to += shape == Q8 ? 2 : 4;
            continue;
        }
        for (int h = 0; h < (shape == Q3K ? 2 : 1); h++) {
            *to++ = (uint8_t)own->scale[g + h];
            *to++ = (uint8_t)(shape == Q6K ? own->scale[g + 1] : lowest ? lowest * own->scale[g + h] : own->minimum[g + h]);
        }
    }
    return to;
}

/* What the scales and minima of 256 numbers of four rows are multiplied by. */
static uint8_t *write_factors(const int64_t kind, const Taken *rows, int lowest, uint8_t *to, int *fits) {
    for (int r = 0; r < 4; r++, to += 4) {
        *fits &= write_half(rows[r].d, to);
        *fits &= write_half(kind == Q6K ? rows[r].d : lowest ? -rows[r].d : -rows[r].dmin, to + 2);
    }
    return to;
}

/* Four rows of a file, which begin at `from`; NULL: of zeros. Returns 0 where they cannot be written so. */
static int arrange_four(const Format *format, const uint8_t *const from[4], int64_t width, char *to) {
    const int64_t kind = kind_of(format), shape = SHAPE(kind), kept = KEPT(shape);
    uint8_t *numbers_ = (uint8_t *)to, *scales = (uint8_t *)to + width / BLOCK_WEIGHTS * kept;
    Taken rows[4];
    int fits = 1;
    memset(rows, 0, sizeof rows);
    for (int64_t b = 0; b < width / format->elements; b++) {
        for (int r = 0; r < 4; r++)
            if (from[r]) format->take(from[r] + b * format->bytes, rows + r);
        if (SUPER(kind)) scales = write_factors(kind, rows, format->lowest, scales, &fits);
        for (int at = 0; at < format->elements; at += BLOCK_WEIGHTS, numbers_ += kept) {
            write_numbers(shape, rows, at, format->lowest, numbers_);
            scales = write_scales(kind, rows, at, format->lowest, scales, &fits);
        }
    }
    return fits;
}

/* Bytes that a row of a file takes in our order; 0: this code does not read its kind. */
int64_t repacked_bytes(int64_t number, int64_t width) {
    const Format *format = format_of(number);
    const int64_t kind = format && width % format->elements == 0 ? kind_of(format) : PLAIN;
    return kind == PLAIN ? 0 : bytes(kind, width);
}

typedef struct {
    const Format *format;
    const uint8_t *from;
    const int64_t *order;
    int64_t rows, width;
    char *to;
    int64_t *fits;
} Repacking;

static void repack_task(const Team *team, const void *call) {
    const Repacking *of = call;
    const Format *format = of->format;
    const int64_t size = of->width / format->elements * format->bytes, own = bytes(kind_of(format), of->width);
    const int64_t fours = (of->rows + 3) / 4;
    for (int64_t i = 4 * own_first(team, fours); i < 4 * own_last(team, fours); i += 4) {
        const uint8_t *four[4];
        for (int64_t r = 0; r < 4; r++)
            four[r] = i + r < of->rows ? of->from + (of->order ? of->order[i + r] : i + r) * size : NULL;
        if (!arrange_four(format, four, of->width, of->to + i * own)) __atomic_store_n(of->fits, 0, __ATOMIC_RELAXED);
    }
}

/* Write `rows` of a file's rows in our order: those that `order` says, or the same if it is NULL. There is room for four
   times some, and the last ones are zeros. Returns their kind; PLAIN where a number does not fit, as of a scale that is NaN. */
int64_t repack(
    int64_t number, const uint8_t *from, int64_t rows, int64_t width, const int64_t *order, char *to, int64_t threads
) {
    const Format *format = format_of(number);
    int64_t fits = 1;
    run(threads, NULL, 0, repack_task, &(Repacking){format, from, order, rows, width, to, &fits});
    return fits ? kind_of(format) : PLAIN;
}
