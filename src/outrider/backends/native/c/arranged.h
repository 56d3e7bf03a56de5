/* A file's blocks in the order in which passes read them (`blocks.h`). */

/* Of which kind a file's rows become; PLAIN: of none that this code reads. */
static integer kind_of(const Format *format) {
    switch (format->number) {
    case Q4_0:
    case Q4_1: return FOUR;
    case Q8_0: return EIGHT;
#if LANES == 16
    case Q5_0:
    case Q5_1: return FIVE;
    case Q2_K:
    case Q3_K: return THIN;
    case Q4_K: return FOUR_K;
    case Q5_K: return FIVE_K;
    case Q6_K: return SIX;
    case IQ4_NL: return IQ4;
    case IQ4_XS: return IQ4_K;
#endif
    default: return PLAIN;
    }
}

/* The numbers of one block of four rows, from `at` on of what was taken of each; without a sign, but for EIGHT's. */
static void write_numbers(const integer shape, const Taken *rows, int at, int lowest, uint8_t *to) {
    uint8_t n[4][GROUP];
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < GROUP; i++) n[r][i] = (uint8_t)(rows[r].number[at + i] + (shape == EIGHT ? 0 : lowest));
    if (shape == EIGHT) {
        memcpy(to, n, sizeof n);
        return;
    }
#if LANES == 16
    for (int i = 0; i < GROUP; i++) {
        to[2 * i] = (uint8_t)((n[0][i] & 15) | n[1][i] << 4);
        to[2 * i + 1] = (uint8_t)((n[2][i] & 15) | n[3][i] << 4);
    }
    to += 64;
    if (shape == FIVE) memset(to, 0, 16);
    for (int i = 0; i < GROUP && shape == FIVE; i++)
        for (int r = 0; r < 4; r++) to[4 * r + i / 8] |= (uint8_t)((n[r][i] >> 4) << i % 8);
    for (int i = 0; i < GROUP && shape == SIX; i++)
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
static uint8_t *write_scales(const integer kind, const Taken *rows, int at, int lowest, uint8_t *to, int *fits) {
    const integer shape = SHAPE(kind);
    const int g = at / 16;
    for (int r = 0; r < 4; r++) {
        const Taken *own = rows + r;
        if (!SUPER(kind)) {
            *fits &= write_half(own->d, to);
            if (shape != EIGHT) *fits &= write_half(-own->dmin - (float)lowest * own->d, to + 2);
            to += shape == EIGHT ? 2 : 4;
            continue;
        }
        for (int h = 0; h < (shape == THIN ? 2 : 1); h++) {
            *to++ = (uint8_t)own->scale[g + h];
            *to++ = (uint8_t)(shape == SIX ? own->scale[g + 1] : lowest ? lowest * own->scale[g + h] : own->minimum[g + h]);
        }
    }
    return to;
}

/* What the scales and minima of 256 numbers of four rows are multiplied by. */
static uint8_t *write_factors(const integer kind, const Taken *rows, int lowest, uint8_t *to, int *fits) {
    for (int r = 0; r < 4; r++, to += 4) {
        *fits &= write_half(rows[r].d, to);
        *fits &= write_half(kind == SIX ? rows[r].d : lowest ? -rows[r].d : -rows[r].dmin, to + 2);
    }
    return to;
}

/* Four rows of a file, which begin at `from`; NULL: of zeros. Returns 0 where they cannot be written so. */
static int arrange_four(const Format *format, const uint8_t *const from[4], integer width, char *to) {
    const integer kind = kind_of(format), shape = SHAPE(kind), kept = KEPT(shape);
    uint8_t *numbers_ = (uint8_t *)to, *scales = (uint8_t *)to + width / GROUP * kept;
    Taken rows[4];
    int fits = 1;
    memset(rows, 0, sizeof rows);
    for (integer b = 0; b < width / format->elements; b++) {
        for (int r = 0; r < 4; r++)
            if (from[r]) format->take(from[r] + b * format->bytes, rows + r);
        if (SUPER(kind)) scales = write_factors(kind, rows, format->lowest, scales, &fits);
        for (int at = 0; at < format->elements; at += GROUP, numbers_ += kept) {
            write_numbers(shape, rows, at, format->lowest, numbers_);
            scales = write_scales(kind, rows, at, format->lowest, scales, &fits);
        }
    }
    return fits;
}

/* Bytes that a row of a file takes in our order; 0: this code does not read its kind. */
integer arranged_bytes(integer number, integer width) {
    const Format *format = format_of(number);
    const integer kind = format && width % format->elements == 0 ? kind_of(format) : PLAIN;
    return kind == PLAIN ? 0 : bytes(kind, width);
}

/* Write `rows` of a file's rows in our order: those that `order` says, or the same if it is NULL. There is room for four
   times some, and the last ones are zeros. Returns their kind; PLAIN where a number does not fit, as of a scale that is NaN. */
integer arranged(
    integer number, const uint8_t *from, integer rows, integer width, const integer *order, char *to, integer threads
) {
    const Format *format = format_of(number);
    const integer size = width / format->elements * format->bytes, own = arranged_bytes(number, width);
    int fits = 1;
#pragma omp parallel for num_threads((int)threads) reduction(&& : fits)
    for (integer i = 0; i < rows; i += 4) {
        const uint8_t *four[4];
        for (integer r = 0; r < 4; r++) four[r] = i + r < rows ? from + (order ? order[i + r] : i + r) * size : NULL;
        fits = arrange_four(format, four, width, to + i * own) && fits;
    }
    return fits ? kind_of(format) : PLAIN;
}
