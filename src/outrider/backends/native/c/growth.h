/* A tree of EAGLE-2's kind in one call (core/growth.py is the tensor reference): feed the pending pairs of committed
   text; rank the candidates below the last layer, feed the best of them to the network, and so on; then keep the nodes
   that pay. */

#ifndef OUTRIDER_GROWTH_H
#define OUTRIDER_GROWTH_H

#include "noise.h"
#include "pending.h"

/* The k largest of n values, in falling order; of equals the first. Returns how many there are: -infinity and NaN are
   none. */
static int64_t top_k(const float *x, int64_t n, int64_t k, int64_t *ids, float *values) {
    int64_t count = 0;
    if (k < 1) return 0;
    for (int64_t i = 0; i < n; i += LANES) {
        if (count == k && i + LANES <= n && !v_above(v_load(x + i), v_set1(values[k - 1]))) continue;
        for (int64_t j = i; j < n && j < i + LANES; j++) {
            if (!(count < k ? x[j] > -INFINITY : x[j] > values[k - 1])) continue;
            int64_t at = count < k ? count++ : k - 1;
            for (; at && values[at - 1] < x[j]; at--) {
                values[at] = values[at - 1];
                ids[at] = ids[at - 1];
            }
            values[at] = x[j];
            ids[at] = j;
        }
    }
    return count;
}

/* log of the sum of e^(x / scale). */
static float log_sum_exp(const float *x, int64_t n, float scale, float most) {
    vec_t sums = v_zero();
    float rest[LANES];
    for (int64_t i = 0; i < n; i += LANES) {
        for (int64_t j = 0; j < LANES; j++) rest[j] = i + j < n ? x[i + j] : -INFINITY;
        sums = v_add(
            sums, v_exp(v_div(v_sub(i + LANES <= n ? v_load(x + i) : v_load(rest), v_set1(most)), v_set1(scale)))
        );
    }
    return most / scale + logf(v_sum(sums));
}

/* The columns of the candidates below one node, best first, and the logs of their confidences. `item`: whose part of
   the workspace is used. */
static void rank_candidates(
    const Draft *draft, const float *logits, int64_t item, int64_t columns, int64_t row, int64_t layer, int64_t *chosen,
    float *confidences
) {
    int64_t *pool = draft->top_columns + item * (draft->pool + draft->top_k), *winners = pool + draft->pool, count,
            n = columns;
    float *values = draft->top_values + item * (draft->pool + draft->top_k), *tops = values + draft->pool;
    float *raced = draft->noisy + item * draft->pool;
    EXPECT(draft->top_k > 0 && draft->top_k <= columns && draft->pool >= draft->top_k && draft->pool <= columns);
    EXPECT(draft->scale > 0);
    const int64_t *names = NULL, *ids = draft->token_ids;
    const float *x = logits;
    if (draft->seeds) {
        const uint64_t key = key_of(draft->seeds[row], draft->start_positions[row] + layer + 1);
        if (draft->pool < columns) {
            n = top_k(logits, columns, draft->pool, pool, values);
            names = pool;
        }
        for (int64_t i = 0; i < n; i++) {
            const int64_t column = names ? names[i] : i;
            raced[i] = logits[column] +
                       draft->temperature[row] * noise(draft->knots, draft->slopes, key, ids ? ids[column] : column);
        }
        x = raced;
    }
    count = top_k(x, n, draft->top_k, winners, tops);
    const float total = count ? log_sum_exp(x, n, draft->scale, tops[0]) : 0;
    for (int64_t i = 0; i < draft->top_k; i++) {
        chosen[i] = i < count ? (names ? names[winners[i]] : winners[i]) : 0;
        const float confidence = i < count ? tops[i] / draft->scale - total : -INFINITY;
        confidences[i] = confidence < 0 ? confidence : confidence >= 0 ? 0.0f : -INFINITY; /* also where it is NaN */
    }
}

/* How many of these gains are worth their time, one after the other. */
static int64_t worthwhile(const Draft *draft, int64_t rows, const double *gains, int64_t count) {
    double tokens = (double)rows, best = tokens / draft->seconds[0];
    int64_t pays = 0;
    for (int64_t i = 0; i < count && i + 1 < draft->max_priced; i++) {
        tokens += draft->trust * gains[i];
        if (tokens / draft->seconds[i + 1] > best) {
            best = tokens / draft->seconds[i + 1];
            pays = i + 1;
        }
    }
    return pays;
}

/* The tree of the most valuable candidates: as many as pay, over all rows. */
static void select_nodes(Draft *draft, int64_t rows, int64_t candidates) {
    const int64_t most = draft->max_nodes < candidates ? draft->max_nodes : candidates;
    int64_t limit = most, *new = draft->new_index, count = 0, *order = draft->order;
    float *all = draft->all_values, *sorted = draft->sorted_values, *tops = draft->best_values, least = -INFINITY;
    double *gains = draft->gains;
    EXPECT(most > 0 && candidates <= draft->max_candidates);
    memset(gains, 0, rows * most * sizeof *gains);
    for (int64_t r = 0; r < rows; r++) {
        int64_t *chosen = draft->chosen + r * draft->max_candidates;
        draft->size[r] = top_k(draft->value + r * draft->max_candidates, candidates, most, chosen, tops);
        for (int64_t i = 1; i < draft->size[r]; i++) {
            all[count++] = tops[i];
            if (!draft->price_total) gains[i - 1] += exp((double)tops[i]);
        }
    }
    if (draft->max_priced && draft->price_total) {
        count = top_k(all, count, count < draft->max_priced ? count : draft->max_priced, order, sorted);
        for (int64_t i = 0; i < count; i++) gains[i] = exp((double)sorted[i]);
        const int64_t pays = worthwhile(draft, rows, gains, count);
        least = pays ? sorted[pays - 1] : INFINITY;
    } else if (draft->max_priced)
        limit = 1 + worthwhile(draft, rows, gains, most - 1);
    draft->widest = 1;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t *chosen = draft->chosen + r * draft->max_candidates;
        const float *value = draft->value + r * draft->max_candidates;
        int64_t count = draft->size[r] < limit ? draft->size[r] : limit;
        while (count > 1 && !(value[chosen[count - 1]] > draft->floor && value[chosen[count - 1]] >= least)) count--;
        draft->size[r] = count;
        if (count > draft->widest) draft->widest = count;
    }
    const int64_t n = draft->widest;
    memset(draft->visible, 0, rows * n * n);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = r * draft->max_candidates, to = r * n;
        uint8_t *sees = draft->visible + to * n;
        for (int64_t i = 0; i < candidates; i++) new[i] = 0;
        for (int64_t i = 0; i < draft->size[r]; i++) new[draft->chosen[at + i]] = 1;
        for (int64_t i = 0, count = 0; i < candidates; i++) {
            if (!new[i]) continue;
            const int64_t up = i ? new[draft->parent[at + i]] : 0; /* parents come first */
            draft->tokens[to + count] = draft->token[at + i];
            draft->parents[to + count] = up;
            draft->depths[to + count] = draft->level[at + i];
            draft->values[to + count] = draft->value[at + i];
            if (draft->fed_index)
                draft->fed_index[to + count] = !i ? 0 : draft->fed[at + i] < 0 ? -1 : 1 + draft->fed[at + i];
            memcpy(sees + count * n, sees + up * n, n);
            sees[count * n + count] = sees[count * n] = 1;
            new[i] = count++;
        }
        for (int64_t i = draft->size[r]; i < n; i++) {
            draft->tokens[to + i] = draft->parents[to + i] = draft->depths[to + i] = 0;
            draft->values[to + i] = -INFINITY;
            if (draft->fed_index) draft->fed_index[to + i] = -1;
            sees[i * n + i] = sees[i * n] = 1;
        }
    }
}

/* The first candidate of every row is its root. */
static void place_roots(Draft *draft, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = r * draft->max_candidates;
        draft->token[at] = draft->roots[r];
        draft->value[at] = 0;
        draft->parent[at] = draft->level[at] = 0;
    }
}

typedef struct {
    const Model *head;
    const Pass *pass;
    const Draft *draft;
    int64_t above, wide, layer, first;
} RankLayer;

static void rank_layer_task(const Thread *thread, const void *call) {
    const RankLayer *of = call;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    const int64_t above = of->above, wide = of->wide, layer = of->layer, first = of->first, columns = of->head->vocab;
    for (int64_t item; (item = next_item(thread)) < pass->rows * wide;) {
        const int64_t r = item / wide, i = item % wide;
        const int64_t at = r * draft->max_candidates, to = at + first + i * draft->top_k;
        const int64_t up = layer ? draft->fed_candidate[r * (draft->depth - 1) * draft->width + above + i] : 0;
        if (up < 0) { /* the row has fewer nodes */
            for (int64_t k = to; k < to + draft->top_k; k++) {
                draft->value[k] = -INFINITY;
                draft->token[k] = draft->parent[k] = 0;
                draft->level[k] = layer + 1;
                draft->fed[k] = -1;
            }
            continue;
        }
        rank_candidates(
            draft, pass->logits + item * columns, item, columns, r, layer, draft->token + to, draft->value + to
        );
        for (int64_t k = to; k < to + draft->top_k; k++) {
            if (draft->token_ids) draft->token[k] = draft->token_ids[draft->token[k]];
            draft->value[k] += draft->value[at + up];
            draft->parent[k] = up;
            draft->level[k] = layer + 1;
            draft->fed[k] = -1;
        }
    }
}

/* The candidates `first` .. of every row, below the `wide` nodes that were fed last: those from `above` on. */
static void rank_layer(
    const Model *head, const Pass *pass, Draft *draft, int64_t above, int64_t wide, int64_t layer, int64_t first
) {
    run_pass(pass, rank_layer_task, &(RankLayer){head, pass, draft, above, wide, layer, first});
}

/* Choose the best of `count` candidates from `first` on that lie above the floor, in every row, to be fed next as
   places `before` .. `ends` - 1 of each. Returns the largest number; 0 where none is worth a step. */
static int64_t choose_fed(Draft *draft, int64_t rows, int64_t before, int64_t first, int64_t count, int64_t *ends) {
    const int64_t wide = draft->width < count ? draft->width : count;
    float *tops = draft->best_values, best = -INFINITY;
    int64_t worth = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t *chosen = draft->chosen + r * draft->max_candidates;
        const float *values = draft->value + r * draft->max_candidates + first;
        int64_t ranked = top_k(values, count, wide, chosen, tops), good = 0;
        if (ranked && tops[0] > best) best = tops[0];
        for (int64_t i = 0; i < ranked; i++) good += tops[i] > draft->floor;
        if (good > worth) worth = good;
        ends[r] = before + good;
        int64_t *place = draft->fed_candidate + r * (draft->depth - 1) * draft->width + before;
        for (int64_t i = 0; i < wide; i++) place[i] = i < good ? first + chosen[i] : -1;
    }
    if (best < draft->reach) return 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < worth; i++) {
            const int64_t node = draft->fed_candidate[r * (draft->depth - 1) * draft->width + before + i];
            if (node >= 0) draft->fed[r * draft->max_candidates + node] = before + i;
        }
    return worth;
}

/* Feed the nodes of places `before` .. `before + now` - 1, of each row up to `ends`: their tokens, each with the vector
   of the node above. */
static void feed_layer(const Model *step, Pass *pass, Draft *draft, int64_t before, int64_t now, const int64_t *ends) {
    const int64_t hidden = step->hidden, all = before + now, most = (draft->depth - 1) * draft->width;
    float *to = (float *)pass->inputs;
    for (int64_t r = 0; r < pass->rows; r++) {
        const int64_t at = r * draft->max_candidates;
        uint8_t *sees = draft->ancestors + r * all * all;
        memset(sees, 0, all * all);
        for (int64_t i = 0; i < all; i++) {
            const int64_t place = draft->fed_candidate[r * most + i], node = place < 0 ? 0 : place,
                          up = draft->parent[at + node];
            if (up) memcpy(sees + i * all, sees + draft->fed[at + up] * all, all);
            sees[i * all + i] = 1;
            draft->positions[r * all + i] = pass->lengths[r] + (place < 0 ? 0 : draft->level[at + node] - 1);
            if (i < before || place < 0) continue;
            const float *above = up ? draft->hidden_states + (r * most + draft->fed[at + up]) * hidden
                                    : draft->last_hidden + r * hidden;
            embed_token(draft, draft->token[at + node], hidden, to);
            memcpy(to + hidden, above, hidden * sizeof(float));
            to += 2 * hidden;
        }
    }
    pass->nodes = pass->logit_count = now;
    pass->sizes = ends;
    pass->first_node = before;
    pass->total_nodes = all;
    pass->taps = 1;
    pass->positions = draft->positions;
    pass->ancestors = draft->ancestors;
    forward(step, pass);
    pass->sizes = NULL;
    for (int64_t i = 0; i < pass->rows * now; i++)
        memcpy(
            draft->hidden_states + (i / now * most + before + i % now) * hidden, pass->tapped + i * hidden,
            hidden * sizeof(float)
        );
}

/* Draft for every row. `pass`: that of the largest step; `head`: the head alone. */
void draft_tree(const Model *step, const Model *head, Pass *pass, Draft *draft) {
    const int64_t rows = pass->rows;
    int64_t above = 0, wide = 1, before = 0, candidates = 1, *ends = draft->ends;
    pass->lengths = draft->lengths;
    if (draft->most_pending) read_pairs(step, pass, draft);
    if (!draft->depth) return;
    place_roots(draft, rows);
    memcpy(pass->hidden_states, draft->last_hidden, rows * step->hidden * sizeof(float));
    pass->nodes = pass->total_nodes = pass->logit_count = 1;
    pass->first_node = pass->taps = 0;
    pass->ancestors = NULL;
    forward(head, pass);
    for (int64_t layer = 0; layer < draft->depth; layer++) {
        const int64_t first = candidates;
        rank_layer(head, pass, draft, above, wide, layer, first);
        candidates += wide * draft->top_k;
        if (layer + 1 == draft->depth) break;
        above = before;
        wide = choose_fed(draft, rows, before, first, candidates - first, ends);
        if (!wide) break;
        feed_layer(step, pass, draft, above, wide, ends);
        before += wide;
    }
    select_nodes(draft, rows, candidates);
}

#endif
