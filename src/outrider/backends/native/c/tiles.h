/* Products with tiles of bfloat16, for processors that have them (AMX, where `library.py` or `variants.py` sets TILES): sixteen outputs by
   sixteen rows of x by 32 numbers in one instruction, so that sixteen rows cost little more than one. A result is summed
   along its row, step by step; so here, too, it depends on its row of x and its row of W alone. Attention's scores
   (`scores.h`: keys are its weights, and queries its x) and values (`values.h`) are such products as well. */

#define RING 8  /* opened steps for which there is room: more than DELAY */
#define DELAY 4 /* steps that are opened before the first is multiplied: opening one and multiplying another overlap */
#define LAID(n) (((n) + LANES - 1) / LANES * LANES) /* rows for which there is room */

/* Rows of x as tiles read them: for each sixteen rows and each step, sixteen pairs of all rows. One row stays as it is. */
static const act_t *laid(int64_t kind, const act_t *x, int64_t n, int64_t width, act_t *room) {
    if (n == 1) return x;
    for (int64_t m = 0; m < n; m += LANES)
        for (int64_t k = 0; k < width; k += STEP) {
            vector pairs[LANES];
            const act_t *from = x + m * width + k;
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++)
                pairs[i] = m + i < n ? _mm512_castsi512_ps(_mm512_loadu_si512(from + i * width)) : ZERO;
            transpose(pairs);
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) STORE((float *)(room + (m * width + (k + 2 * i) * LANES)), pairs[i]);
        }
    return room;
}

/* This thread's tiles for so many rows of x: 0 to 3 are of sums; 4 and 5 of weights or x; 6 and 7 have only `few` rows. */
INLINE void begin_few(int64_t n, int64_t few) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.rows[i] = i < 6 ? 16 : few;
        shape.bytes[i] = n == 1 && i != 4 ? 4 : 64;
    }
    __asm__ volatile("" : : "m"(shape)); /* all of it is written */
    _tile_loadconfig(&shape);
}

INLINE void begin(int64_t n) { begin_few(n, 16); }
INLINE void end(void) { _tile_release(); }

/* Tiles read what was stored before: gcc does not know that they read memory. */
INLINE void settle(void) { __asm__ volatile("" ::: "memory"); }

/* Step `s` of LANES outputs, whose rows (or fours of rows) these are, as numbers. */
INLINE void open_step(
    const int shape, const char *const *rows, const float *known, int64_t apart, int64_t s, int64_t ahead,
    weight_t (*opened)[STEP]
) {
    if (shape == PLAIN) {
        for (int64_t j = 0; j < LANES; j++) _mm512_store_si512(opened[j], _mm512_loadu_si512(rows[j] + s * STEP * 2));
        settle();
        return;
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < LANES / 4; j++) {
        operand found[4];
        spread(rows[j] + s * KEPT(shape), shape, known + j * apart + s * KNOWN(shape), ahead, found);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) _mm512_store_si512(opened[4 * j + r], (__m512i)found[r]);
    }
    settle();
}

/* The results of `n` rows of x, which are `laid` in so many groups of sixteen, for the LANES outputs from `first` on, as
   rows of LANES numbers. Outputs beyond `last` are those of the last ones, and nobody's. */
INLINE void outputs_of(
    const int shape, const int groups, const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last,
    float *y
) {
    const int64_t size = bytes(w.kind, width), ahead = machine.ahead * LANES * size, apart = width / BLOCK_WEIGHTS * KNOWN(shape);
    const int64_t stride = n == 1 ? 4 : 64, steps = width / STEP, next = n == 1 ? STEP : LANES * STEP;
    const int64_t direct = shape == PLAIN && first + LANES <= last; /* tiles can be read where the weights lie */
    const char *data = w.data, *rows[LANES], *own = data + first * size;
    float known[shape != PLAIN ? LANES / 4 * apart + 16 : 1];
    weight_t room[RING][LANES][STEP] __attribute__((aligned(64)));
    for (int64_t j = 0; j < LANES && shape == PLAIN; j++) rows[j] = data + (first + j < last ? first + j : last - 1) * size;
    for (int64_t j = 0; j < LANES / 4 && shape != PLAIN; j++) {
        rows[j] = data + (first + 4 * j < last ? first + 4 * j : (last - 1) / 4 * 4) * size;
        know(rows[j], w.kind, width, ahead, known + j * apart);
    }
    _tile_zero(0);
    if (groups > 1) _tile_zero(1);
    if (groups > 2) _tile_zero(2);
    if (groups > 3) _tile_zero(3);
    for (int64_t s = 0; s < steps && s < DELAY && !direct; s++)
        open_step(shape, rows, known, apart, s, ahead, room[s % RING]);
    for (int64_t s = 0; s < steps; s++) {
        if (direct) {
#pragma GCC unroll 16
            for (int64_t j = 0; j < LANES; j++) /* of the column after the next */
                _mm_prefetch(own + (j + 2 * LANES) * size + s * STEP * 2, _MM_HINT_T1);
            _tile_loadd(4, own + s * STEP * 2, size);
        } else {
            _tile_loadd(4, room[s % RING], 64);
        }
        const act_t *from = x + s * next;
#define GATHERED(g)                                       \
    if (g < groups) {                                     \
        _tile_loadd(5, from + g * LANES * width, stride); \
        _tile_dpbf16ps(g, 4, 5);                          \
    }
        GATHERED(0)
        GATHERED(1)
        GATHERED(2)
        GATHERED(3)
#undef GATHERED
        if (s + DELAY < steps && !direct)
            open_step(shape, rows, known, apart, s + DELAY, ahead, room[(s + DELAY) % RING]);
    }
    _tile_stored(0, y, stride);
    if (n == 1) return;
    if (groups > 1) _tile_stored(1, y + LANES * LANES, 64);
    if (groups > 2) _tile_stored(2, y + 2 * LANES * LANES, 64);
    if (groups > 3) _tile_stored(3, y + 3 * LANES * LANES, 64);
    for (int64_t g = 0; g < groups; g++) {
        vector found[LANES];
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i++) found[i] = LOAD(y + (g * LANES + i) * LANES);
        transpose(found);
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i++) STORE(y + (g * LANES + i) * LANES, found[i]);
    }
}

/* The same for each shape of weights and number of groups. */
static void column(const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, float *y) {
#define GROUPS(shape)                                                                    \
    switch (LAID(n) / LANES) {                                                           \
    case 1: return outputs_of(shape, 1, x, n, width, w, first, last, y);                 \
    case 2: return outputs_of(shape, 2, x, n, width, w, first, last, y);                 \
    case 3: return outputs_of(shape, 3, x, n, width, w, first, last, y);                 \
    default: return outputs_of(shape, 4, x, n, width, w, first, last, y);                \
    }
    if (w.kind == PLAIN) GROUPS(PLAIN)
    EACH_SHAPE(SHAPE(w.kind), GROUPS)
#undef GROUPS
}
