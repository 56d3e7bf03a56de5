/* Block drafters (nets/block.py and drafters/_lattice.py have the same in tensors) in one call: read the features of the
   positions that wait into the context's keys and values; one pass over a causal block of slots; then the best nodes of
   the lattice of the slots' candidates. */

typedef struct {
    Matrix join;       /* [hidden, taps * hidden]: context vectors of features, before their norm */
    Matrix seed;       /* [slots * hidden, 2 * hidden]: what the last context vector and the anchor add to each slot; or none */
    const float *norm; /* of context vectors */
    const float *mask; /* what stands in the slots behind the first */
    integer taps;      /* features of a position, of `hidden` numbers each, in Draft's `features` */
    integer first;     /* the slot that drafts the first token */
    integer rank;      /* of pairs' scores; 0: there are none */
    const held *above, *beneath; /* [tokens, rank] and [columns, rank] */
    const integer *deepest;      /* [rows]: how deep each row may go */
    integer *columns;            /* room: [rows, depth, most], the slots' candidates */
    float *confidences;          /* room: the same */
    float *logs;                 /* room: [rows, candidates, most], of the candidates below a node, best first */
    integer *order;              /* room: the same; which candidates these are */
    integer *next;               /* room: [rows, candidates]: by node, how many of its children were taken */
    double *value;               /* room: the same: the log of the product of confidences */
} Block;

/* Context vectors of the positions that wait, and their keys and values. */
static void read_context(const Model *model, const Block *block, Pass *pass, Draft *draft) {
    const integer hidden = model->hidden, joined = block->taps * hidden;
    const integer count = counted(pass, draft->waiting);
    Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
    {
        const Team team = team_at(&gate);
        const integer first = own_first(&team, count), last = own_last(&team, count);
        collected(pass, draft->features, hidden, first * block->taps, last * block->taps);
        meet(&team);
        product(pass->normed, count, joined, block->join, NULL, hidden, pass->states, NULL, hidden, 0, &team);
        meet(&team);
        normed(model, pass, block->norm, first, last);
        for (integer m = first; m < last; m++) {
            const integer row = pass->live[m];
            if (m == pass->starts[row] + draft->waiting[row] - 1)
                scaled(pass->states + m * hidden, block->norm, hidden, model->epsilon, draft->last + row * hidden);
        }
        meet(&team);
        for (integer l = 0; l < model->layers; l++)
            remembered(model, pass, l, hidden, count, draft->lengths, &team);
    }
    for (integer r = 0; r < pass->rows; r++) draft->lengths[r] += draft->waiting[r];
}

/* One pass over the slots that draft, and those before them. */
static void read_block(const Model *model, const Block *block, Pass *pass, Draft *draft) {
    const integer hidden = model->hidden, slots = block->first + draft->depth, rows = pass->rows;
    for (integer i = 0; i < rows * slots; i++) {
        const integer row = i / slots, slot = i % slots;
        EXPECT(draft->root[row] >= 0 && draft->root[row] < draft->entries);
        const held *root = draft->embeddings + draft->root[row] * hidden;
        for (integer k = 0; k < hidden; k += LANES)
            STORE(pass->states + i * hidden + k, slot ? LOAD(block->mask + k) : HELD(root + k));
        draft->spots[i] = draft->lengths[row] + slot;
    }
    if (block->seed.data) {
        for (integer i = 0; i < rows * hidden; i += LANES) { /* of each row, both side by side */
            const integer row = i / hidden, at = i + row * hidden;
            STORE_INPUT(pass->normed + at, LOAD(draft->last + i));
            STORE_INPUT(pass->normed + at + hidden, HELD(draft->embeddings + draft->root[row] * hidden + i % hidden));
        }
        Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
        {
            const Team team = team_at(&gate);
            product(
                pass->normed, rows, 2 * hidden, block->seed, NULL, slots * hidden, pass->states, NULL, slots * hidden, 1, &team
            );
            meet(&team);
        }
    }
    pass->nodes = pass->all = slots;
    pass->asked = draft->depth;
    pass->since = 0;
    pass->spots = draft->spots;
    pass->ancestors = NULL;
    forward(model, pass);
}

/* The candidates below a node, best first, and the logs of their confidences there: those of their slot, corrected by
   their scores with the token above; the mass of all other tokens keeps its place. */
static void open_node(const Block *block, const Draft *draft, integer row, integer node) {
    const integer most = draft->most, rank = block->rank, at = row * draft->candidates + node;
    const integer slot = (row * draft->depth + draft->level[at]) * most;
    float *logs = block->logs + at * most, outside = 1, total = 0;
    float *raised = draft->top_values + row * (draft->pool + most); /* of a slot's ranking, which is done */
    integer *order = block->order + at * most;
    for (integer c = 0; c < most; c++) {
        const float own = block->confidences[slot + c];
        raised[c] = own;
        if (rank) {
            const held *p = block->above + draft->token[at] * rank, *q = block->beneath + block->columns[slot + c] * rank;
            vector sum = ZERO;
            for (integer k = 0; k < rank; k += LANES) sum = FMA(HELD(p + k), HELD(q + k), sum);
            raised[c] += sum_of(sum) / draft->scale;
            outside -= expf(own);
            total += expf(raised[c]);
        }
    }
    const float less = rank ? logf((outside > 1e-6f ? outside : 1e-6f) + total) : 0;
    for (integer c = 0; c < most; c++) {
        const float log = raised[c] - less;
        integer i = c;
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
static void best_nodes(const Block *block, const Draft *draft, integer row) {
    const integer most = draft->most, at = row * draft->candidates;
    integer *next = block->next + at, count = 1;
    double *value = block->value + at;
    for (integer i = 0; i < draft->candidates; i++) draft->value[at + i] = -INFINITY;
    draft->token[at] = draft->root[row];
    draft->below[at] = draft->level[at] = 0;
    draft->value[at] = 0;
    value[0] = next[0] = 0;
    if (block->deepest[row] > 0) open_node(block, draft, row, 0);
    while (count < draft->nodes) {
        double best = draft->floor;
        integer up = -1;
        for (integer i = 0; i < count; i++) {
            if (draft->level[at + i] >= block->deepest[row] || next[i] == most) continue;
            const double found = value[i] + block->logs[(at + i) * most + next[i]];
            if (found > best || (up >= 0 && found == best && draft->level[at + i] < draft->level[at + up])) {
                best = found;
                up = i;
            }
        }
        if (up < 0) break;
        const integer child = block->order[(at + up) * most + next[up]++], level = draft->level[at + up];
        const integer column = block->columns[(row * draft->depth + level) * most + child], new = at + count;
        draft->token[new] = draft->names ? draft->names[column] : column;
        draft->below[new] = up;
        draft->level[new] = level + 1;
        draft->value[new] = (float)best;
        value[count] = best;
        next[count] = 0;
        if (level + 1 < block->deepest[row]) open_node(block, draft, row, count);
        count++;
    }
}

/* The best tree of every row, from the logits of its slots. */
static void best_trees(const Model *model, const Block *block, const Pass *pass, Draft *draft) {
    const integer rows = pass->rows, depth = draft->depth, most = draft->most, columns = model->vocabulary;
#pragma omp parallel num_threads(hands(pass->threads))
    {
#pragma omp for schedule(dynamic, 1)
        for (integer i = 0; i < rows * depth; i++)
            rank(
                draft, pass->logits + i * columns, i, columns, i / depth, i % depth,
                block->columns + i * most, block->confidences + i * most
            );
#pragma omp for schedule(dynamic, 1)
        for (integer r = 0; r < rows; r++) best_nodes(block, draft, r);
    }
    keep(draft, rows, draft->candidates);
}

/* Draft for every row; `depth` 0: read what waits and no more; `nodes` 0: no tree, the slots' logits alone. */
void draft_block(const Model *model, const Block *block, Pass *pass, Draft *draft) {
    pass->lengths = draft->lengths;
    if (draft->waits) read_context(model, block, pass, draft);
    if (!draft->depth) return;
    read_block(model, block, pass, draft);
    if (draft->nodes) best_trees(model, block, pass, draft);
}
