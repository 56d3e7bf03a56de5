/* Products with tiles of bfloat16, for processors that have them (AMX, where `build.py` sets TILES): sixteen outputs by
   sixteen rows of x by 32 numbers in one instruction, so that sixteen rows cost little more than one. A result is summed
   along its row, pair by pair; so here, too, it depends on its row of x and its row of W alone. */

#define PANEL 8                            /* steps that are opened before they are multiplied */
#define LAID(n) (((n) + LANES - 1) / LANES * LANES) /* rows for which there is room */

/* Rows of x as tiles read them: for each sixteen rows and each step, sixteen pairs of all rows. One row stays as it is. */
static const input *laid(const input *x, integer n, integer width, input *room) {
    if (n == 1) return x;
    for (integer m = 0; m < n; m += LANES)
        for (integer k = 0; k < width; k += STEP) {
            vector pairs[LANES];
            const input *from = x + m * width + k;
#pragma GCC unroll 16
            for (integer i = 0; i < LANES; i++)
                pairs[i] = m + i < n ? _mm512_castsi512_ps(_mm512_loadu_si512(from + i * width)) : ZERO;
            transpose(pairs);
#pragma GCC unroll 16
            for (integer i = 0; i < LANES; i++) STORE((float *)(room + (m * width + (k + 2 * i) * LANES)), pairs[i]);
        }
    return room;
}

/* This thread's tiles: four of sums, one of weights, one of x, for so many rows of x. */
INLINE void begin(integer n) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 6; i++) {
        shape.rows[i] = 16;
        shape.bytes[i] = n == 1 && i != 4 ? 4 : 64;
    }
    _tile_loadconfig(&shape);
}

INLINE void end(void) { _tile_release(); }

/* The results of `n` rows of x, which are `laid`, for the LANES outputs from `first` on, as rows of LANES numbers.
   Outputs beyond `last` are those of the last ones, and nobody's. */
static void column(const input *x, integer n, integer width, Matrix w, integer first, integer last, float *y) {
    const integer size = bytes(w.kind, width), ahead = LANES * size, apart = width / GROUP * KNOWN(w.kind);
    const integer stride = n == 1 ? 4 : 64, groups = LAID(n) / LANES;
    const char *data = w.data, *rows[LANES / 4];
    float known[w.kind != PLAIN ? LANES / 4 * apart + 16 : 1];
    number room[2][PANEL][LANES][STEP] __attribute__((aligned(64)));
    for (integer j = 0; j < LANES / 4 && w.kind != PLAIN; j++) {
        rows[j] = data + (first + 4 * j < last ? first + 4 * j : (last - 1) / 4 * 4) * size;
        know(rows[j], w.kind, width, ahead, known + j * apart);
    }
    _tile_zero(0);
    if (groups > 1) _tile_zero(1);
    if (groups > 2) _tile_zero(2);
    if (groups > 3) _tile_zero(3);
    for (integer start = 0, half = 0; start < width; start += PANEL * STEP, half ^= 1) {
        const integer steps = width - start < PANEL * STEP ? (width - start) / STEP : PANEL;
        number (*opened)[LANES][STEP] = room[half];
        for (integer s = 0; s < steps; s++) {
            const integer k = start + s * STEP, block = k / GROUP;
            for (integer j = 0; j < LANES / 4 && w.kind != PLAIN; j++) {
                const float *own = known + j * apart + block * KNOWN(w.kind);
                operand found[4];
                if (w.kind == FOUR)
                    spread(rows[j] + block * KEPT(FOUR), FOUR, own, ahead, found);
                else
                    spread(rows[j] + block * KEPT(EIGHT), EIGHT, own, ahead, found);
                for (int r = 0; r < 4; r++) _mm512_store_si512(opened[s][4 * j + r], (__m512i)found[r]);
            }
            if (w.kind == PLAIN)
                for (integer j = 0; j < LANES; j++) {
                    const char *from = data + (first + j < last ? first + j : last - 1) * size + k * 2;
                    _mm_prefetch(from + ahead, _MM_HINT_T1);
                    _mm512_store_si512(opened[s][j], _mm512_loadu_si512(from));
                }
        }
        for (integer s = 0; s < steps; s++) {
            _tile_loadd(4, opened[s], 64);
            const input *from = x + (start + s * STEP) * (n == 1 ? 1 : LANES);
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
        }
    }
    _tile_stored(0, y, stride);
    if (n == 1) return;
    if (groups > 1) _tile_stored(1, y + LANES * LANES, 64);
    if (groups > 2) _tile_stored(2, y + 2 * LANES * LANES, 64);
    if (groups > 3) _tile_stored(3, y + 3 * LANES * LANES, 64);
    for (integer g = 0; g < groups; g++) {
        vector found[LANES];
#pragma GCC unroll 16
        for (integer i = 0; i < LANES; i++) found[i] = LOAD(y + (g * LANES + i) * LANES);
        transpose(found);
#pragma GCC unroll 16
        for (integer i = 0; i < LANES; i++) STORE(y + (g * LANES + i) * LANES, found[i]);
    }
}
