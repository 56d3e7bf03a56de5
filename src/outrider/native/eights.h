/* Products in eight lanes: a result is summed in lanes along its row, step by step, and then over the lanes; so it depends
   on its row of x and its row of W alone. One or two rows of x meet the weights where they lie. For more, four outputs'
   weights are opened to floats once, and three rows of x at a time are multiplied by them: twelve sums, three vectors of x
   and one of weights are what sixteen registers hold. */

/* `n` rows of x, one or two, with four outputs, in blocks (of which one lies at rows[0], with its scales in `known`) or
   not. Sums in lanes. */
INLINE void direct(
    const int n, const int kind, const input *x, integer width, const char *const *rows, const float *known,
    integer ahead, vector *found
) {
    const char *four = rows[0];
#pragma GCC unroll 8
    for (int i = 0; i < 4 * n; i++) found[i] = ZERO;
    for (integer k = 0; k < width; k += GROUP) {
#ifdef HALVES
        if (kind != PLAIN) fetch(four, kind, ahead);
#endif
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            vector weights[4];
            if (kind == PLAIN) {
                const number *own = (const number *)rows[r] + k;
                const char *line = rows[0] + ahead + (4 * k + r * GROUP) * (integer)sizeof(number); /* as memory lies */
                _mm_prefetch(line, SOON);
                if (sizeof(number) == 4) _mm_prefetch(line + LINE, SOON);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) weights[i] = READ(own + LANES * i);
            }
#ifdef HALVES
            else
                spread(four, kind, r, known, weights);
#endif
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
                for (int m = 0; m < n; m++)
                    found[4 * m + r] = FMA(LOAD(x + m * width + k + LANES * i), weights[i], found[4 * m + r]);
        }
        four += KEPT(kind);
        known += KNOWN(kind);
    }
}

/* One or two rows of x with eight outputs. */
INLINE void few(
    const int n, const int kind, const input *x, integer width, const char *const *rows, const float *known,
    integer ahead, float *y
) {
    vector found[16];
    float made[16];
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
        direct(n, kind, x, width, rows + 4 * j, known + j * (width / GROUP) * KNOWN(kind), ahead, found + 4 * n * j);
#pragma GCC unroll 2
    for (int i = 0; i < n; i++) STORE(made + LANES * i, sums(found + LANES * i));
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < n; i++) memcpy(y + i * LANES + 4 * j, made + 4 * (n * j + i), 4 * sizeof(float));
}

/* `n` rows of x, two or three, with four outputs' floats. Results are written as rows of LANES numbers. `ahead`: so many
   bytes further, memory is asked for weights, where floats are what the model keeps. */
INLINE void meet_rows(const int n, const input *x, integer width, const float *const *w, integer ahead, float *y) {
    vector found[16], given[3];
    float made[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) found[i] = ZERO;
    for (integer k = 0; k < width; k += LANES) {
#pragma GCC unroll 3
        for (int i = 0; i < n; i++) given[i] = PINNED(LOAD(x + i * width + k));
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const vector weights = PINNED(LOAD(w[r] + k));
#ifndef HALVES
            if (r % 2 == 0) _mm_prefetch((const char *)(w[0] + 4 * k + r * LANES) + ahead, SOON);
#endif
#pragma GCC unroll 3
            for (int i = 0; i < n; i++) found[4 * i + r] = FMA(given[i], weights, found[4 * i + r]);
        }
    }
    STORE(made, sums(found));
    if (n > 2) STORE(made + LANES, sums(found + LANES));
#pragma GCC unroll 3
    for (int i = 0; i < n; i++) memcpy(y + i * LANES, made + 4 * i, 4 * sizeof(float));
}

static __attribute__((noinline)) void two(const input *x, integer width, const float *const *w, integer ahead, float *y) {
    meet_rows(2, x, width, w, ahead, y);
}

static __attribute__((noinline)) void three(const input *x, integer width, const float *const *w, integer ahead, float *y) {
    meet_rows(3, x, width, w, ahead, y);
}

#ifdef HALVES
/* Four rows of weights as floats. */
INLINE void widen_four(const char *const *rows, integer width, integer ahead, float *to) {
    for (integer r = 0; r < 4; r++)
        for (integer k = 0; k < width; k += GROUP) {
            const number *own = (const number *)rows[r] + k;
            _mm_prefetch((const char *)own + ahead, SOON); /* line by line */
#pragma GCC unroll 4
            for (int i = 0; i < GROUP; i += LANES) STORE(to + r * width + k + i, READ(own + i));
        }
}
#endif

/* The results of `n` rows of x for the LANES outputs from `first` on, as rows of LANES numbers. Outputs beyond `last`
   are those of the last ones, and nobody's. */
INLINE void column_of(
    const int kind, const input *x, integer n, integer width, Matrix w, integer first, integer last, float *y
) {
    const integer size = bytes(kind, width), ahead = AHEAD * LANES * size, apart = width / GROUP * KNOWN(kind);
    const char *rows[LANES], *data = w.data;
    float known[kind != PLAIN ? 2 * apart + 1 : 1];
    for (integer j = 0; j < LANES; j++) rows[j] = data + (first + j < last ? first + j : last - 1) * size;
#ifdef HALVES
    for (integer j = 0; j < 2 && kind != PLAIN; j++) {
        rows[4 * j] = data + (first + 4 * j < last ? first + 4 * j : (last - 1) / 4 * 4) * size;
        know(rows[4 * j], kind, width, ahead, known + j * apart);
    }
#endif
    if (n == 1) return few(1, kind, x, width, rows, known, ahead, y);
    if (n == 2) return few(2, kind, x, width, rows, known, ahead, y);
#ifdef HALVES
    float room[4 * width] __attribute__((aligned(64)));
#endif
    for (integer j = 0; j < LANES; j += 4) { /* a few outputs stay in the first cache while rows pass by */
        const float *opened[4];
#ifdef HALVES
        for (integer r = 0; r < 4; r++) opened[r] = room + r * width;
        if (kind != PLAIN)
            open_four(rows[j], kind, width, known + j / 4 * apart, ahead, room);
        else
            widen_four(rows + j, width, ahead, room);
#else
        for (integer r = 0; r < 4; r++) opened[r] = (const float *)rows[j + r];
#endif
        for (integer i = 0; i < n;) {
            const integer left = n - i, now = left == 2 || left == 4 ? 2 : 3; /* never one alone, whose sums are few */
            if (now == 2)
                two(x + i * width, width, opened, i ? 0 : ahead, y + i * LANES + j);
            else
                three(x + i * width, width, opened, i ? 0 : ahead, y + i * LANES + j);
            i += now;
        }
    }
}

static void column(const input *x, integer n, integer width, Matrix w, integer first, integer last, float *y) {
#ifdef HALVES
    if (w.kind == FOUR) return column_of(FOUR, x, n, width, w, first, last, y);
    if (w.kind == EIGHT) return column_of(EIGHT, x, n, width, w, first, last, y);
#endif
    column_of(PLAIN, x, n, width, w, first, last, y);
}

/* Rows of x as `column` reads them, and what a thread needs for it. */
INLINE const input *laid(const input *x, integer n, integer width, input *room) { return x; }
INLINE void begin(integer n) {}
INLINE void begin_few(integer n, integer few) {}
INLINE void end(void) {}
