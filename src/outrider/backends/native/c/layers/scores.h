/* Attention scores: products of queries and keys. Each is summed along its query and its key alone. */

#ifndef OUTRIDER_SCORES_H
#define OUTRIDER_SCORES_H

#include "../gemm/matmul.h"

#define BLOCK 64 /* positions that are attended to at a time */
#ifdef AMX
#define QUERIES 64 /* at a time, over which keys and values are read once */
#else
#define QUERIES 32
#endif

/* What a thread works in. */
typedef struct {
#ifdef AMX
    float tile[LANES * LANES] __attribute__((aligned(64)));
    kv_t last[LANES * MAX_HEAD_DIM]
        __attribute__((aligned(64)));  /* the last keys of a block, and copies of the last one */
    kv_t pairs[BLOCK * MAX_HEAD_DIM]
        __attribute__((aligned(64))); /* a block's values: [step, tile, pair, element, of the pair] */
    act_t share[QUERIES][BLOCK] __attribute__((aligned(64)));      /* weights of the values */
    act_t alone[LANES][MAC_WIDTH] __attribute__((aligned(64)));    /* of one node's queries */
#else
    float keys[MAX_HEAD_DIM / PACKED * BLOCK]
        __attribute__((aligned(64))); /* a block's keys, transposed: [unit, key] */
#endif
    act_t queries[QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64)));
    act_t packed[QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float score[QUERIES][BLOCK];
    float branch[QUERIES][BLOCK]; /* of drafted nodes, by slot */
    float most[QUERIES];          /* the largest score so far */
    float sum[QUERIES][LANES];    /* of the exponentials, in lanes */
    float out[QUERIES + LANES][MAX_HEAD_DIM]; /* of the weighted values; and memory after them */
} AttentionWork;

/* How scores are made of products, and what they are beside. */
typedef struct {
    float scale, cap;   /* as in `Model` */
    int64_t window;     /* as in `Layer` */
    const float *sinks; /* the same */
} Scoring;

/* What several nodes see of a block of positions. */
typedef struct {
    int64_t nodes, group;                  /* queries of a node that share a key head: `group` */
    int64_t left, right;                   /* the nodes that see something of the block lie between these */
    int64_t begin, plain;                  /* its first position; positions that are their own slots */
    int64_t from[QUERIES], count[QUERIES]; /* each node sees these, counted from `begin`; nothing: 0 and 0 */
    int64_t known, depth;                  /* `path`: [node, depth], the slots from `known` on, counted from there */
    const int32_t *path;
    int64_t ahead; /* elements from what is read to what is prefetched; 0: nothing is */
} BlockView;

/* The slot of position j of the block, for a node. */
INLINE int64_t slot_of(const BlockView *view, int64_t node, int64_t j) {
    return j < view->plain ? view->begin + j
                           : view->known + view->path[node * view->depth + view->begin + j - view->known];
}

#ifdef AMX

/* Queries as tiles read them. Behind a single one zeros are written, so that all have one shape
   (`begin_product(2)`). */
static const act_t *pack_queries(act_t *query, int64_t rows, int64_t width, act_t *buffer) {
    if (rows == 1) memset(query + width, 0, width * sizeof(act_t));
    return pack_acts(query, rows > 1 ? rows : 2, width, buffer);
}

/* Scores of the queries `first` .. `last` - 1 with `count` keys, at most BLOCK, which lie `stride` elements apart:
   sixteen with sixteen. `ahead`: as in `BlockView`. */
static void attention_scores(
    AttentionWork *w, const act_t *query, int64_t first, int64_t last, const kv_t *keys, int64_t stride, int64_t count,
    int64_t width, float scale, int64_t ahead, float score[][BLOCK]
) {
    for (int64_t j = 0; j < count; j += LANES) {
        const kv_t *from = keys + j * stride;
        int64_t apart = stride;
        for (int64_t i = 0; i < LANES && ahead; i++)
            for (int64_t k = 0; k < width; k += CACHE_LINE / (int64_t)sizeof(kv_t))
                prefetch_far(from + i * stride + k + ahead);
        if (j + LANES > count) { /* after the last one there may be no memory */
            for (int64_t i = 0; i < LANES; i++)
                memcpy(w->last + i * width, from + (j + i < count ? i : count - 1 - j) * stride, width * sizeof(kv_t));
            from = w->last;
            apart = width;
        }
        tile_fence();
        for (int64_t m = first / LANES * LANES; m < last; m += LANES) {
            vec_t columns[LANES];
            tile_zero(0);
            for (int64_t k = 0; k < width; k += MAC_WIDTH) {
                tile_load(4, from + k, apart * sizeof(kv_t));
                tile_load(5, query + m * width + k * LANES, 64);
                tile_dot(0, 4, 5);
            }
            tile_store(0, w->tile, 64);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) columns[i] = v_load(w->tile + i * LANES);
            v_transpose(columns);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) v_store(w->tile + i * LANES, v_mul(columns[i], v_set1(scale)));
            for (int64_t q = m > first ? m : first; q < m + LANES && q < last; q++)
                memcpy(score[q] + j, w->tile + (q - m) * LANES, sizeof(vec_t));
        }
    }
}

#else

INLINE const act_t *pack_queries(act_t *query, int64_t rows, int64_t width, act_t *buffer) {
    (void)rows, (void)width, (void)buffer;
    return query;
}

/* Scores of the queries `first` .. `last` - 1 with `count` keys, at most BLOCK, which lie `stride` elements apart.
   `ahead`: as in `BlockView`. */
static void attention_scores(
    AttentionWork *w, const act_t *query, int64_t first, int64_t last, const kv_t *keys, int64_t stride, int64_t count,
    int64_t width, float scale, int64_t ahead, float score[][BLOCK]
) {
    const int64_t units = width / PACKED;
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t u = 0; u < units; u += LANES) {
            vec_t part[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const kv_t *key = keys + (j + i < count ? j + i : count - 1) * stride + u * PACKED;
                part[i] = v_load_packed(key);
                if (ahead && u * PACKED * (int64_t)sizeof(kv_t) % CACHE_LINE == 0) prefetch_far(key + ahead);
            }
            v_transpose(part);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) v_store(w->keys + (u + i) * BLOCK + j, part[i]);
        }
#define SCORES(rows, parts)                                                                                            \
    for (; q + rows <= last; q += rows)                                                                                \
        for (int64_t j = 0; j < count; j += parts * LANES) {                                                           \
            vec_t sum[rows * parts];                                                                                   \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows * parts; i++) sum[i] = v_zero();                         \
            for (int64_t u = 0; u < units; u++) {                                                                      \
                mac_t acts[rows];                                                                                      \
                _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)                                                 \
                    acts[i] = IN_REGISTER(mac_repeat(query + (q + i) * width + u * PACKED));                           \
                _Pragma("GCC unroll 4") for (int p = 0; p < parts; p++) {                                              \
                    const mac_t key = IN_REGISTER((mac_t)v_load(w->keys + u * BLOCK + j + p * LANES));                 \
                    _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)                                             \
                        sum[i * parts + p] = mac(sum[i * parts + p], acts[i], key);                                    \
                }                                                                                                      \
            }                                                                                                          \
            __asm__("" : "+m"(scale)); /* no register holds it in the loop */                                          \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows * parts; i++)                                            \
                v_store(score[q + i / parts] + j + i % parts * LANES, v_mul(sum[i], v_set1(scale)));                   \
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

#endif
