/* Products in sixteen lanes: a result is summed in lanes along its row, step by step, and then over the lanes; so it depends on
   its row of x and its row of W alone. */

#define MOST 6 /* rows of x that are multiplied at once: sums of so many with four outputs fit into the registers */
#define TILE 4 /* of more rows, so many at once but for the last ones */

typedef struct { /* memory that will be read soon */
    const char *from, *to;
    int64_t lines;   /* of it, asked for in each step */
    int near;        /* into the first cache or the second? */
    int64_t column;  /* bytes from a block to the one that is read later, which is asked for beside it */
} Ahead;

/* `n` rows of x with so many outputs, LANES results or those of MOST rows with four. The outputs' rows lie at `rows`, or in fours if they are in
   blocks, with their scales in `known`; `room`: where their numbers are written, or NULL. Results are written as rows of
   LANES numbers. */
INLINE void tile(
    const int n, const int outputs, const int kind, const act_t *x, int64_t width, const char *const *rows,
    const float *known, weight_t *room, Ahead *ahead, float *y
) {
    const int64_t lines = ahead->from < ahead->to ? ahead->lines : 0;
    const char *line = ahead->from;
    const int near = ahead->near;
    const int results = n * outputs <= LANES ? LANES : 2 * LANES;
    float made[2 * LANES];
    vector found[2 * LANES];
#pragma GCC unroll 32
    for (int i = 0; i < results; i++) found[i] = ZERO;
    for (int64_t k = 0, at = 0; k < width; k += STEP, at += KEPT(kind), known += KNOWN(kind)) {
        operand given[4], weights[4];
        for (int64_t i = 0; i < lines; i++, line += LINE) {
            if (near)
                _mm_prefetch(line, _MM_HINT_T0);
            else
                _mm_prefetch(line, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (int i = 0; i < n && n <= 4; i++) given[i] = PINNED(INPUT(x + i * width + k));
#pragma GCC unroll 4
        for (int j = 0; j < outputs; j += 4) {
            if (kind == PLAIN)
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) weights[r] = WEIGHT((const weight_t *)rows[j + r] + k);
#ifdef NARROW
            else
                spread(rows[j / 4] + at, kind, known + j / 4 * (width / BLOCK_WEIGHTS) * KNOWN(kind), ahead->column, weights);
            if (room)
                for (int r = 0; r < 4; r++) _mm512_storeu_si512(room + r * width + k, (__m512i)weights[r]);
#endif
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++)
#pragma GCC unroll 6
                for (int i = 0; i < n; i++)
                    found[i * outputs + j + r] =
                        TIMES(found[i * outputs + j + r], n <= 4 ? given[i] : INPUT(x + i * width + k), weights[r]);
        }
    }
    ahead->from = line;
    for (int i = 0; i < results; i += LANES) STORE(made + i, sums(found + i));
#pragma GCC unroll 6
    for (int i = 0; i < n; i++) memcpy(y + i * LANES, made + i * outputs, outputs * sizeof(float));
}

/* A few rows of x with LANES outputs: all weights are read once. */
INLINE void few(
    const int n, const int kind, const act_t *x, int64_t width, const char *const *rows, const float *known,
    Ahead *ahead, float *y
) {
    const int outputs = n == 3 || n > 4 ? 4 : LANES / n;
    for (int j = 0; j < LANES; j += outputs) {
        const float *own = kind == PLAIN ? NULL : known + j / 4 * (width / BLOCK_WEIGHTS) * KNOWN(kind);
        tile(n, outputs, kind, x, width, rows + (kind == PLAIN ? j : j / 4), own, NULL, ahead, y + j);
    }
}

/* The same for each number of rows. */
INLINE void some(
    const int kind, const act_t *x, int64_t n, int64_t width, const char *const *rows, const float *known,
    Ahead *ahead, float *y
) {
    if (n == 1)
        few(1, kind, x, width, rows, known, ahead, y);
    else if (n == 2)
        few(2, kind, x, width, rows, known, ahead, y);
    else if (n == 3)
        few(3, kind, x, width, rows, known, ahead, y);
    else if (n == 4)
        few(4, kind, x, width, rows, known, ahead, y);
    else if (n == 5)
        few(5, kind, x, width, rows, known, ahead, y);
    else
        few(6, kind, x, width, rows, known, ahead, y);
}

/* The results of `n` rows of x for the LANES outputs from `first` on, as rows of LANES numbers. Outputs beyond `last`
   are those of the last ones, and nobody's. */
static void column(const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, float *y) {
#ifdef HALVES
    if (WHOLE(w.kind)) return integers(x, n, width, w, first, last, y);
#endif
    const char *rows[LANES], *data = w.data;
    const int64_t size = bytes(w.kind, width), column = LANES * size, steps = width / STEP;
    const int64_t tiles = n < 3 ? n : n > MOST ? (n + TILE - 1) / TILE * 4 : 4;
    const int near = 2 * column <= machine.first_cache * 4 / 5; /* this column and the next, beside rows of x */
    const char *next = data + first * size + (near ? 1 : 2) * column;
    Ahead ahead = {next, next + column, (column / LINE + steps * tiles - 1) / (steps * tiles), near, machine.ahead * column};
    for (int64_t j = 0; j < LANES; j++) rows[j] = data + (first + j < last ? first + j : last - 1) * size;
#ifdef NARROW
    const int64_t shape = SHAPE(w.kind), apart = width / BLOCK_WEIGHTS * KNOWN(shape);
    float known[w.kind != PLAIN ? LANES / 4 * apart + 16 : 1];
    weight_t room[w.kind != PLAIN && n > MOST ? 4 * width : 1];
    if (w.kind != PLAIN) {
        ahead.to = next; /* what is in blocks asks for itself */
        for (int64_t j = 0; j < LANES / 4; j++) {
            rows[j] = data + (first + 4 * j < last ? first + 4 * j : (last - 1) / 4 * 4) * size;
            know(rows[j], w.kind, width, machine.ahead * column, known + j * apart);
        }
#define SOME(shape) return some(shape, x, n, width, rows, known, &ahead, y);
        if (n <= MOST) EACH_SHAPE(shape, SOME)
#undef SOME
    }
#endif
    if (n <= MOST) return some(PLAIN, x, n, width, rows, NULL, &ahead, y);
    for (int64_t j = 0; j < LANES; j += 4) { /* a few outputs stay in the first cache while rows pass by */
        const char *const *from = rows + j;
        float *to = y + j;
        int64_t i = 0;
#ifdef NARROW
        const char *opened[4];
        if (w.kind != PLAIN) {
            for (int64_t r = 0; r < 4; r++) opened[r] = (const char *)(room + r * width);
            from = opened;
            i = 4;
#define FIRST_FOUR(shape) tile(4, 4, shape, x, width, rows + j / 4, known + j / 4 * apart, room, &ahead, to);
            EACH_SHAPE(shape, FIRST_FOUR)
#undef FIRST_FOUR
        }
#endif
#define REST(rows, left) \
    for (; i < n && (left); i += rows) tile(rows, 4, PLAIN, x + i * width, width, from, NULL, NULL, &ahead, to + i * LANES);
        REST(TILE, n - i > MOST || n - i == TILE)
        REST(6, n - i == 6)
        REST(5, n - i == 5)
        REST(3, n - i == 3)
        REST(2, n - i == 2)
        REST(1, n - i == 1)
#undef REST
    }
}

/* Rows of x as `column` reads them, and what a thread needs for it. */
INLINE const act_t *laid(int64_t kind, const act_t *x, int64_t n, int64_t width, act_t *room) {
#ifdef HALVES
    if (WHOLE(kind)) return round_rows(x, n, width, room);
#endif
    return x;
}
INLINE void begin(int64_t n) {}
INLINE void begin_few(int64_t n, int64_t few) {}
INLINE void end(void) {}
