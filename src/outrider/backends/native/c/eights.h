/* Products in eight lanes: a result is summed in lanes along its row, step by step, and then over the lanes; so it depends
   on its row of x and its row of W alone. A few rows of x meet the weights where they lie. For more, four outputs'
   weights are opened to floats once, and three rows of x at a time are multiplied by them: twelve sums, three vectors of x
   and one of weights are what sixteen registers hold. */

/* `n` rows of x with `own` of four outputs, from the one that is `from`: found[4 * row + output], sums in lanes. The
   outputs lie in blocks (of which one is at rows[0], with its scales in `known`) or not. */
INLINE void direct(
    const int n, const int from, const int own, const int kind, const act_t *x, int64_t width, const char *const *rows,
    const float *known, int64_t ahead, vector *found
) {
    const char *four = rows[0];
    vector sum[16];
#ifdef HALVES
    Reader reader = reader_of(four, kind, width);
#endif
#pragma GCC unroll 16
    for (int i = 0; i < own * n; i++) sum[i] = ZERO;
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) {
#ifdef HALVES
        const __m256i table = table_at(&reader, four, kind);
        if (kind != PLAIN) fetch(four, kind, from, own, ahead);
#endif
#pragma GCC unroll 4
        for (int r = from; r < from + own; r++) {
            vector weights[4];
            if (kind == PLAIN) {
                const weight_t *row = (const weight_t *)rows[r] + k;
                const char *line = rows[0] + ahead + (4 * k + r * BLOCK_WEIGHTS) * (int64_t)sizeof(weight_t); /* as memory lies */
                prefetch(line);
                if (sizeof(weight_t) == 4) prefetch(line + LINE);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) weights[i] = READ(row + LANES * i);
            }
#ifdef HALVES
            else
                spread(four, kind, r, known, table, weights);
#endif
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
                for (int m = 0; m < n; m++) {
                    vector *to = sum + own * m + r - from;
                    *to = FMA(LOAD(x + m * width + k + LANES * i), weights[i], *to);
                }
        }
        four += KEPT(kind);
        known += KNOWN(kind);
    }
#pragma GCC unroll 4
    for (int m = 0; m < n; m++)
#pragma GCC unroll 4
        for (int r = 0; r < own; r++) found[4 * m + from + r] = sum[own * m + r];
}

/* The sums over lanes of `n` rows with four outputs, as rows of LANES numbers; found[4 * n ..] are zeros. */
INLINE void write_sums(const int n, const vector *found, float *y) {
    float made[2 * LANES];
    STORE(made, sums(found));
    if (n > 2) STORE(made + LANES, sums(found + LANES));
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) memcpy(y + i * LANES, made + 4 * i, 4 * sizeof(float));
}

/* One to four rows of x with four outputs; four rows meet two outputs at a time, for want of registers. */
INLINE void few(
    const int n, const int kind, const act_t *x, int64_t width, const char *const *rows, const float *known,
    int64_t ahead, float *y
) {
    const int own = n < 4 ? 4 : 2;
    vector found[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) found[i] = ZERO;
#pragma GCC unroll 2
    for (int from = 0; from < 4; from += own) direct(n, from, own, kind, x, width, rows, known, ahead, found);
    write_sums(n, found, y);
}

/* `n` rows of x, two or three, with four outputs' floats. `ahead`: so many bytes further, memory is asked for weights,
   where floats are what the model keeps. */
INLINE void meet_rows(const int n, const act_t *x, int64_t width, const float *const *w, int64_t ahead, float *y) {
    vector found[16], given[3];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) found[i] = ZERO;
    for (int64_t k = 0; k < width; k += LANES) {
#pragma GCC unroll 3
        for (int i = 0; i < n; i++) given[i] = PINNED(LOAD(x + i * width + k));
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const vector weights = PINNED(LOAD(w[r] + k));
#ifndef HALVES
            if (r % 2 == 0) prefetch((const char *)(w[0] + 4 * k + r * LANES) + ahead);
#endif
#pragma GCC unroll 3
            for (int i = 0; i < n; i++) found[4 * i + r] = FMA(given[i], weights, found[4 * i + r]);
        }
    }
    write_sums(n, found, y);
}

static __attribute__((noinline)) void two(const act_t *x, int64_t width, const float *const *w, int64_t ahead, float *y) {
    meet_rows(2, x, width, w, ahead, y);
}

static __attribute__((noinline)) void three(const act_t *x, int64_t width, const float *const *w, int64_t ahead, float *y) {
    meet_rows(3, x, width, w, ahead, y);
}

#ifdef HALVES
/* Four rows of weights as floats. */
INLINE void widen_four(const char *const *rows, int64_t width, int64_t ahead, float *to) {
    for (int64_t r = 0; r < 4; r++)
        for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) {
            const weight_t *own = (const weight_t *)rows[r] + k;
            prefetch((const char *)own + ahead); /* line by line */
#pragma GCC unroll 4
            for (int i = 0; i < BLOCK_WEIGHTS; i += LANES) STORE(to + r * width + k + i, READ(own + i));
        }
}
#endif

/* Rows of x that meet the weights where they lie: more of them where weights take little work to open. */
#define MEET_FEW(kind) ((kind) == Q4 ? 2 : 4)

/* The results of `n` rows of x for four outputs, as rows of LANES numbers. */
INLINE void four_of(
    const int kind, const act_t *x, int64_t n, int64_t width, const char *const *rows, int64_t ahead, float *y
) {
    float known[width / BLOCK_WEIGHTS * KNOWN(kind) + 1];
#ifdef HALVES
    if (kind == Q4 || kind == Q8) know(rows[0], kind, width, ahead, known);
    if (kind == BF12) prefetch((const char *)uppers(rows[0], width) + ahead);
#endif
    if (n == 1) return few(1, kind, x, width, rows, known, ahead, y);
    if (n == 2) return few(2, kind, x, width, rows, known, ahead, y);
    if (n == 3 && MEET_FEW(kind) > 2) return few(3, kind, x, width, rows, known, ahead, y);
    if (n == 4 && MEET_FEW(kind) > 3) return few(4, kind, x, width, rows, known, ahead, y);
    const float *opened[4]; /* a few outputs stay in the first cache while rows pass by */
#ifdef HALVES
    float room[4 * width] __attribute__((aligned(64)));
    for (int64_t r = 0; r < 4; r++) opened[r] = room + r * width;
    if (kind != PLAIN)
        open_four(rows[0], kind, width, known, ahead, room);
    else
        widen_four(rows, width, ahead, room);
#else
    for (int64_t r = 0; r < 4; r++) opened[r] = (const float *)rows[r];
#endif
    for (int64_t i = 0; i < n;) {
        const int64_t left = n - i, now = left == 2 || left == 4 ? 2 : 3; /* never one alone, whose sums are few */
        if (now == 2)
            two(x + i * width, width, opened, i ? 0 : ahead, y + i * LANES);
        else
            three(x + i * width, width, opened, i ? 0 : ahead, y + i * LANES);
        i += now;
    }
}

/* The results of `n` rows of x for the LANES outputs from `first` on, as rows of LANES numbers. Outputs beyond `last`
   are those of the last ones, and nobody's. */
INLINE void column_of(
    const int kind, const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, float *y
) {
    const int64_t size = bytes(kind, width), ahead = machine.ahead * LANES * size;
    const char *data = w.data;
    for (int64_t j = first; j < first + LANES; j += 4, y += 4) {
        const char *rows[4];
        if (kind == PLAIN)
            for (int64_t r = 0; r < 4; r++) rows[r] = data + (j + r < last ? j + r : last - 1) * size;
        else
            rows[0] = data + (j < last ? j : (last - 1) / 4 * 4) * size;
        four_of(kind, x, n, width, rows, ahead, y);
    }
}

static void column(const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, float *y) {
#ifdef HALVES
    if (WHOLE(w.kind)) return integers(x, n, width, w, first, last, y);
    if (w.kind == Q4) return column_of(Q4, x, n, width, w, first, last, y);
    if (w.kind == Q8) return column_of(Q8, x, n, width, w, first, last, y);
    if (w.kind == BF12) return column_of(BF12, x, n, width, w, first, last, y);
#endif
    column_of(PLAIN, x, n, width, w, first, last, y);
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
