/* Attention of tree nodes, summed by absolute position in blocks of BLOCK, so that a node's result depends on the keys
   of its own path alone: not on the slots they lie in, nor on what else was drafted. */

#define BLOCK 64
#define QUERIES 32 /* rows of one go, over which keys and values are read once */
#define WIDEST 256 /* numbers of a head */

typedef struct {
    float turned[WIDEST / UNIT * BLOCK] __attribute__((aligned(64))); /* a block's keys: [unit, key] */
    float score[QUERIES][BLOCK];
    float most[QUERIES];           /* of all scores so far */
    float sum[QUERIES][LANES];     /* of their exponentials, in lanes */
    float out[QUERIES][WIDEST];    /* of the values, weighed by these */
} Work;

/* Queries from row `first` to `last` go on over the `count` keys of one block, from its key `from` on; `at`: where each
   lies. */
static void over(
    Work *w, const input *query, integer first, integer last, const held *keys, const held *values,
    const integer *at, integer from, integer count, integer width, float scale
) {
    const integer units = width / UNIT;
    for (integer j = 0; j < count; j += LANES)
        for (integer u = 0; u < units; u += LANES) {
            vector part[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) part[i] = UNITS(keys + at[j + i] + u * UNIT);
            transpose(part);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) STORE(w->turned + (u + i) * BLOCK + j, part[i]);
        }
#define SCORES(rows, parts)                                                                                      \
    for (; q + rows <= last; q += rows)                                                                          \
        for (integer j = 0; j < count; j += parts * LANES) {                                                     \
            vector found[rows * parts];                                                                          \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows * parts; i++) found[i] = ZERO;                     \
            for (integer u = 0; u < units; u++)                                                                  \
                _Pragma("GCC unroll 4") for (int p = 0; p < parts; p++) {                                        \
                    const operand key = (operand)LOAD(w->turned + u * BLOCK + j + p * LANES);                    \
                    _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++) found[i * parts + p] = TIMES(         \
                        found[i * parts + p], REPEATED(query + (q + i) * width + u * UNIT), key                  \
                    );                                                                                           \
                }                                                                                                \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows * parts; i++)                                      \
                STORE(w->score[q + i / parts] + j + i % parts * LANES, MUL(found[i], ALL(scale)));               \
        }
    integer q = first;
#if LANES == 16
    SCORES(4, 4)
#endif
    SCORES(2, 2)
    SCORES(1, 2)
#undef SCORES
    for (q = first; q < last; q++) {
        float *score = w->score[q];
        for (integer j = 0; j < from; j++) score[j] = -INFINITY;
        for (integer j = count; j < BLOCK; j++) score[j] = -INFINITY;
        vector most = LOAD(score);
        for (integer j = LANES; j < BLOCK; j += LANES) most = MAX(LOAD(score + j), most);
        const float before = w->most[q], found = most_of(most), now = found > before ? found : before;
        float less[LANES];
        STORE(less, exponential(ALL(before - now)));
        vector sum = MUL(LOAD(w->sum[q]), ALL(less[0]));
        for (integer j = 0; j < BLOCK; j += LANES) {
            const vector share = exponential(SUB(LOAD(score + j), ALL(now)));
            STORE(score + j, share);
            sum = ADD(sum, share);
        }
        STORE(w->sum[q], sum);
        w->most[q] = now;
        if (less[0] != 1.0f)
            for (integer d = 0; d < width; d += LANES) STORE(w->out[q] + d, MUL(LOAD(w->out[q] + d), ALL(less[0])));
    }
#define GATHER(rows, parts)                                                                                   \
    for (; d + parts * LANES <= width; d += parts * LANES) {                                                  \
        vector sum[rows * parts];                                                                             \
        for (int i = 0; i < rows; i++)                                                                        \
            for (int p = 0; p < parts; p++) sum[i * parts + p] = LOAD(w->out[q + i] + d + p * LANES);         \
        for (integer j = from; j < count; j++) {                                                              \
            const held *value = values + at[j] + d;                                                         \
            vector part[parts];                                                                               \
            for (int p = 0; p < parts; p++) part[p] = HELD(value + p * LANES);                                \
            for (int i = 0; i < rows; i++) {                                                                  \
                const vector weight = ALL(w->score[q + i][j]);                                                \
                for (int p = 0; p < parts; p++) sum[i * parts + p] = FMA(weight, part[p], sum[i * parts + p]); \
            }                                                                                                 \
        }                                                                                                     \
        for (int i = 0; i < rows; i++)                                                                        \
            for (int p = 0; p < parts; p++) STORE(w->out[q + i] + d + p * LANES, sum[i * parts + p]);         \
    }
    q = first;
#if LANES == 16
    for (; q + 4 <= last; q += 4) {
        integer d = 0;
        GATHER(4, 4)
        GATHER(4, 1)
    }
#endif
    for (; q < last; q++) {
        integer d = 0;
        GATHER(1, 4)
        GATHER(1, 1)
    }
#undef GATHER
}

/* The nodes `first` .. `last` of one row of the batch, in heads `head` .. `beyond`, which read one key head.

   query, out: [node, head of all, width]; keys, values: of this row and key head, `stride` from slot to slot.
   known: positions whose slots are they themselves, for all these nodes. path: [node, depth], the slots beyond `known`
   of each node's own path, counted from `known`; NULL where every slot is its position. */
static void attend(
    Work *w, const input *query, input *out, integer heads, integer head, integer beyond, integer width,
    const held *keys, const held *values, integer stride, integer first, integer last, const integer *places,
    integer known, const int32_t *path, integer depth, integer window, float scale
) {
    const integer group = beyond - head, rows = (last - first) * group;
    input given[QUERIES * WIDEST] __attribute__((aligned(64)));
    integer at[BLOCK], together = path ? known : places[first] + 1;
    for (integer i = first; i < last; i++)
        memcpy(given + (i - first) * group * width, query + (i * heads + head) * width, group * width * sizeof(input));
    for (integer q = 0; q < rows; q++) {
        w->most[q] = -1e30f; /* finite: less than any score, and no difference of infinities */
        memset(w->sum[q], 0, sizeof w->sum[q]);
        memset(w->out[q], 0, width * sizeof(float));
    }
    integer block = 0;
    for (integer i = first; i < last && window; i++)
        if (places[i] >= window) together = 0; /* then nodes do not begin at one place */
    for (; (block + 1) * BLOCK <= together; block++) { /* whole blocks that all nodes see */
        for (integer j = 0; j < BLOCK; j++) {
            at[j] = (block * BLOCK + j) * stride;
            for (integer d = 0; d < width && (block + 2) * BLOCK <= together; d += LINE / (integer)sizeof(held)) {
                _mm_prefetch((const char *)(keys + at[j] + BLOCK * stride + d), _MM_HINT_T0);
                _mm_prefetch((const char *)(values + at[j] + BLOCK * stride + d), _MM_HINT_T0);
            }
        }
        over(w, given, 0, rows, keys, values, at, 0, BLOCK, width, scale);
    }
    for (integer i = first; i < last; i++) { /* the others, each node by itself */
        const integer place = places[i], least = window && place >= window ? place - window + 1 : 0;
        for (integer b = least / BLOCK > block ? least / BLOCK : block; b * BLOCK <= place; b++) {
            const integer count = place + 1 - b * BLOCK < BLOCK ? place + 1 - b * BLOCK : BLOCK;
            for (integer j = 0; j < BLOCK; j++) {
                integer slot = b * BLOCK + (j < count ? j : count - 1);
                if (path && slot >= known) slot = known + path[i * depth + slot - known];
                at[j] = slot * stride;
            }
            const integer from = least > b * BLOCK ? least - b * BLOCK : 0, q = (i - first) * group;
            over(w, given, q, q + group, keys, values, at, from, count, width, scale);
        }
    }
    for (integer q = 0; q < rows; q++) {
        const float sum = sum_of(LOAD(w->sum[q]));
        input *to = out + ((first + q / group) * heads + head + q % group) * width;
        for (integer d = 0; d < width; d++) to[d] = to_input(w->out[q][d] / sum);
    }
}
