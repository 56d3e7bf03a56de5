/* Hydra's heads (drafters/hydra.py has the same in tensors) in one call: a tree of EAGLE-2's kind, whose layers have a
   head each. A head reads the row's feature and the embeddings of a node's path, the root's first. */

/* The first product's input of a node: the feature, and its path's embeddings. */
static void path_of(const Draft *draft, int64_t hidden, int64_t row, int64_t node, int64_t layer, act_t *to) {
    const int64_t at = row * draft->max_candidates;
    for (int64_t k = 0; k < hidden; k += LANES) STORE_INPUT(to + k, HELD(draft->features[row] + k));
    for (int64_t place = layer + 1; place; place--) {
        EXPECT(draft->token[at + node] >= 0 && draft->token[at + node] < draft->embedding_rows);
        const kv_t *embedding = draft->embeddings + draft->token[at + node] * hidden;
        for (int64_t k = 0; k < hidden; k += LANES) STORE_INPUT(to + place * hidden + k, HELD(embedding + k));
        node = draft->parent[at + node];
    }
}

typedef struct {
    const Model *model;
    const HydraHead *own;
    float *made;
    const Pass *pass;
    const Draft *draft;
    int64_t above, wide, layer;
} Speaking;

/* Logits below the `wide` nodes of places from `above` on, of every row; of layer 0 below the roots. */
static void speak(const Team *team, const void *call) {
    const Speaking *of = call;
    const Model *model = of->model;
    const HydraHead *own = of->own;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    float *made = of->made;
    const int64_t wide = of->wide, layer = of->layer;
    const int64_t hidden = model->hidden, reads = (layer + 2) * hidden, count = pass->rows * wide;
    const int64_t first = own_first(team, count), last = own_last(team, count);
    for (int64_t i = first; i < last; i++) {
        const int64_t r = i / wide, place = r * (draft->depth - 1) * draft->width + of->above + i % wide;
        const int64_t node = layer && draft->fed_candidate[place] >= 0 ? draft->fed_candidate[place] : 0; /* a row may have fewer */
        path_of(draft, hidden, r, node, layer, pass->normed + i * reads);
    }
    meet(team);
    product(pass->normed, count, reads, own->block, own->bias, 2 * hidden, made, NULL, 2 * hidden, 0, team);
    meet(team);
    for (int64_t i = first; i < last; i++) {
        float *kept = made + i * 2 * hidden;
        for (int64_t k = 0; k < hidden; k += LANES) STORE(kept + k, ADD(LOAD(kept + k), silu(LOAD(kept + hidden + k))));
        to_inputs(kept, hidden, pass->normed + i * hidden);
    }
    meet(team);
    product(
        pass->normed, count, hidden, own->head, own->head_bias, model->vocab, pass->logits, NULL,
        model->vocab, 0, team
    );
    meet(team);
}

void draft_hydra(const Model *model, const HydraHead *heads, float *made, Pass *pass, Draft *draft) {
    const int64_t rows = pass->rows;
    int64_t above = 0, wide = 1, before = 0, candidates = 1, *ends = draft->ends;
    rooted(draft, rows);
    for (int64_t layer = 0; layer < draft->depth; layer++) {
        const int64_t first = candidates;
        run_pass(pass, speak, &(Speaking){model, heads + layer, made, pass, draft, above, wide, layer});
        rank_all(model, pass, draft, above, wide, layer, first);
        candidates += wide * draft->top_k;
        if (layer + 1 == draft->depth) break;
        above = before;
        wide = choose(draft, rows, before, first, candidates - first, ends);
        if (!wide) break;
        before += wide;
    }
    keep(draft, rows, candidates);
}
