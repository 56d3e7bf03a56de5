/* Block drafters (nets/block.py and drafters/_lattice.py have the same in tensors) in one call: read the features of the
   positions that wait into the context's keys and values; one pass over a causal block of slots; then the best nodes of
   the lattice of the slots' candidates. */

typedef struct {
    const Model *model;
    const Lattice *block;
    const Pass *pass;
    const Draft *draft;
    int64_t count; /* positions that wait */
} Context;

static void read_context_task(const Team *team, const void *call) {
    const Context *of = call;
    const Model *model = of->model;
    const Lattice *block = of->block;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    const int64_t hidden = model->hidden, joined = block->taps * hidden, count = of->count;
    const int64_t first = own_first(team, count), last = own_last(team, count);
    collected(pass, draft->features, hidden, first * block->taps, last * block->taps);
    meet(team);
    product(pass->normed, count, joined, block->feature_proj, NULL, hidden, pass->hidden_states, NULL, hidden, 0, team);
    meet(team);
    normed(model, pass, block->norm, first, last);
    for (int64_t m = first; m < last; m++) {
        const int64_t row = pass->real_nodes[m];
        if (m == pass->row_starts[row] + draft->pending[row] - 1)
            scaled(pass->hidden_states + m * hidden, block->norm, hidden, model->eps, draft->last_hidden + row * hidden);
    }
    meet(team);
    for (int64_t l = 0; l < model->layers; l++)
        remembered(model, pass, l, hidden, count, draft->lengths, team);
}

/* Context vectors of the positions that wait, and their keys and values. */
static void read_context(const Model *model, const Lattice *block, Pass *pass, Draft *draft) {
    const int64_t count = counted(pass, draft->pending);
    run_pass(pass, read_context_task, &(Context){model, block, pass, draft, count});
    for (int64_t r = 0; r < pass->rows; r++) draft->lengths[r] += draft->pending[r];
}

typedef struct {
    const Lattice *block;
    const Pass *pass;
    int64_t hidden, slots;
} Seeds;

/* What the last context vectors and the anchors add to the slots. */
static void add_seeds(const Team *team, const void *call) {
    const Seeds *of = call;
    const Pass *pass = of->pass;
    const int64_t reads = 2 * of->hidden, makes = of->slots * of->hidden;
    product(pass->normed, pass->rows, reads, of->block->seed, NULL, makes, pass->hidden_states, NULL, makes, 1, team);
}

/* One pass over the slots that draft, and those before them. */
static void read_block(const Model *model, const Lattice *block, Pass *pass, Draft *draft) {
    const int64_t hidden = model->hidden, slots = block->first_slot + draft->depth, rows = pass->rows;
    for (int64_t i = 0; i < rows * slots; i++) {
        const int64_t row = i / slots, slot = i % slots;
        EXPECT(draft->roots[row] >= 0 && draft->roots[row] < draft->embedding_rows);
        const kv_t *root = draft->embeddings + draft->roots[row] * hidden;
        for (int64_t k = 0; k < hidden; k += LANES)
            STORE(pass->hidden_states + i * hidden + k, slot ? LOAD(block->mask + k) : HELD(root + k));
        draft->positions[i] = draft->lengths[row] + slot;
    }
    if (block->seed.data) {
        for (int64_t i = 0; i < rows * hidden; i += LANES) { /* of each row, both side by side */
            const int64_t row = i / hidden, at = i + row * hidden;
            STORE_INPUT(pass->normed + at, LOAD(draft->last_hidden + i));
            STORE_INPUT(pass->normed + at + hidden, HELD(draft->embeddings + draft->roots[row] * hidden + i % hidden));
        }
        run_pass(pass, add_seeds, &(Seeds){block, pass, hidden, slots});
    }
    pass->nodes = pass->total_nodes = slots;
    pass->logit_count = draft->depth;
    pass->first_node = 0;
    pass->positions = draft->positions;
    pass->ancestors = NULL;
    forward(model, pass);
}

/* The candidates below a node, best first, and the logs of their confidences there: those of their slot, corrected by
   their scores with the token above; the mass of all other tokens keeps its place. */
static void open_node(const Lattice *block, const Draft *draft, int64_t row, int64_t node) {
    const int64_t most = draft->top_k, rank = block->rank, at = row * draft->max_candidates + node;
    const int64_t slot = (row * draft->depth + draft->level[at]) * most;
    float *logs = block->logs + at * most, outside = 1, total = 0;
    float *raised = draft->top_values + row * (draft->pool + most); /* of a slot's ranking, which is done */
    int64_t *order = block->order + at * most;
    for (int64_t c = 0; c < most; c++) {
        const float own = block->confidences[slot + c];
        raised[c] = own;
        if (rank) {
            const kv_t *p = block->pair_left + draft->token[at] * rank, *q = block->pair_right + block->columns[slot + c] * rank;
            vector sum = ZERO;
            for (int64_t k = 0; k < rank; k += LANES) sum = FMA(HELD(p + k), HELD(q + k), sum);
            raised[c] += sum_of(sum) / draft->scale;
            outside -= expf(own);
            total += expf(raised[c]);
        }
    }
    const float less = rank ? logf((outside > 1e-6f ? outside : 1e-6f) + total) : 0;
    for (int64_t c = 0; c < most; c++) {
        const float log = raised[c] - less;
        int64_t i = c;
        for (; i && logs[i - 1] < log; i--) {
            logs[i] = logs[i - 1];
            order[i] = order[i - 1];
        }
        logs[i] = log;
        order[i] = c;
    }
}

/* The most valuable nodes of one row, in falling order: each next one is the best child, not taken yet, of any that was
   taken. */
static void best_nodes(const Lattice *block, const Draft *draft, int64_t row) {
    const int64_t most = draft->top_k, at = row * draft->max_candidates;
    int64_t *next = block->next + at, count = 1;
    double *value = block->value + at;
    for (int64_t i = 0; i < draft->max_candidates; i++) draft->value[at + i] = -INFINITY;
    draft->token[at] = draft->roots[row];
    draft->parent[at] = draft->level[at] = 0;
    draft->value[at] = 0;
    value[0] = next[0] = 0;
    if (block->max_depths[row] > 0) open_node(block, draft, row, 0);
    while (count < draft->max_nodes) {
        double best = draft->floor;
        int64_t up = -1;
        for (int64_t i = 0; i < count; i++) {
            if (draft->level[at + i] >= block->max_depths[row] || next[i] == most) continue;
            const double found = value[i] + block->logs[(at + i) * most + next[i]];
            if (found > best || (up >= 0 && found == best && draft->level[at + i] < draft->level[at + up])) {
                best = found;
                up = i;
            }
        }
        if (up < 0) break;
        const int64_t child = block->order[(at + up) * most + next[up]++], level = draft->level[at + up];
        const int64_t column = block->columns[(row * draft->depth + level) * most + child], new = at + count;
        draft->token[new] = draft->token_ids ? draft->token_ids[column] : column;
        draft->parent[new] = up;
        draft->level[new] = level + 1;
        draft->value[new] = (float)best;
        value[count] = best;
        next[count] = 0;
        if (level + 1 < block->max_depths[row]) open_node(block, draft, row, count);
        count++;
    }
}

static void best_trees_task(const Team *team, const void *call) {
    const Context *of = call;
    const Lattice *block = of->block;
    const Draft *draft = of->draft;
    const int64_t rows = of->pass->rows, depth = draft->depth, most = draft->top_k, columns = of->model->vocab;
    for (int64_t i; (i = take(team)) < rows * depth;)
        rank(
            draft, of->pass->logits + i * columns, i, columns, i / depth, i % depth,
            block->columns + i * most, block->confidences + i * most
        );
    meet(team);
    for (int64_t r; (r = take(team)) < rows;) best_nodes(block, draft, r);
}

/* The best tree of every row, from the logits of its slots. */
static void best_trees(const Model *model, const Lattice *block, const Pass *pass, Draft *draft) {
    run_pass(pass, best_trees_task, &(Context){model, block, pass, draft, 0});
    keep(draft, pass->rows, draft->max_candidates);
}

/* Draft for every row; `depth` 0: read what waits and no more; `nodes` 0: no tree, the slots' logits alone. */
void draft_block(const Model *model, const Lattice *block, Pass *pass, Draft *draft) {
    pass->lengths = draft->lengths;
    if (draft->most_pending) read_context(model, block, pass, draft);
    if (!draft->depth) return;
    read_block(model, block, pass, draft);
    if (draft->max_nodes) best_trees(model, block, pass, draft);
}
