/* What queries make of a block's values: shares of the scores, and the values weighed by these and added in the order of
   their positions. Nothing here depends on the slots they lie in, nor on other nodes. With tiles, shares are rounded to
   bfloat16 and 32 positions are added at a time. What a query does not see counts zero there, so values must be finite
   (nothing can be said of a text where one is not). */

/* Scores of a block's keys `from` .. `count` to shares of what was seen so far, which shrinks with them. */
static void shared(Work *w, int64_t first, int64_t last, int64_t from, int64_t count, int64_t width) {
    for (int64_t q = first; q < last; q++) {
        float *score = w->score[q];
        for (int64_t j = 0; j < from; j++) score[j] = -INFINITY;
        for (int64_t j = count; j < BLOCK; j++) score[j] = -INFINITY;
        vector most = LOAD(score);
        for (int64_t j = LANES; j < BLOCK; j += LANES) most = MAX(LOAD(score + j), most);
        const float before = w->most[q], found = most_of(most), now = found > before ? found : before;
        float less[LANES];
        STORE(less, exponential(ALL(before - now)));
        vector sum = MUL(LOAD(w->sum[q]), ALL(less[0]));
        for (int64_t j = 0; j < BLOCK; j += LANES) {
            const vector share = exponential(SUB(LOAD(score + j), ALL(now)));
#ifdef TILES
            STORE_INPUT(w->share[q] + j, share);
#else
            STORE(score + j, share);
#endif
            sum = ADD(sum, share);
        }
        STORE(w->sum[q], sum);
        w->most[q] = now;
        if (less[0] != 1.0f)
            for (int64_t d = 0; d < width; d += LANES) STORE(w->out[q] + d, MUL(LOAD(w->out[q] + d), ALL(less[0])));
    }
}

#ifdef TILES

/* The values of 32 positions, a pair of them side by side, as tiles read them: the pairs `first` .. `last` - 1 of them.
   `ahead`: so many numbers further, memory is asked for what is read next; 0: not. */
static void opened(const kv_t *const *rows, int64_t first, int64_t last, int64_t width, int64_t ahead, kv_t *to) {
    static const kv_t order[2 * STEP] = { /* numbers of the first from 0 on, of the second from 32 on */
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45,
        14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59,
        28, 60, 29, 61, 30, 62, 31, 63,
    };
    const __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + STEP);
    for (int64_t p = first; p < last; p++)
        for (int64_t d = 0; d < width; d += STEP) {
            const __m512i a = _mm512_loadu_si512(rows[2 * p] + d), b = _mm512_loadu_si512(rows[2 * p + 1] + d);
            if (ahead) {
                _mm_prefetch((const char *)(rows[2 * p] + d + ahead), _MM_HINT_T1);
                _mm_prefetch((const char *)(rows[2 * p + 1] + d + ahead), _MM_HINT_T1);
            }
            _mm512_store_si512(to + (d + p) * STEP, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(to + (d + LANES + p) * STEP, _mm512_permutex2var_epi16(a, high, b));
        }
}

/* Sixteen queries: their shares of so many steps, which lie `apart`, times opened values, added to what is at `out`. */
static void added(const act_t *share, int64_t apart, const kv_t *pairs, int64_t steps, int64_t width, float *out) {
    settle();
    for (int64_t d = 0; d < width; d += 4 * LANES) {
        const int64_t parts = (width - d) / LANES;
        const kv_t *from = pairs + d * STEP;
#define TILE(p)                                                                       \
    if (p < parts) {                                                                  \
        _tile_loadd(5, from + (s * width + p * LANES) * STEP, 64); /* of this step */ \
        _tile_dpbf16ps(p, 4, 5);                                                      \
    }
        _tile_loadd(0, out + d, MAX_HEAD_DIM * sizeof(float));
        if (1 < parts) _tile_loadd(1, out + d + LANES, MAX_HEAD_DIM * sizeof(float));
        if (2 < parts) _tile_loadd(2, out + d + 2 * LANES, MAX_HEAD_DIM * sizeof(float));
        if (3 < parts) _tile_loadd(3, out + d + 3 * LANES, MAX_HEAD_DIM * sizeof(float));
        for (int64_t s = 0; s < steps; s++) {
            _tile_loadd(4, share + s * STEP, apart * sizeof(act_t));
            TILE(0)
            TILE(1)
            TILE(2)
            TILE(3)
        }
        _tile_stored(0, out + d, MAX_HEAD_DIM * sizeof(float));
        if (1 < parts) _tile_stored(1, out + d + LANES, MAX_HEAD_DIM * sizeof(float));
        if (2 < parts) _tile_stored(2, out + d + 2 * LANES, MAX_HEAD_DIM * sizeof(float));
        if (3 < parts) _tile_stored(3, out + d + 3 * LANES, MAX_HEAD_DIM * sizeof(float));
#undef TILE
    }
}

/* A few queries, as many as `begin_few` was told: their shares of one step, times opened values. */
static void added_few(const act_t *share, int64_t apart, const kv_t *pairs, int64_t width, float *out) {
    settle();
    _tile_loadd(7, share, apart * sizeof(act_t));
    for (int64_t d = 0; d < width; d += LANES) {
        _tile_loadd(6, out + d, MAX_HEAD_DIM * sizeof(float));
        _tile_loadd(5, pairs + d * STEP, 64);
        _tile_dpbf16ps(6, 7, 5);
        _tile_stored(6, out + d, MAX_HEAD_DIM * sizeof(float));
    }
}

/* Of a block, steps of 32 positions: those which lie in the same slots for all nodes go together. Others go node by node,
   where what all of them share is opened once. What a node does not see counts nothing. */
static void valued(Work *w, const View *view, const kv_t *values, int64_t stride, int64_t width) {
    static const kv_t none[MAX_HEAD_DIM];
    const kv_t *rows[STEP];
    const int64_t group = view->group, all = view->path ? view->plain / STEP : BLOCK / STEP;
    int64_t common = 0, most = 0;
    for (int64_t i = 0; i < view->nodes; i++) {
        if (view->count[i] > most) most = view->count[i];
        if (!view->count[i]) memset(w->share[i * group], 0, group * sizeof w->share[0]);
    }
    for (; common < all && common * STEP < most; common++) {
        for (int64_t j = 0; j < STEP; j++) {
            const int64_t at = common * STEP + j;
            rows[j] = at < view->plain ? values + (view->begin + at) * stride : none;
        }
        opened(rows, 0, LANES, width, view->plain == BLOCK ? view->ahead : 0, w->pairs + common * STEP * width);
    }
    const int64_t few = view->nodes == 1 && group <= LANES;
    for (int64_t s = 0; s < common && few; s++)
        added_few(w->share[0] + s * STEP, BLOCK, w->pairs + s * STEP * width, width, w->out[0]);
    for (int64_t m = view->left * group / LANES * LANES; m < view->right * group && common && !few; m += LANES)
        added(w->share[m], BLOCK, w->pairs, common, width, w->out[m]);
    if (common * STEP < most) memset(w->alone, 0, sizeof w->alone); /* rows behind a node's own */
    for (int64_t begin = common * STEP; begin < most; begin += STEP) {
        const int64_t plain = view->plain > begin ? view->plain - begin : 0, end = most - begin < STEP ? most - begin : STEP;
        int64_t own = 0; /* pairs before it are the same for all nodes, and opened once */
        for (int64_t i = view->left; i < view->right; i++) {
            if (view->count[i] <= begin) continue;
            for (int64_t j = 0; j < STEP; j++)
                rows[j] = begin + j < view->count[i] ? values + slot_of(view, i, begin + j) * stride : none;
            opened(rows, own, own ? (end + 1) / 2 : LANES, width, 0, w->pairs);
            own = plain / 2;
            for (int64_t q = i * group; q < (i + 1) * group; q += LANES) {
                for (int64_t r = 0; r < group && r < LANES; r++) {
                    const __m512i found = _mm512_load_si512(w->share[q + r < QUERIES ? q + r : 0] + begin);
                    _mm512_store_si512(w->alone[r], q + r < (i + 1) * group ? found : _mm512_setzero_si512());
                }
                added_few(w->alone[0], STEP, w->pairs, width, w->out[q]);
            }
        }
    }
}

#else

/* The values of a block's keys `from` .. `count`, weighed and added in this order. */
static void gathered(
    Work *w, int64_t first, int64_t last, const kv_t *values, const int64_t *at, int64_t from, int64_t count,
    int64_t width, int64_t ahead
) {
#define GATHER(rows, parts)                                                                                   \
    for (; d + parts * LANES <= width; d += parts * LANES) {                                                  \
        vector sum[rows * parts];                                                                             \
        for (int i = 0; i < rows; i++)                                                                        \
            for (int p = 0; p < parts; p++) sum[i * parts + p] = LOAD(w->out[q + i] + d + p * LANES);         \
        for (int64_t j = from; j < count; j++) {                                                              \
            const kv_t *value = values + at[j] + d;                                                           \
            vector weight[rows];                                                                              \
            for (int i = 0; i < rows; i++) weight[i] = PINNED(ALL(w->score[q + i][j]));                       \
            for (int p = 0; p < parts && ahead; p += LINE / (int)sizeof(kv_t) / LANES)                        \
                _mm_prefetch((const char *)(value + ahead + p * LANES), _MM_HINT_T1);                         \
            for (int p = 0; p < parts; p++) {                                                                 \
                const vector part = PINNED(HELD(value + p * LANES));                                          \
                for (int i = 0; i < rows; i++) sum[i * parts + p] = FMA(weight[i], part, sum[i * parts + p]); \
            }                                                                                                 \
        }                                                                                                     \
        for (int i = 0; i < rows; i++)                                                                        \
            for (int p = 0; p < parts; p++) STORE(w->out[q + i] + d + p * LANES, sum[i * parts + p]);         \
    }
#define GATHERS(rows)                       \
    for (; q + rows <= last; q += rows) {   \
        int64_t d = 0;                      \
        GATHER(rows, 4)                     \
        GATHER(rows, 1)                     \
        ahead = 0;                          \
    }
    int64_t q = first;
    if (from >= count) return;
#if LANES == 16
    GATHERS(4)
#endif
    GATHERS(3)
    GATHERS(1)
#undef GATHERS
#undef GATHER
}

/* Keys that all nodes see are read once for all of them. */
static void valued(Work *w, const View *view, const kv_t *values, int64_t stride, int64_t width) {
    const int64_t group = view->group;
    int64_t at[BLOCK], low = 0, high = view->plain, seeing = 0; /* all who look here see `low` .. `high` */
    for (int64_t i = view->left; i < view->right; i++) {
        if (!view->count[i]) continue;
        seeing++;
        low = view->from[i] > low ? view->from[i] : low;
        high = view->count[i] < high ? view->count[i] : high;
    }
    if (seeing < view->right - view->left || high < low) low = high = 0;
    for (int64_t j = 0; j < view->plain; j++) at[j] = (view->begin + j) * stride;
    for (int64_t i = view->left; i < view->right; i++)
        if (view->count[i]) gathered(w, i * group, (i + 1) * group, values, at, view->from[i], low, width, 0);
    gathered(w, view->left * group, view->right * group, values, at, low, high, width, view->ahead);
    for (int64_t i = view->left; i < view->right; i++) {
        for (int64_t j = view->plain; j < view->count[i]; j++) at[j] = slot_of(view, i, j) * stride;
        const int64_t from = high > view->from[i] ? high : view->from[i];
        gathered(w, i * group, (i + 1) * group, values, at, from, view->count[i], width, 0);
    }
}

#endif
