/* Medusa's heads (drafters/medusa.py has the same in tensors) in one call: a residual block for each, all of one vector;
   the head that they share; then the best nodes of the lattice of their candidates. */

typedef struct {
    Matrix blocks;     /* [heads * hidden, hidden]: every head's residual block */
    const float *bias; /* [heads * hidden] */
    float *made;       /* room: [rows, depth * hidden] */
} Heads;

typedef struct {
    const Model *model;
    const Heads *heads;
    const Pass *pass;
    const Draft *draft;
} HeadsCall;

/* The logits of all heads. */
static void heads_logits(const Team *team, const void *call) {
    const HeadsCall *of = call;
    const Model *model = of->model;
    const Heads *heads = of->heads;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    const integer rows = pass->rows, depth = draft->depth, hidden = model->hidden, wide = depth * hidden;
    collected(pass, draft->features, hidden, own_first(team, rows), own_last(team, rows));
    meet(team);
    product(pass->normed, rows, hidden, heads->blocks, heads->bias, wide, heads->made, NULL, wide, 0, team);
    meet(team);
    for (integer i = own_first(team, rows * depth); i < own_last(team, rows * depth); i++) {
        const float *own = heads->made + i * hidden;
        float found[hidden];
        for (integer k = 0; k < hidden; k += LANES)
            STORE(found + k, ADD(HELD(draft->features[i / depth] + k), silu(LOAD(own + k))));
        to_inputs(found, hidden, pass->normed + i * hidden);
    }
    meet(team);
    product(
        pass->normed, rows * depth, hidden, model->head, NULL, model->vocabulary, pass->logits, NULL,
        model->vocabulary, 0, team
    );
    meet(team);
}

void draft_heads(const Model *model, const Heads *heads, const Block *block, Pass *pass, Draft *draft) {
    run_pass(pass, heads_logits, &(HeadsCall){model, heads, pass, draft});
    best_trees(model, block, pass, draft);
}
