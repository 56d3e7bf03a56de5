/* A tree of EAGLE-2's kind (core/growth.py has the same in tensors) in one call: feed the pairs of committed text that
   wait; rank the candidates below the last layer, feed the best of them to the network, and so on; then keep the nodes
   that pay. */

/* The k largest of n numbers, in falling order; of equals the first. Returns how many there are. */
static integer largest(const float *x, integer n, integer k, integer *ids, float *values) {
    integer count = 0;
    if (k < 1) return 0;
    for (integer i = 0; i < n; i += LANES) {
        if (count == k && i + LANES <= n && !ABOVE(LOAD(x + i), ALL(values[k - 1]))) continue;
        for (integer j = i; j < n && j < i + LANES; j++) {
            if (!(count < k ? x[j] > -INFINITY : x[j] > values[k - 1])) continue;
            integer at = count < k ? count++ : k - 1;
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
static float log_sum(const float *x, integer n, float scale, float most) {
    vector sums = ZERO;
    float rest[LANES];
    for (integer i = 0; i < n; i += LANES) {
        for (integer j = 0; j < LANES; j++) rest[j] = i + j < n ? x[i + j] : -INFINITY;
        sums = ADD(sums, exponential(DIV(SUB(i + LANES <= n ? LOAD(x + i) : LOAD(rest), ALL(most)), ALL(scale))));
    }
    return most / scale + logf(sum_of(sums));
}

/* The columns of the candidates below one node, best first, and the logs of their confidences. `item`: whose part of the
   workspace is used. */
static void rank(
    const Draft *draft, const float *logits, integer item, integer columns, integer row, integer layer, integer *chosen,
    float *confidences
) {
    integer *pool = draft->top_columns + item * (draft->pool + draft->most), *found = pool + draft->pool, count, n = columns;
    float *values = draft->top_values + item * (draft->pool + draft->most), *tops = values + draft->pool;
    float *raced = draft->raced + item * draft->pool;
    EXPECT(draft->most > 0 && draft->most <= columns && draft->pool >= draft->most && draft->pool <= columns);
    EXPECT(draft->scale > 0);
    const integer *names = NULL, *ids = draft->names;
    const float *x = logits;
    if (draft->seeds) {
        const uint64_t key = key_of(draft->seeds[row], draft->starts[row] + layer + 1);
        if (draft->pool < columns) {
            n = largest(logits, columns, draft->pool, pool, values);
            names = pool;
        }
        for (integer i = 0; i < n; i++) {
            const integer column = names ? names[i] : i;
            raced[i] = logits[column] + draft->temperature[row] * noise(draft->knots, draft->slopes, key, ids ? ids[column] : column);
        }
        x = raced;
    }
    count = largest(x, n, draft->most, found, tops);
    const float total = count ? log_sum(x, n, draft->scale, tops[0]) : 0;
    for (integer i = 0; i < draft->most; i++) {
        chosen[i] = i < count ? (names ? names[found[i]] : found[i]) : 0;
        const float confidence = i < count ? tops[i] / draft->scale - total : -INFINITY;
        confidences[i] = confidence < 0 ? confidence : confidence >= 0 ? 0.0f : -INFINITY; /* also where it is no number */
    }
}

/* How many of these gains are worth their time, one after the other. */
static integer worth(const Draft *draft, integer rows, const double *gains, integer count) {
    double tokens = (double)rows, best = tokens / draft->seconds[0];
    integer found = 0;
    for (integer i = 0; i < count && i + 1 < draft->sizes; i++) {
        tokens += draft->trust * gains[i];
        if (tokens / draft->seconds[i + 1] > best) {
            best = tokens / draft->seconds[i + 1];
            found = i + 1;
        }
    }
    return found;
}

/* The tree of the most valuable candidates: as many as pay, over all rows. */
static void keep(Draft *draft, integer rows, integer candidates) {
    const integer most = draft->nodes < candidates ? draft->nodes : candidates;
    integer limit = most, *new = draft->renamed, count = 0, *order = draft->order;
    float *all = draft->all, *sorted = draft->sorted, *tops = draft->tops, least = -INFINITY;
    double *gains = draft->gains;
    EXPECT(most > 0 && candidates <= draft->candidates);
    memset(gains, 0, rows * most * sizeof *gains);
    for (integer r = 0; r < rows; r++) {
        integer *chosen = draft->chosen + r * draft->candidates;
        draft->size[r] = largest(draft->value + r * draft->candidates, candidates, most, chosen, tops);
        for (integer i = 1; i < draft->size[r]; i++) {
            all[count++] = tops[i];
            if (!draft->summed) gains[i - 1] += exp((double)tops[i]);
        }
    }
    if (draft->sizes && draft->summed) {
        count = largest(all, count, count < draft->sizes ? count : draft->sizes, order, sorted);
        for (integer i = 0; i < count; i++) gains[i] = exp((double)sorted[i]);
        const integer found = worth(draft, rows, gains, count);
        least = found ? sorted[found - 1] : INFINITY;
    } else if (draft->sizes)
        limit = 1 + worth(draft, rows, gains, most - 1);
    draft->kept = 1;
    for (integer r = 0; r < rows; r++) {
        const integer *chosen = draft->chosen + r * draft->candidates;
        const float *value = draft->value + r * draft->candidates;
        integer count = draft->size[r] < limit ? draft->size[r] : limit;
        while (count > 1 && !(value[chosen[count - 1]] > draft->floor && value[chosen[count - 1]] >= least)) count--;
        draft->size[r] = count;
        if (count > draft->kept) draft->kept = count;
    }
    const integer n = draft->kept;
    memset(draft->sees, 0, rows * n * n);
    for (integer r = 0; r < rows; r++) {
        const integer at = r * draft->candidates, to = r * n;
        uint8_t *sees = draft->sees + to * n;
        for (integer i = 0; i < candidates; i++) new[i] = 0;
        for (integer i = 0; i < draft->size[r]; i++) new[draft->chosen[at + i]] = 1;
        for (integer i = 0, count = 0; i < candidates; i++) {
            if (!new[i]) continue;
            const integer up = i ? new[draft->below[at + i]] : 0; /* parents come first */
            draft->tokens[to + count] = draft->token[at + i];
            draft->parents[to + count] = up;
            draft->depths[to + count] = draft->level[at + i];
            draft->values[to + count] = draft->value[at + i];
            if (draft->where) draft->where[to + count] = !i ? 0 : draft->fed[at + i] < 0 ? -1 : 1 + draft->fed[at + i];
            memcpy(sees + count * n, sees + up * n, n);
            sees[count * n + count] = sees[count * n] = 1;
            new[i] = count++;
        }
        for (integer i = draft->size[r]; i < n; i++) {
            draft->tokens[to + i] = draft->parents[to + i] = draft->depths[to + i] = 0;
            draft->values[to + i] = -INFINITY;
            if (draft->where) draft->where[to + i] = -1;
            sees[i * n + i] = sees[i * n] = 1;
        }
    }
}

/* The first candidate of every row is its root. */
static void rooted(Draft *draft, integer rows) {
    for (integer r = 0; r < rows; r++) {
        const integer at = r * draft->candidates;
        draft->token[at] = draft->root[r];
        draft->value[at] = 0;
        draft->below[at] = draft->level[at] = 0;
    }
}

/* The candidates `first` .. of every row, below the `wide` nodes that were fed last: those from `above` on. */
static void rank_all(
    const Model *head, const Pass *pass, Draft *draft, integer above, integer wide, integer layer, integer first
) {
    const integer columns = head->vocabulary;
#pragma omp parallel for num_threads(hands(pass->threads)) schedule(dynamic, 1)
    for (integer item = 0; item < pass->rows * wide; item++) {
        const integer r = item / wide, i = item % wide;
        const integer at = r * draft->candidates, to = at + first + i * draft->most;
        const integer up = layer ? draft->place[r * (draft->depth - 1) * draft->width + above + i] : 0;
        if (up < 0) { /* the row has fewer nodes */
            for (integer k = to; k < to + draft->most; k++) {
                draft->value[k] = -INFINITY;
                draft->token[k] = draft->below[k] = 0;
                draft->level[k] = layer + 1;
                draft->fed[k] = -1;
            }
            continue;
        }
        rank(
            draft, pass->logits + item * columns, item, columns, r, layer,
            draft->token + to, draft->value + to
        );
        for (integer k = to; k < to + draft->most; k++) {
            if (draft->names) draft->token[k] = draft->names[draft->token[k]];
            draft->value[k] += draft->value[at + up];
            draft->below[k] = up;
            draft->level[k] = layer + 1;
            draft->fed[k] = -1;
        }
    }
}

/* Choose the best of `count` candidates from `first` on that lie above the floor, in every row, to be fed next as places
   `before` .. `ends` - 1 of each. Returns the largest number; 0 where none is worth a step. */
static integer choose(Draft *draft, integer rows, integer before, integer first, integer count, integer *ends) {
    const integer wide = draft->width < count ? draft->width : count;
    float *tops = draft->tops, best = -INFINITY;
    integer worth = 0;
    for (integer r = 0; r < rows; r++) {
        integer *chosen = draft->chosen + r * draft->candidates;
        const float *values = draft->value + r * draft->candidates + first;
        integer found = largest(values, count, wide, chosen, tops), good = 0;
        if (found && tops[0] > best) best = tops[0];
        for (integer i = 0; i < found; i++) good += tops[i] > draft->floor;
        if (good > worth) worth = good;
        ends[r] = before + good;
        integer *place = draft->place + r * (draft->depth - 1) * draft->width + before;
        for (integer i = 0; i < wide; i++) place[i] = i < good ? first + chosen[i] : -1;
    }
    if (best < draft->reach) return 0;
    for (integer r = 0; r < rows; r++)
        for (integer i = 0; i < worth; i++) {
            const integer node = draft->place[r * (draft->depth - 1) * draft->width + before + i];
            if (node >= 0) draft->fed[r * draft->candidates + node] = before + i;
        }
    return worth;
}

/* Feed the nodes of places `before` .. `before + now` - 1, of each row up to `ends`: their tokens, each with the vector
   of the node above. */
static void feed(const Model *step, Pass *pass, Draft *draft, integer before, integer now, const integer *ends) {
    const integer hidden = step->hidden, all = before + now, most = (draft->depth - 1) * draft->width;
    float *to = (float *)pass->given;
    for (integer r = 0; r < pass->rows; r++) {
        const integer at = r * draft->candidates;
        uint8_t *sees = draft->ancestors + r * all * all;
        memset(sees, 0, all * all);
        for (integer i = 0; i < all; i++) {
            const integer place = draft->place[r * most + i], node = place < 0 ? 0 : place, up = draft->below[at + node];
            if (up) memcpy(sees + i * all, sees + draft->fed[at + up] * all, all);
            sees[i * all + i] = 1;
            draft->spots[r * all + i] = pass->lengths[r] + (place < 0 ? 0 : draft->level[at + node] - 1);
            if (i < before || place < 0) continue;
            EXPECT(draft->token[at + node] >= 0 && draft->token[at + node] < draft->entries);
            const held *embedding = draft->embeddings + draft->token[at + node] * hidden;
            const float *above = up ? draft->vectors + (r * most + draft->fed[at + up]) * hidden : draft->last + r * hidden;
            for (integer k = 0; k < hidden; k += LANES) STORE(to + k, HELD(embedding + k));
            memcpy(to + hidden, above, hidden * sizeof(float));
            to += 2 * hidden;
        }
    }
    pass->nodes = pass->asked = now;
    pass->sizes = ends;
    pass->since = before;
    pass->all = all;
    pass->taps = 1;
    pass->spots = draft->spots;
    pass->ancestors = draft->ancestors;
    forward(step, pass);
    pass->sizes = NULL;
    for (integer i = 0; i < pass->rows * now; i++)
        memcpy(
            draft->vectors + (i / now * most + before + i % now) * hidden, pass->tapped + i * hidden,
            hidden * sizeof(float)
        );
}

/* Draft for every row. `pass` is that of a step, with room for as many nodes as any has; `head`: the head alone. */
void draft(const Model *step, const Model *head, Pass *pass, Draft *draft) {
    const integer rows = pass->rows;
    integer above = 0, wide = 1, before = 0, candidates = 1, *ends = draft->ends;
    pass->lengths = draft->lengths;
    if (draft->waits) read_pairs(step, pass, draft);
    if (!draft->depth) return;
    rooted(draft, rows);
    memcpy(pass->states, draft->last, rows * step->hidden * sizeof(float));
    pass->nodes = pass->all = pass->asked = 1;
    pass->since = pass->taps = 0;
    pass->ancestors = NULL;
    forward(head, pass);
    for (integer layer = 0; layer < draft->depth; layer++) {
        const integer first = candidates;
        rank_all(head, pass, draft, above, wide, layer, first);
        candidates += wide * draft->most;
        if (layer + 1 == draft->depth) break;
        above = before;
        wide = choose(draft, rows, before, first, candidates - first, ends);
        if (!wide) break;
        feed(step, pass, draft, above, wide, ends);
        before += wide;
    }
    keep(draft, rows, candidates);
}
