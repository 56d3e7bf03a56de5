/* Medusa's heads in one call (drafters/medusa.py is the tensor reference): a residual block for each, all of one
   hidden state; the LM head that they share; then the best nodes of the lattice of their candidates. */

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
static void medusa_logits(const Team *team, const void *call) {
    const Medusa *of = call;
    const Model *model = of->model;
    const MedusaHeads *heads = of->heads;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    const int64_t rows = pass->rows, depth = draft->depth, hidden = model->hidden, wide = depth * hidden;
    gather_features(pass, draft->features, hidden, own_first(team, rows), own_last(team, rows));
    meet(team);
    matmul(pass->normed, rows, hidden, heads->blocks, heads->bias, wide, heads->output, NULL, wide, 0, team);
    meet(team);
    float *row = row_scratch(team, hidden);
    for (int64_t i = own_first(team, rows * depth); i < own_last(team, rows * depth); i++) {
        const float *own = heads->output + i * hidden;
        for (int64_t k = 0; k < hidden; k += LANES)
            v_store(row + k, v_add(load_kv(draft->features[i / depth] + k), v_silu(v_load(own + k))));
        to_acts(row, hidden, pass->normed + i * hidden);
    }
    meet(team);
    matmul(
        pass->normed, rows * depth, hidden, model->head, NULL, model->vocab, pass->logits, NULL, model->vocab, 0, team
    );
    meet(team);
}

void draft_medusa(const Model *model, const MedusaHeads *heads, const Lattice *lattice, Pass *pass, Draft *draft) {
    run_pass(pass, medusa_logits, &(Medusa){model, heads, pass, draft});
    best_trees(model, lattice, pass, draft);
}

#endif
