/* Medusa's heads in one call (drafters/_medusa.py is the tensor reference): a residual block for each, all of
   one hidden state; an LM head for each, or one that they share; then the best nodes of the lattice of their
   candidates. */

#ifndef OUTRIDER_MEDUSA_H
#define OUTRIDER_MEDUSA_H

#include "block.h"

typedef struct {
    const Model *model;
    const MedusaHeads *heads;
    const Pass *pass;
    const Draft *draft;
} Medusa;

/* The logits of all heads. */
static void medusa_logits(const Thread *thread, const void *call) {
    const Medusa *of = call;
    const Model *model = of->model;
    const MedusaHeads *heads = of->heads;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    const int64_t rows = pass->rows, depth = draft->depth, hidden = model->hidden, wide = depth * hidden,
                  vocab = model->vocab;
    gather_features(pass, draft->features, hidden, share_begin(thread, rows), share_end(thread, rows));
    barrier(thread);
    matmul(pass->normed, rows, hidden, heads->blocks, heads->bias, wide, heads->output, NULL, wide, 0, thread);
    barrier(thread);
    float *row = row_scratch(thread, hidden);
    for (int64_t i = share_begin(thread, rows * depth); i < share_end(thread, rows * depth); i++) {
        const float *own = heads->output + i * hidden;
        for (int64_t k = 0; k < hidden; k += LANES)
            v_store(row + k, v_add(load_kv(draft->features[i / depth] + k), v_silu(v_load(own + k))));
        const int64_t place = heads->lm_heads ? i % depth * rows + i / depth : i; /* the inputs of a head side by side */
        to_acts(row, hidden, pass->normed + place * hidden);
    }
    barrier(thread);
    if (!heads->lm_heads) {
        matmul(pass->normed, rows * depth, hidden, model->head, NULL, vocab, pass->logits, NULL, vocab, 0, thread);
        if (model->logit_cap) cap_logits(model, pass->logits, NULL, rows * depth, thread);
    } else
        for (int64_t k = 0; k < depth; k++) {
            const float *bias = heads->lm_head_bias ? heads->lm_head_bias + k * vocab : NULL;
            const act_t *inputs = pass->normed + k * rows * hidden;
            matmul(
                inputs, rows, hidden, heads->lm_heads[k], bias, vocab, pass->logits + k * vocab, NULL, depth * vocab, 0,
                thread
            );
        }
    barrier(thread);
}

void draft_medusa(const Model *model, const MedusaHeads *heads, const Lattice *lattice, Pass *pass, Draft *draft) {
    run_pass(pass, medusa_logits, &(Medusa){model, heads, pass, draft});
    if (draft->max_nodes) best_trees(model, lattice, pass, draft);
}

#endif
