/* Medusa's heads (drafters/medusa.py has the same in tensors) in one call: a residual block for each, all of one vector;
   the head that they share; then the best nodes of the lattice of their candidates. */

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
    collected(pass, draft->features, hidden, own_first(team, rows), own_last(team, rows));
    meet(team);
    product(pass->normed, rows, hidden, heads->blocks, heads->bias, wide, heads->output, NULL, wide, 0, team);
    meet(team);
    for (int64_t i = own_first(team, rows * depth); i < own_last(team, rows * depth); i++) {
        const float *own = heads->output + i * hidden;
        float found[hidden];
        for (int64_t k = 0; k < hidden; k += LANES)
            STORE(found + k, ADD(HELD(draft->features[i / depth] + k), silu(LOAD(own + k))));
        to_inputs(found, hidden, pass->normed + i * hidden);
    }
    meet(team);
    product(
        pass->normed, rows * depth, hidden, model->head, NULL, model->vocab, pass->logits, NULL,
        model->vocab, 0, team
    );
    meet(team);
}

void draft_medusa(const Model *model, const MedusaHeads *heads, const Lattice *block, Pass *pass, Draft *draft) {
    run_pass(pass, medusa_logits, &(Medusa){model, heads, pass, draft});
    best_trees(model, block, pass, draft);
}
