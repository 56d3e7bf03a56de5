/* y = x W^T, with W as the model keeps it: a row of `width` numbers for each output. A result is summed in lanes along
   its row, step by step, and then over the lanes; so it depends on its row of x and its row of W alone. */

#define LINE 64 /* bytes that memory gives at a time */
#ifndef FIRST
#define FIRST 32768 /* bytes of the first cache */
#endif
#define ROWS 64 /* of x, whose numbers stay in the processor's cache while the weights pass by */

/* LANES results at a time: `n` rows of x with LANES / n outputs. `ahead`: memory that will be read soon, of which so
   many lines are fetched in each step, into the first cache (`near`) or the second. */
INLINE vector tile(
    const int n, const input *x, integer width, const number *const *rows, const char *ahead, integer lines, int near
) {
    const int outputs = LANES / n;
    vector found[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) found[i] = ZERO;
    for (integer k = 0; k < width; k += STEP) {
        operand given[4];
        for (integer i = 0; i < lines; i++, ahead += LINE) {
            if (near)
                _mm_prefetch(ahead, _MM_HINT_T0);
            else
                _mm_prefetch(ahead, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) given[i] = INPUT(x + i * width + k);
#pragma GCC unroll 16
        for (int j = 0; j < outputs; j++) {
            const operand weights = WEIGHT(rows[j] + k);
#pragma GCC unroll 4
            for (int i = 0; i < n; i++) found[i * outputs + j] = TIMES(found[i * outputs + j], given[i], weights);
        }
    }
    return sums(found);
}

/* The results of `n` rows of x for the LANES outputs from `first` on, as rows of LANES numbers. Outputs beyond `last`
   are those of the last one, and nobody's. */
static void column(const input *x, integer n, integer width, Matrix w, integer first, integer last, float *y) {
    const number *rows[LANES];
    const char *data = w.data;
    const integer size = bytes(w.kind, width);
#ifdef NARROW
    number room[w.kind == PLAIN ? 1 : LANES * width];
#endif
    for (integer j = 0; j < LANES; j++) {
        const char *row = data + (first + j < last ? first + j : last - 1) * size;
        rows[j] = (const number *)row;
#ifdef NARROW
        if (w.kind == PLAIN) continue;
        unpack(row, w.kind, width, room + j * width);
        rows[j] = room + j * width;
#endif
    }
    const integer tiles = LANES == 16 ? n / 4 * 4 + n % 4 / 2 * 2 + n % 2 : n / 2 * 2 + n % 2;
    const integer column = LANES * size, steps = width / STEP, each = (column / LINE + steps - 1) / steps;
    const integer lines = (each + tiles - 1) / tiles;
    const int near = 2 * column <= FIRST * 4 / 5; /* this column and the next, beside rows of x */
    const char *ahead = data + first * size + (near ? 1 : 2) * column;
    const char *beyond = w.kind == PLAIN ? ahead + column : ahead; /* blocks are fetched while they are unpacked */
    float some[LANES];
#define TILE(count, from, to) /* rows from .. to; a few outputs stay in the first cache while rows pass by */   \
    for (int j = 0; j < LANES; j += LANES / count)                                                              \
        for (integer i = from; i < to; i += count, ahead += steps * lines * LINE) {                             \
            STORE(some, tile(count, x + i * width, width, rows + j, ahead, ahead < beyond ? lines : 0, near));  \
            for (int k = 0; k < count; k++)                                                                     \
                memcpy(y + (i + k) * LANES + j, some + k * (LANES / count), LANES / count * sizeof(float));     \
        }
#if LANES == 16
    const integer fours = n / 4 * 4;
    TILE(4, 0, fours)
#else
    const integer fours = 0;
#endif
    TILE(2, fours, n / 2 * 2)
    TILE(1, n / 2 * 2, n)
#undef TILE
}

/* This thread's share of so many outputs, in whole columns. */
INLINE void share(integer outputs, integer thread, integer threads, integer *first, integer *last) {
    const integer columns = (outputs + LANES - 1) / LANES;
    *first = columns * thread / threads * LANES;
    *last = columns * (thread + 1) / threads * LANES;
    if (*last > outputs) *last = outputs;
}

/* y[:, own outputs] = x W^T + bias, or added to what is there. `to`: the row of y for each of x; NULL: the same. */
static void product(
    const input *x, integer n, integer width, Matrix w, const float *bias, integer outputs, float *y,
    const integer *to, integer stride, int add, integer thread, integer threads
) {
    integer first, last;
    float found[ROWS * LANES];
    share(outputs, thread, threads, &first, &last);
    for (integer m = 0; m < n; m += ROWS) {
        const integer rows = n - m < ROWS ? n - m : ROWS;
        for (integer j = first; j < last; j += LANES) {
            const integer count = last - j < LANES ? last - j : LANES;
            column(x + m * width, rows, width, w, j, outputs, found);
            for (integer i = 0; i < rows; i++) {
                float *own = y + (to ? to[m + i] : m + i) * stride + j;
                const float *from = found + i * LANES;
                for (integer k = 0; k < count; k++) {
                    float value = from[k];
                    if (bias) value += bias[j + k];
                    own[k] = add ? own[k] + value : value;
                }
            }
        }
    }
}

/* y[:, own outputs] = silu(x G^T) * (x U^T): the inner layer of a gated network. */
static void gated(
    const input *x, integer n, integer width, Matrix gate, Matrix up, integer outputs, input *y,
    integer thread, integer threads
) {
    integer first, last;
    float opened[ROWS * LANES], found[ROWS * LANES];
    share(outputs, thread, threads, &first, &last);
    for (integer m = 0; m < n; m += ROWS) {
        const integer rows = n - m < ROWS ? n - m : ROWS;
        for (integer j = first; j < last; j += LANES) {
            const integer count = last - j < LANES ? last - j : LANES;
            column(x + m * width, rows, width, gate, j, outputs, opened);
            column(x + m * width, rows, width, up, j, outputs, found);
            for (integer i = 0; i < rows; i++) {
                float made[LANES];
                const vector g = LOAD(opened + i * LANES), u = LOAD(found + i * LANES);
                STORE(made, MUL(DIV(g, ADD(ALL(1.0f), exponential(SUB(ZERO, MAX(ALL(-87.0f), g))))), u));
                for (integer k = 0; k < count; k++) y[(m + i) * outputs + j + k] = to_input(made[k]);
            }
        }
    }
}
