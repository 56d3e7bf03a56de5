/* Medusa's heads (drafters/medusa.py has the same in tensors) in one call: a residual block for each, all of one vector;
   the head that they share; then the best nodes of the lattice of their candidates. */

typedef struct {
    Matrix blocks;     /* [heads * hidden, hidden]: every head's residual block */
    const float *bias; /* [heads * hidden] */
    float *made;       /* room: [rows, depth * hidden] */
} Heads;

void draft_heads(const Model *model, const Heads *heads, const Block *block, Pass *pass, Draft *draft) {
    const integer rows = pass->rows, depth = draft->depth, hidden = model->hidden, wide = depth * hidden;
    Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
    {
        const Team team = team_at(&gate);
        collected(pass, draft->features, hidden, own_first(&team, rows), own_last(&team, rows));
        meet(&team);
        product(pass->normed, rows, hidden, heads->blocks, heads->bias, wide, heads->made, NULL, wide, 0, &team);
        meet(&team);
        for (integer i = own_first(&team, rows * depth); i < own_last(&team, rows * depth); i++) {
            const float *own = heads->made + i * hidden;
            float found[hidden];
            for (integer k = 0; k < hidden; k += LANES)
                STORE(found + k, ADD(HELD(draft->features[i / depth] + k), silu(LOAD(own + k))));
            to_inputs(found, hidden, pass->normed + i * hidden);
        }
        meet(&team);
        product(
            pass->normed, rows * depth, hidden, model->head, NULL, model->vocabulary, pass->logits, NULL,
            model->vocabulary, 0, &team
        );
        meet(&team);
    }
    best_trees(model, block, pass, draft);
}
