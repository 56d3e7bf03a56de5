/* Online softmax of a block's scores, and the values weighted by it and added in the order of their positions. Nothing
   here depends on the slots they lie in, nor on other nodes. With tiles, softmax weights are rounded to bfloat16, and
   32 positions are added at a time. What a query does not see counts zero there, so values must be finite (nothing can
   be said of a text where one is not). */

#ifndef OUTRIDER_VALUES_H
#define OUTRIDER_VALUES_H

#include <math.h>

#include "scores.h"

/* Turn the scores of a block's keys `from` .. `count` - 1 into softmax weights, relative to the largest score so far,
   and rescale what was summed before. */
static void softmax_update(AttentionWork *w, int64_t first, int64_t last, int64_t from, int64_t count, int64_t width) {
    for (int64_t q = first; q < last; q++) {
        float *score = w->score[q];
        for (int64_t j = 0; j < from; j++) score[j] = -INFINITY;
        for (int64_t j = count; j < BLOCK; j++) score[j] = -INFINITY;
        vec_t most = v_load(score);
        for (int64_t j = LANES; j < BLOCK; j += LANES) most = v_max(v_load(score + j), most);
        const float before = w->most[q], here = v_largest(most), now = here > before ? here : before;
        float decay[LANES];
        v_store(decay, v_exp(v_set1(before - now)));
        vec_t sum = v_mul(v_load(w->sum[q]), v_set1(decay[0]));
        for (int64_t j = 0; j < BLOCK; j += LANES) {
            const vec_t share = v_exp(v_sub(v_load(score + j), v_set1(now)));
#ifdef AMX
            store_acts(w->share[q] + j, share);
#else
            v_store(score + j, share);
#endif
            sum = v_add(sum, share);
        }
        v_store(w->sum[q], sum);
        w->most[q] = now;
        if (decay[0] != 1.0f)
            for (int64_t d = 0; d < width; d += LANES)
                v_store(w->out[q] + d, v_mul(v_load(w->out[q] + d), v_set1(decay[0])));
    }
}

#ifdef AMX

/* The values of 32 positions in pairs, side by side, as tiles read them: the pairs `first` .. `last` - 1. `ahead`: as
   in `BlockView`. */
static void
interleave_values(const kv_t *const *rows, int64_t first, int64_t last, int64_t width, int64_t ahead, kv_t *to) {
    for (int64_t p = first; p < last; p++)
        for (int64_t d = 0; d < width; d += MAC_WIDTH) {
            const words_t a = w_load(rows[2 * p] + d), b = w_load(rows[2 * p + 1] + d);
            if (ahead) {
                prefetch_far(rows[2 * p] + d + ahead);
                prefetch_far(rows[2 * p + 1] + d + ahead);
            }
            w_store(to + (d + p) * MAC_WIDTH, w_interleave(a, b, 0));
            w_store(to + (d + LANES + p) * MAC_WIDTH, w_interleave(a, b, 1));
        }
}

/* Sixteen queries: their weights of so many steps, which lie `apart`, times interleaved values, added to `out`. */
static void add_values(const act_t *share, int64_t apart, const kv_t *pairs, int64_t steps, int64_t width, float *out) {
    tile_fence();
    for (int64_t d = 0; d < width; d += 4 * LANES) {
        const int64_t parts = (width - d) / LANES;
        const kv_t *from = pairs + d * MAC_WIDTH;
#define PART(p)                                                                                                        \
    if (p < parts) {                                                                                                   \
        tile_load(5, from + (s * width + p * LANES) * MAC_WIDTH, 64); /* of this step */                               \
        tile_dot(p, 4, 5);                                                                                             \
    }
        tile_load(0, out + d, MAX_HEAD_DIM * sizeof(float));
        if (1 < parts) tile_load(1, out + d + LANES, MAX_HEAD_DIM * sizeof(float));
        if (2 < parts) tile_load(2, out + d + 2 * LANES, MAX_HEAD_DIM * sizeof(float));
        if (3 < parts) tile_load(3, out + d + 3 * LANES, MAX_HEAD_DIM * sizeof(float));
        for (int64_t s = 0; s < steps; s++) {
            tile_load(4, share + s * MAC_WIDTH, apart * sizeof(act_t));
            PART(0)
            PART(1)
            PART(2)
            PART(3)
        }
        tile_store(0, out + d, MAX_HEAD_DIM * sizeof(float));
        if (1 < parts) tile_store(1, out + d + LANES, MAX_HEAD_DIM * sizeof(float));
        if (2 < parts) tile_store(2, out + d + 2 * LANES, MAX_HEAD_DIM * sizeof(float));
        if (3 < parts) tile_store(3, out + d + 3 * LANES, MAX_HEAD_DIM * sizeof(float));
#undef PART
    }
}

/* A few queries, as many as `begin_product_few` was given: their weights of one step, times interleaved values. */
static void add_values_few(const act_t *share, int64_t apart, const kv_t *pairs, int64_t width, float *out) {
    tile_fence();
    tile_load(7, share, apart * sizeof(act_t));
    for (int64_t d = 0; d < width; d += LANES) {
        tile_load(6, out + d, MAX_HEAD_DIM * sizeof(float));
        tile_load(5, pairs + d * MAC_WIDTH, 64);
        tile_dot(6, 7, 5);
        tile_store(6, out + d, MAX_HEAD_DIM * sizeof(float));
    }
}

/* Of a block, steps of 32 positions: those which lie in the same slots for all nodes go together. Others go node by
   node, where what all of them share is interleaved once. What a node does not see counts nothing. */
static void attend_values(AttentionWork *w, const BlockView *view, const kv_t *values, int64_t stride, int64_t width) {
    static const kv_t none[MAX_HEAD_DIM];
    const kv_t *rows[MAC_WIDTH];
    const int64_t group = view->group, all = view->path ? view->plain / MAC_WIDTH : BLOCK / MAC_WIDTH;
    int64_t common = 0, most = 0;
    for (int64_t i = 0; i < view->nodes; i++) {
        if (view->count[i] > most) most = view->count[i];
        if (!view->count[i]) memset(w->share[i * group], 0, group * sizeof w->share[0]);
    }
    for (; common < all && common * MAC_WIDTH < most; common++) {
        for (int64_t j = 0; j < MAC_WIDTH; j++) {
            const int64_t at = common * MAC_WIDTH + j;
            rows[j] = at < view->plain ? values + (view->begin + at) * stride : none;
        }
        const int64_t ahead = view->plain == BLOCK ? view->ahead : 0;
        interleave_values(rows, 0, LANES, width, ahead, w->pairs + common * MAC_WIDTH * width);
    }
    const int64_t few = view->nodes == 1 && group <= LANES;
    for (int64_t s = 0; s < common && few; s++)
        add_values_few(w->share[0] + s * MAC_WIDTH, BLOCK, w->pairs + s * MAC_WIDTH * width, width, w->out[0]);
    for (int64_t m = view->left * group / LANES * LANES; m < view->right * group && common && !few; m += LANES)
        add_values(w->share[m], BLOCK, w->pairs, common, width, w->out[m]);
    if (common * MAC_WIDTH < most) memset(w->alone, 0, sizeof w->alone); /* rows after a node's own */
    for (int64_t begin = common * MAC_WIDTH; begin < most; begin += MAC_WIDTH) {
        const int64_t plain = view->plain > begin ? view->plain - begin : 0;
        const int64_t end = most - begin < MAC_WIDTH ? most - begin : MAC_WIDTH;
        int64_t own = 0; /* pairs before it are the same for all nodes, and interleaved once */
        for (int64_t i = view->left; i < view->right; i++) {
            if (view->count[i] <= begin) continue;
            for (int64_t j = 0; j < MAC_WIDTH; j++)
                rows[j] = begin + j < view->count[i] ? values + slot_of(view, i, begin + j) * stride : none;
            interleave_values(rows, own, own ? (end + 1) / 2 : LANES, width, 0, w->pairs);
            own = plain / 2;
            for (int64_t q = i * group; q < (i + 1) * group; q += LANES) {
                for (int64_t r = 0; r < group && r < LANES; r++) {
                    const words_t share = w_load(w->share[q + r < QUERIES ? q + r : 0] + begin);
                    w_store(w->alone[r], q + r < (i + 1) * group ? share : w_zero());
                }
                add_values_few(w->alone[0], MAC_WIDTH, w->pairs, width, w->out[q]);
            }
        }
    }
}

#else

/* The values of a block's keys `from` .. `count` - 1, weighted and added in this order. `slots`: where they lie. */
static void add_values(
    AttentionWork *w, int64_t first, int64_t last, const kv_t *values, const int64_t *slots, int64_t from,
    int64_t count, int64_t width, int64_t ahead
) {
#define PART(rows, parts)                                                                                              \
    for (; d + parts * LANES <= width; d += parts * LANES) {                                                           \
        vec_t sum[rows * parts];                                                                                       \
        for (int i = 0; i < rows; i++)                                                                                 \
            for (int p = 0; p < parts; p++) sum[i * parts + p] = v_load(w->out[q + i] + d + p * LANES);                \
        for (int64_t j = from; j < count; j++) {                                                                       \
            const kv_t *value = values + slots[j] + d;                                                                 \
            vec_t weight[rows];                                                                                        \
            for (int i = 0; i < rows; i++) weight[i] = IN_REGISTER(v_set1(w->score[q + i][j]));                        \
            for (int p = 0; p < parts && ahead; p += CACHE_LINE / (int)sizeof(kv_t) / LANES)                           \
                prefetch_far(value + ahead + p * LANES);                                                               \
            for (int p = 0; p < parts; p++) {                                                                          \
                const vec_t part = IN_REGISTER(load_kv(value + p * LANES));                                            \
                for (int i = 0; i < rows; i++) sum[i * parts + p] = v_fma(weight[i], part, sum[i * parts + p]);        \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < rows; i++)                                                                                 \
            for (int p = 0; p < parts; p++) v_store(w->out[q + i] + d + p * LANES, sum[i * parts + p]);                \
    }
#define ROWS(rows)                                                                                                     \
    for (; q + rows <= last; q += rows) {                                                                              \
        int64_t d = 0;                                                                                                 \
        PART(rows, 4)                                                                                                  \
        PART(rows, 1)                                                                                                  \
        ahead = 0;                                                                                                     \
    }
    int64_t q = first;
    if (from >= count) return;
#if LANES == 16
    ROWS(4)
#endif
    ROWS(3)
    ROWS(1)
#undef ROWS
#undef PART
}

/* Keys that all nodes see are read once for all of them. */
static void attend_values(AttentionWork *w, const BlockView *view, const kv_t *values, int64_t stride, int64_t width) {
    const int64_t group = view->group;
    int64_t slots[BLOCK], low = 0, high = view->plain, seeing = 0; /* all nodes that see any see `low` .. `high` - 1 */
    for (int64_t i = view->left; i < view->right; i++) {
        if (!view->count[i]) continue;
        seeing++;
        low = view->from[i] > low ? view->from[i] : low;
        high = view->count[i] < high ? view->count[i] : high;
    }
    if (seeing < view->right - view->left || high < low) low = high = 0;
    for (int64_t j = 0; j < view->plain; j++) slots[j] = (view->begin + j) * stride;
    for (int64_t i = view->left; i < view->right; i++)
        if (view->count[i]) add_values(w, i * group, (i + 1) * group, values, slots, view->from[i], low, width, 0);
    add_values(w, view->left * group, view->right * group, values, slots, low, high, width, view->ahead);
    for (int64_t i = view->left; i < view->right; i++) {
        for (int64_t j = view->plain; j < view->count[i]; j++) slots[j] = slot_of(view, i, j) * stride;
        const int64_t from = high > view->from[i] ? high : view->from[i];
        add_values(w, i * group, (i + 1) * group, values, slots, from, view->count[i], width, 0);
    }
}

#endif

#endif
