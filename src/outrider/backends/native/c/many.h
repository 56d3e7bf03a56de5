/* Products of many rows of x with tiles, as prompts have them. The weights of a column are opened and turned once for all
   rows, and not the rows. 32 rows with two columns take four tiles of sums: each tile that is read is multiplied twice.
   A result is summed by the same steps as elsewhere (`tiles.h`), so its bits are the same. */

#define FEWER 48         /* rows up to which this is not used */
#define SOME 256         /* rows that stay in the second cache while the columns pass by */
#define PAIR (2 * LANES) /* rows at a time, and outputs */

/* The weights of LANES outputs from `first` on, as tiles read them beside rows: for each step, pairs of all outputs.
   Outputs beyond `last` are those of the last ones, and nobody's. */
INLINE void turned_shape(const int shape, Matrix w, int64_t width, int64_t first, int64_t last, weight_t *to) {
    const int64_t size = bytes(w.kind, width), ahead = machine.ahead * LANES * size, apart = width / BLOCK_WEIGHTS * KNOWN(shape);
    const char *data = w.data, *rows[LANES];
    float known[shape != PLAIN ? LANES / 4 * apart + 16 : 1];
    weight_t room[LANES][STEP] __attribute__((aligned(64)));
    for (int64_t j = 0; j < LANES && shape == PLAIN; j++) rows[j] = data + (first + j < last ? first + j : last - 1) * size;
    for (int64_t j = 0; j < LANES / 4 && shape != PLAIN; j++) {
        rows[j] = data + (first + 4 * j < last ? first + 4 * j : (last - 1) / 4 * 4) * size;
        know(rows[j], w.kind, width, ahead, known + j * apart);
    }
    for (int64_t s = 0; s < width / STEP; s++) {
        vector pairs[LANES];
        open_step(shape, rows, known, apart, s, ahead, room);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) pairs[j] = LOAD((const float *)room[j]);
        transpose(pairs);
#pragma GCC unroll 16
        for (int p = 0; p < LANES; p++) STORE((float *)(to + (s * LANES + p) * STEP), pairs[p]);
    }
}

static void turned(Matrix w, int64_t width, int64_t first, int64_t last, weight_t *to) {
#define TURNED(shape) return turned_shape(shape, w, width, first, last, to);
    if (w.kind == PLAIN) TURNED(PLAIN)
    EACH_SHAPE(SHAPE(w.kind), TURNED)
#undef TURNED
}

/* PAIR rows of x, sixteen and sixteen, with two columns of turned weights. */
static void both(const act_t *x, const act_t *others, int64_t width, const weight_t *left, const weight_t *right, float *y) {
    settle();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < width / STEP; s++) {
        _tile_loadd(4, x + s * STEP, width * sizeof(act_t));
        _tile_loadd(6, left + s * LANES * STEP, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + s * LANES * STEP, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, others + s * STEP, width * sizeof(act_t));
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, y, PAIR * sizeof(float));
    _tile_stored(1, y + LANES, PAIR * sizeof(float));
    _tile_stored(2, y + LANES * PAIR, PAIR * sizeof(float));
    _tile_stored(3, y + LANES * PAIR + LANES, PAIR * sizeof(float));
}

/* The same for `n` of them: rows behind the last one are zeros. `room`: of LANES rows. */
static void both_of(
    const act_t *x, int64_t n, int64_t width, const weight_t *left, const weight_t *right, act_t *room, float *y
) {
    const int64_t whole = n / LANES * LANES;
    if (n < PAIR) {
        memset(room, 0, LANES * width * sizeof(act_t));
        memcpy(room, x + whole * width, (n - whole) * width * sizeof(act_t));
    }
    both(whole ? x : room, whole == PAIR ? x + LANES * width : room, width, left, right, y);
}

static void product_of_many(
    const act_t *x, int64_t n, int64_t width, Matrix w, const float *bias, int64_t outputs, int64_t first, int64_t last,
    float *y, const int64_t *to, int64_t stride, int add, const Team *team
) {
    weight_t *kept[2] = {(weight_t *)team->scratch, (weight_t *)team->scratch + LANES * width};
    act_t *room = (act_t *)(kept[1] + LANES * width);
    EXPECT((char *)(room + LANES * width) <= team->scratch + team->region->bytes);
    float found[PAIR * PAIR] __attribute__((aligned(64)));
    begin(2);
    for (int64_t m = 0; m < n; m += SOME)
        for (int64_t j = first; j < last; j += PAIR) {
            const int64_t end = m + SOME < n ? m + SOME : n, count = last - j < PAIR ? last - j : PAIR;
            turned(w, width, j, outputs, kept[0]);
            if (count > LANES) turned(w, width, j + LANES, outputs, kept[1]);
            for (int64_t b = m; b < end; b += PAIR) {
                const int64_t rows = end - b < PAIR ? end - b : PAIR;
                /* where there is one column alone it stands for both, and what the second makes is nobody's */
                both_of(x + b * width, rows, width, kept[0], kept[count > LANES], room, found);
                for (int64_t i = 0; i < rows; i++) {
                    float *own = y + (to ? to[b + i] : b + i) * stride + j, *from = found + i * PAIR;
                    int64_t k = 0;
                    for (; k + LANES <= count; k += LANES) {
                        const vector value = bias ? ADD(LOAD(from + k), LOAD(bias + j + k)) : LOAD(from + k);
                        STORE(own + k, add ? ADD(LOAD(own + k), value) : value);
                    }
                    for (; k < count; k++) {
                        const float value = bias ? from[k] + bias[j + k] : from[k];
                        own[k] = add ? own[k] + value : value;
                    }
                }
            }
        }
    end();
}

static void gated_of_many(
    const act_t *x, int64_t n, int64_t width, Matrix gate, Matrix up, int64_t outputs, int64_t first, int64_t last,
    act_t *y, const Team *team
) {
    weight_t *kept[2] = {(weight_t *)team->scratch, (weight_t *)team->scratch + LANES * width};
    act_t *room = (act_t *)(kept[1] + LANES * width);
    EXPECT((char *)(room + LANES * width) <= team->scratch + team->region->bytes);
    float found[PAIR * PAIR] __attribute__((aligned(64)));
    begin(2);
    for (int64_t m = 0; m < n; m += SOME)
        for (int64_t j = first; j < last; j += LANES) {
            const int64_t end = m + SOME < n ? m + SOME : n, count = last - j < LANES ? last - j : LANES;
            turned(gate, width, j, outputs, kept[0]);
            turned(up, width, j, outputs, kept[1]);
            for (int64_t b = m; b < end; b += PAIR) {
                const int64_t rows = end - b < PAIR ? end - b : PAIR;
                both_of(x + b * width, rows, width, kept[0], kept[1], room, found);
                for (int64_t i = 0; i < rows; i++) {
                    const float *from = found + i * PAIR;
                    const vector made = MUL(silu(LOAD(from)), LOAD(from + LANES));
                    act_t part[LANES], *own = y + (b + i) * outputs + j;
                    STORE_INPUT(count < LANES ? part : own, made);
                    if (count < LANES) memcpy(own, part, count * sizeof(act_t));
                }
            }
        }
    end();
}
