/* Attention of tree nodes, summed by absolute position in blocks of BLOCK, so that a node's result depends on the keys
   of its own path alone: not on the slots they lie in, nor on what else was drafted. */

#ifndef OUTRIDER_ATTENTION_H
#define OUTRIDER_ATTENTION_H

#include "scores.h"
#include "values.h"

/* Scores of a block that belong to drafted nodes, whose slots begin at `view->known`: all are computed once, and the
   queries of a node take those of its own path. */
static void tree_scores(
    AttentionWork *w, const act_t *query, const BlockView *view, const kv_t *keys, int64_t stride, int64_t slots,
    int64_t width, float scale
) {
    const int64_t group = view->group;
    for (int64_t c = view->known; c < view->known + slots; c += BLOCK) {
        const int64_t rest = view->known + slots - c, count = rest < BLOCK ? rest : BLOCK;
        attention_scores(
            w, query, view->left * group, view->right * group, keys + c * stride, stride, count, width, scale, 0,
            w->branch
        );
        for (int64_t i = view->left; i < view->right; i++)
            for (int64_t j = view->plain; j < view->count[i]; j++) {
                const int64_t slot = slot_of(view, i, j) - c;
                for (int64_t q = i * group; q < (i + 1) * group && slot >= 0 && slot < count; q++)
                    w->score[q][j] = w->branch[q][slot];
            }
    }
}

/* What each node sees of the block that begins at `view->begin`, of positions up to its own and within its window. */
static void look(BlockView *view, const int64_t *positions, int64_t window) {
    view->left = view->nodes;
    view->right = 0;
    for (int64_t i = 0; i < view->nodes; i++) {
        const int64_t least = window && positions[i] >= window ? positions[i] - window + 1 - view->begin : 0;
        view->from[i] = least > 0 ? least : 0;
        view->count[i] = positions[i] + 1 - view->begin < BLOCK ? positions[i] + 1 - view->begin : BLOCK;
        if (view->count[i] <= view->from[i]) {
            view->from[i] = view->count[i] = 0;
            continue;
        }
        if (!view->right) view->left = i;
        view->right = i + 1;
    }
}

/* The nodes `first` .. `last` - 1 of one row of the batch, in heads `head` .. `beyond` - 1, which share a key head.

   query, out: [node, heads, width]; keys, values: of this row and key head, `stride` elements from slot to slot.
   known: positions that are their own slots, for all these nodes. path: [node, depth], the slots beyond `known` of each
   node's own path, counted from `known`; NULL where every slot is its position, and positions rise.

   Block by block; what all nodes see of one is read once for all of them. */
static void attend(
    AttentionWork *w, const act_t *query, act_t *out, int64_t heads, int64_t head, int64_t beyond, int64_t width,
    const kv_t *keys, const kv_t *values, int64_t stride, int64_t first, int64_t last, const int64_t *positions,
    int64_t known, const int32_t *path, int64_t depth, const Scoring *scoring
) {
    const int64_t group = beyond - head, nodes = last - first, rows = nodes * group, window = scoring->window;
    const float scale = scoring->scale;
    const int64_t common = path ? known : positions[last - 1] + 1; /* positions that are slots */
    int64_t block = positions[first], end = 0, slots = 0;
    BlockView view = {
        .nodes = nodes, .group = group, .known = known, .depth = depth, .path = path ? path + first * depth : NULL
    };
    path = view.path;
    positions += first;
    for (int64_t i = 0; i < nodes; i++) {
        memcpy(
            w->queries + i * group * width, query + ((first + i) * heads + head) * width, group * width * sizeof(act_t)
        );
        const int64_t least = window && positions[i] >= window ? positions[i] - window + 1 : 0;
        if (least < block) block = least;
        if (positions[i] > end) end = positions[i];
        for (int64_t j = common; j <= positions[i]; j++)
            if (path[i * depth + j - known] >= slots) slots = path[i * depth + j - known] + 1;
    }
    const act_t *packed = pack_queries(w->queries, rows, width, w->packed);
    for (int64_t q = 0; q < rows; q++) {
        w->most[q] = -1e30f; /* finite: less than any score, and no difference of infinities */
        memset(w->sum[q], 0, sizeof w->sum[q]);
        if (scoring->sinks) {
            w->most[q] = scoring->sinks[head + q % group];
            w->sum[q][0] = 1.0f;
        }
        memset(w->out[q], 0, width * sizeof(float));
    }
    for (block /= BLOCK; block * BLOCK <= end; block++) {
        const int64_t begin = block * BLOCK, rest = common - begin;
        view.begin = begin;
        view.plain = rest < 0 ? 0 : rest < BLOCK ? rest : BLOCK;
        view.ahead = begin + BLOCK < common ? BLOCK * stride : 0;
        look(&view, positions, window);
        attention_scores(
            w, packed, view.left * group, view.right * group, keys + begin * stride, stride, view.plain, width, scale,
            view.ahead, w->score
        );
        if (begin + BLOCK > common) tree_scores(w, packed, &view, keys, stride, slots, width, scale);
        for (int64_t q = view.left * group; q < view.right * group && scoring->cap; q++)
            scale_and_cap(w->score[q], BLOCK, 0, scoring->cap);
        for (int64_t i = view.left; i < view.right; i++)
            if (view.count[i]) softmax_update(w, i * group, (i + 1) * group, view.from[i], view.count[i], width);
        attend_values(w, &view, values, stride, width);
    }
    for (int64_t q = 0; q < rows; q++) {
        const float sum = v_sum(v_load(w->sum[q]));
        act_t *to = out + ((first + q / group) * heads + head + q % group) * width;
        for (int64_t d = 0; d < width; d += LANES) store_acts(to + d, v_div(v_load(w->out[q] + d), v_set1(sum)));
    }
}

#endif
