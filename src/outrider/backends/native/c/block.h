/* Block drafters in one call (nets/block.py and drafters/_lattice.py are the tensor reference): read the features of
   the pending positions into the context's keys and values; one pass over a causal block of slots; then the best nodes
   of the lattice of the slots' candidates. */

#ifndef OUTRIDER_BLOCK_H
#define OUTRIDER_BLOCK_H

#include "growth.h"

typedef struct {
    const Model *model;
    const Lattice *lattice;
    const Pass *pass;
    const Draft *draft;
    int64_t count; /* pending positions */
} Context;

static void read_context_task(const Thread *thread, const void *call) {
    const Context *of = call;
    const Model *model = of->model;
    const Lattice *lattice = of->lattice;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    const int64_t hidden = model->hidden, joined = lattice->taps * hidden, count = of->count;
    const int64_t first = share_begin(thread, count), last = share_end(thread, count);
    gather_features(pass, draft->features, hidden, first * lattice->taps, last * lattice->taps);
    barrier(thread);
    matmul(
        pass->normed, count, joined, lattice->feature_proj, NULL, hidden, pass->hidden_states, NULL, hidden, 0, thread
    );
    barrier(thread);
    const Norm norm = {lattice->norm, NULL, RMS_NORM};
    norm_rows(pass, norm, hidden, model->eps, first, last, thread);
    for (int64_t m = first; m < last; m++) {
        const int64_t row = pass->real_nodes[m];
        if (m == pass->row_starts[row] + draft->pending[row] - 1)
            norm_or_copy(
                pass->hidden_states + m * hidden, norm, hidden, model->eps, draft->last_hidden + row * hidden
            );
    }
    barrier(thread);
    for (int64_t l = 0; l < model->layers; l++) write_pending_kv(model, pass, l, hidden, count, draft->lengths, thread);
}

/* Context vectors of the pending positions, and their keys and values. */
static void read_context(const Model *model, const Lattice *lattice, Pass *pass, Draft *draft) {
    const int64_t count = assign_rows(pass, draft->pending);
    run_pass(pass, read_context_task, &(Context){model, lattice, pass, draft, count});
    for (int64_t r = 0; r < pass->rows; r++) draft->lengths[r] += draft->pending[r];
}

typedef struct {
    const Lattice *lattice;
    const Pass *pass;
    int64_t hidden, slots;
} Seeds;

/* What the last context vectors and the anchors (the roots) add to the slots. */
static void add_seeds(const Thread *thread, const void *call) {
    const Seeds *of = call;
    const Pass *pass = of->pass;
    const int64_t reads = 2 * of->hidden, makes = of->slots * of->hidden;
    matmul(
        pass->normed, pass->rows, reads, of->lattice->seed, NULL, makes, pass->hidden_states, NULL, makes, 1, thread
    );
}

/* One pass over the slots that draft, and those before them. */
static void read_block(const Model *model, const Lattice *lattice, Pass *pass, Draft *draft) {
    const int64_t hidden = model->hidden, slots = lattice->first_slot + draft->depth, rows = pass->rows;
    for (int64_t i = 0; i < rows * slots; i++) {
        const int64_t row = i / slots, slot = i % slots;
        if (slot)
            memcpy(pass->hidden_states + i * hidden, lattice->mask, hidden * sizeof(float));
        else
            embed_token(draft, draft->roots[row], hidden, pass->hidden_states + i * hidden);
        draft->positions[i] = draft->lengths[row] + slot;
    }
    if (lattice->seed.data) {
        for (int64_t row = 0; row < rows; row++) { /* of each row, both side by side */
            act_t *both = pass->normed + 2 * row * hidden;
            to_acts(draft->last_hidden + row * hidden, hidden, both);
            to_acts(pass->hidden_states + row * slots * hidden, hidden, both + hidden);
        }
        run_pass(pass, add_seeds, &(Seeds){lattice, pass, hidden, slots});
    }
    pass->nodes = pass->total_nodes = slots;
    pass->logit_count = draft->depth;
    pass->first_node = 0;
    pass->positions = draft->positions;
    pass->ancestors = NULL;
    forward(model, pass);
}

/* The candidates below a node, best first, and the logs of their confidences there: those of their slot, corrected by
   their scores with the token above; the probability of all other tokens stays as it is. */
static void rank_children(const Lattice *lattice, const Draft *draft, int64_t row, int64_t node) {
    const int64_t most = draft->top_k, rank = lattice->rank, at = row * draft->max_candidates + node;
    const int64_t slot = (row * draft->depth + draft->level[at]) * most;
    float *logs = lattice->logs + at * most, outside = 1, total = 0;
    float *raised = draft->top_values + row * (draft->pool + most); /* free since the slots were ranked */
    int64_t *order = lattice->order + at * most;
    for (int64_t c = 0; c < most; c++) {
        const float own = lattice->confidences[slot + c];
        raised[c] = own;
        if (rank) {
            const kv_t *p = lattice->pair_left + draft->token[at] * rank,
                       *q = lattice->pair_right + lattice->columns[slot + c] * rank;
            vec_t sum = v_zero();
            for (int64_t k = 0; k < rank; k += LANES) sum = v_fma(load_kv(p + k), load_kv(q + k), sum);
            raised[c] += v_sum(sum) / draft->scale;
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
static void best_tree(const Lattice *lattice, const Draft *draft, int64_t row) {
    const int64_t most = draft->top_k, at = row * draft->max_candidates;
    int64_t *next = lattice->next + at, count = 1;
    double *value = lattice->value + at;
    for (int64_t i = 0; i < draft->max_candidates; i++) draft->value[at + i] = -INFINITY;
    draft->token[at] = draft->roots[row];
    draft->parent[at] = draft->level[at] = 0;
    draft->value[at] = 0;
    value[0] = next[0] = 0;
    if (lattice->max_depths[row] > 0) rank_children(lattice, draft, row, 0);
    while (count < draft->max_nodes) {
        double best = draft->floor;
        int64_t up = -1;
        for (int64_t i = 0; i < count; i++) {
            if (draft->level[at + i] >= lattice->max_depths[row] || next[i] == most) continue;
            const double own = value[i] + lattice->logs[(at + i) * most + next[i]];
            if (own > best || (up >= 0 && own == best && draft->level[at + i] < draft->level[at + up])) {
                best = own;
                up = i;
            }
        }
        if (up < 0) break;
        const int64_t child = lattice->order[(at + up) * most + next[up]++], level = draft->level[at + up];
        const int64_t column = lattice->columns[(row * draft->depth + level) * most + child], new = at + count;
        draft->token[new] = draft->token_ids ? draft->token_ids[column] : column;
        draft->parent[new] = up;
        draft->level[new] = level + 1;
        draft->value[new] = (float)best;
        value[count] = best;
        next[count] = 0;
        if (level + 1 < lattice->max_depths[row]) rank_children(lattice, draft, row, count);
        count++;
    }
}

static void best_trees_task(const Thread *thread, const void *call) {
    const Context *of = call;
    const Lattice *lattice = of->lattice;
    const Draft *draft = of->draft;
    const int64_t rows = of->pass->rows, depth = draft->depth, most = draft->top_k, columns = of->model->vocab;
    for (int64_t i; (i = next_item(thread)) < rows * depth;)
        rank_candidates(
            draft, of->pass->logits + i * columns, i, columns, i / depth, i % depth, lattice->columns + i * most,
            lattice->confidences + i * most
        );
    barrier(thread);
    for (int64_t r; (r = next_item(thread)) < rows;) best_tree(lattice, draft, r);
}

/* The best tree of every row, from the logits of its slots. */
static void best_trees(const Model *model, const Lattice *lattice, const Pass *pass, Draft *draft) {
    run_pass(pass, best_trees_task, &(Context){model, lattice, pass, draft, 0});
    select_nodes(draft, pass->rows, draft->max_candidates);
}

void draft_block(const Model *model, const Lattice *lattice, Pass *pass, Draft *draft) {
    pass->lengths = draft->lengths;
    if (draft->most_pending) read_context(model, lattice, pass, draft);
    if (!draft->depth) return;
    read_block(model, lattice, pass, draft);
    if (draft->max_nodes) best_trees(model, lattice, pass, draft);
}

#endif
