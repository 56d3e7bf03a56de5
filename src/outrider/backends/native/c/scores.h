/* What attention works with, and its scores: products of queries and keys. Each is summed along its query and its key
   alone. `scored` finds those of the queries `first` .. `last` with `count` keys, at most BLOCK of them, which lie `stride`
   numbers apart. `ahead`: so many numbers further, memory is asked for what is read next. */

#define BLOCK 64
#ifdef TILES
#define QUERIES 64 /* rows of one go, over which keys and values are read once */
#else
#define QUERIES 32
#endif

typedef struct {
#ifdef TILES
    float made[LANES * LANES] __attribute__((aligned(64)));
    kv_t last[LANES * MAX_HEAD_DIM] __attribute__((aligned(64))); /* the last keys of a block, and copies of the last one */
    kv_t pairs[BLOCK * MAX_HEAD_DIM] __attribute__((aligned(64)));  /* a block's values: [step, tile, pair, number, of the pair] */
    act_t share[QUERIES][BLOCK] __attribute__((aligned(64))); /* what each key's value counts */
    act_t alone[LANES][STEP] __attribute__((aligned(64)));    /* of one node's queries */
#else
    float turned[MAX_HEAD_DIM / UNIT * BLOCK] __attribute__((aligned(64))); /* a block's keys: [unit, key] */
#endif
    float score[QUERIES][BLOCK];
    float branch[QUERIES][BLOCK];  /* of drafted nodes, by slot */
    float most[QUERIES];           /* of all scores so far */
    float sum[QUERIES][LANES];     /* of their exponentials, in lanes */
    float out[QUERIES + LANES][MAX_HEAD_DIM]; /* of the values, weighed by these; and room behind them */
} Work;

/* What the nodes of one go see of a block of positions. */
typedef struct {
    int64_t nodes, group;                  /* of the go; queries of a node */
    int64_t left, right;                   /* the nodes that see something of it lie between these */
    int64_t begin, plain;                  /* its first position; so many of its positions are slots */
    int64_t from[QUERIES], count[QUERIES]; /* each node sees these, counted from `begin`; nothing: 0 and 0 */
    int64_t known, depth;                  /* `path`: [node, depth], the slots from `known` on, counted from there */
    const int32_t *path;
    int64_t ahead; /* so many numbers further, memory is asked for what is read next; 0: not */
} View;

/* Where position j of the block lies, for a node. */
INLINE int64_t slot_of(const View *view, int64_t node, int64_t j) {
    return j < view->plain ? view->begin + j
                           : view->known + view->path[node * view->depth + view->begin + j - view->known];
}

#ifdef TILES

/* Queries as tiles read them. Behind a single one zeros are written, so that all have one shape (`begin(2)`). */
static const act_t *asking(act_t *query, int64_t rows, int64_t width, act_t *room) {
    if (rows == 1) memset(query + width, 0, width * sizeof(act_t));
    return laid(PLAIN, query, rows > 1 ? rows : 2, width, room);
}

/* Sixteen keys at a time with sixteen queries. */
static void scored(
    Work *w, const act_t *query, int64_t first, int64_t last, const kv_t *keys, int64_t stride, int64_t count,
    int64_t width, float scale, int64_t ahead, float score[][BLOCK]
) {
    for (int64_t j = 0; j < count; j += LANES) {
        const kv_t *from = keys + j * stride;
        int64_t apart = stride;
        for (int64_t i = 0; i < LANES && ahead; i++)
            for (int64_t k = 0; k < width; k += LINE / (int64_t)sizeof(kv_t))
                _mm_prefetch((const char *)(from + i * stride + k + ahead), _MM_HINT_T1);
        if (j + LANES > count) { /* behind the last one there may be no memory */
            for (int64_t i = 0; i < LANES; i++)
                memcpy(w->last + i * width, from + (j + i < count ? i : count - 1 - j) * stride, width * sizeof(kv_t));
            from = w->last;
            apart = width;
        }
        settle();
        for (int64_t m = first / LANES * LANES; m < last; m += LANES) {
            vector found[LANES];
            _tile_zero(0);
            for (int64_t k = 0; k < width; k += STEP) {
                _tile_loadd(4, from + k, apart * sizeof(kv_t));
                _tile_loadd(5, query + m * width + k * LANES, 64);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, w->made, 64);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) found[i] = LOAD(w->made + i * LANES);
            transpose(found);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) STORE(w->made + i * LANES, MUL(found[i], ALL(scale)));
            for (int64_t q = m > first ? m : first; q < m + LANES && q < last; q++)
                memcpy(score[q] + j, w->made + (q - m) * LANES, sizeof(vector));
        }
    }
}

#else

INLINE const act_t *asking(act_t *query, int64_t rows, int64_t width, act_t *room) { return query; }

static void scored(
    Work *w, const act_t *query, int64_t first, int64_t last, const kv_t *keys, int64_t stride, int64_t count,
    int64_t width, float scale, int64_t ahead, float score[][BLOCK]
) {
    const int64_t units = width / UNIT;
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t u = 0; u < units; u += LANES) {
            vector part[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const kv_t *key = keys + (j + i < count ? j + i : count - 1) * stride + u * UNIT;
                part[i] = UNITS(key);
                if (ahead && u * UNIT * (int64_t)sizeof(kv_t) % LINE == 0)
                    _mm_prefetch((const char *)(key + ahead), _MM_HINT_T1);
            }
            transpose(part);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) STORE(w->turned + (u + i) * BLOCK + j, part[i]);
        }
#define SCORES(rows, parts)                                                                                      \
    for (; q + rows <= last; q += rows)                                                                          \
        for (int64_t j = 0; j < count; j += parts * LANES) {                                                     \
            vector found[rows * parts];                                                                          \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows * parts; i++) found[i] = ZERO;                     \
            for (int64_t u = 0; u < units; u++) {                                                                \
                operand given[rows];                                                                             \
                _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)                                           \
                    given[i] = PINNED(REPEATED(query + (q + i) * width + u * UNIT));                             \
                _Pragma("GCC unroll 4") for (int p = 0; p < parts; p++) {                                        \
                    const operand key = PINNED((operand)LOAD(w->turned + u * BLOCK + j + p * LANES));            \
                    _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)                                       \
                        found[i * parts + p] = TIMES(found[i * parts + p], given[i], key);                       \
                }                                                                                                \
            }                                                                                                    \
            __asm__("" : "+m"(scale)); /* no register holds it in the loop */                                    \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows * parts; i++)                                      \
                STORE(score[q + i / parts] + j + i % parts * LANES, MUL(found[i], ALL(scale)));                  \
        }
    int64_t q = first;
#if LANES == 16
    SCORES(4, 4)
    SCORES(3, 4)
    SCORES(2, 2)
    SCORES(1, 2)
#else
    SCORES(3, 4)
    SCORES(2, 4)
    SCORES(1, 4)
#endif
#undef SCORES
}

#endif
