/* Medusa's heads (drafters/medusa.py has the same in tensors) in one call: a residual block for each, all of one vector;
   the head that they share; then the best nodes of the lattice of their candidates. */

void draft_medusa(const Model *model, const MedusaHeads *heads, const Lattice *block, Pass *pass, Draft *draft) {
    const int64_t rows = pass->rows, depth = draft->depth, hidden = model->hidden, wide = depth * hidden;
    Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
    {
        const Team team = team_at(&gate);
        collected(pass, draft->features, hidden, own_first(&team, rows), own_last(&team, rows));
        meet(&team);
        product(pass->normed, rows, hidden, heads->blocks, heads->bias, wide, heads->output, NULL, wide, 0, &team);
        meet(&team);
        for (int64_t i = own_first(&team, rows * depth); i < own_last(&team, rows * depth); i++) {
            const float *own = heads->output + i * hidden;
            float found[hidden];
            for (int64_t k = 0; k < hidden; k += LANES)
                STORE(found + k, ADD(HELD(draft->features[i / depth] + k), silu(LOAD(own + k))));
            to_inputs(found, hidden, pass->normed + i * hidden);
        }
        meet(&team);
        product(
            pass->normed, rows * depth, hidden, model->head, NULL, model->vocab, pass->logits, NULL,
            model->vocab, 0, &team
        );
        meet(&team);
    }
    best_trees(model, block, pass, draft);
}
