/* Hydra's heads (drafters/hydra.py has the same in tensors) in one call: a tree of EAGLE-2's kind, whose layers have a
   head each. A head reads the row's feature and the embeddings of a node's path, the root's first. */

typedef struct {
    Matrix block;       /* [2 * hidden, reads]: the map that is kept, and below it the one behind SiLU */
    const float *bias;  /* [2 * hidden] */
    Matrix head;        /* [vocabulary, hidden] */
    const float *shift; /* [vocabulary] */
} HydraHead;

/* The first product's input of a node: the feature, and its path's embeddings. */
static void path_of(const Draft *draft, integer hidden, integer row, integer node, integer layer, input *to) {
    const integer at = row * draft->candidates;
    for (integer k = 0; k < hidden; k += LANES) STORE_INPUT(to + k, HELD(draft->features[row] + k));
    for (integer place = layer + 1; place; place--) {
        EXPECT(draft->token[at + node] >= 0 && draft->token[at + node] < draft->entries);
        const held *embedding = draft->embeddings + draft->token[at + node] * hidden;
        for (integer k = 0; k < hidden; k += LANES) STORE_INPUT(to + place * hidden + k, HELD(embedding + k));
        node = draft->below[at + node];
    }
}

/* Logits below the `wide` nodes of places from `above` on, of every row; of layer 0 below the roots. */
static void speak(
    const Model *model, const HydraHead *own, float *made, const Pass *pass, const Draft *draft, integer above,
    integer wide, integer layer
) {
    const integer hidden = model->hidden, reads = (layer + 2) * hidden, count = pass->rows * wide;
    Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
    {
        const Team team = team_at(&gate);
        const integer first = own_first(&team, count), last = own_last(&team, count);
        for (integer i = first; i < last; i++) {
            const integer r = i / wide, place = r * (draft->depth - 1) * draft->width + above + i % wide;
            const integer node = layer && draft->place[place] >= 0 ? draft->place[place] : 0; /* a row may have fewer */
            path_of(draft, hidden, r, node, layer, pass->normed + i * reads);
        }
        meet(&team);
        product(pass->normed, count, reads, own->block, own->bias, 2 * hidden, made, NULL, 2 * hidden, 0, &team);
        meet(&team);
        for (integer i = first; i < last; i++) {
            float *kept = made + i * 2 * hidden;
            for (integer k = 0; k < hidden; k += LANES) STORE(kept + k, ADD(LOAD(kept + k), silu(LOAD(kept + hidden + k))));
            to_inputs(kept, hidden, pass->normed + i * hidden);
        }
        meet(&team);
        product(
            pass->normed, count, hidden, own->head, own->shift, model->vocabulary, pass->logits, NULL,
            model->vocabulary, 0, &team
        );
        meet(&team);
    }
}

void draft_hydra(const Model *model, const HydraHead *heads, float *made, Pass *pass, Draft *draft) {
    const integer rows = pass->rows;
    integer above = 0, wide = 1, before = 0, candidates = 1, *ends = draft->ends;
    rooted(draft, rows);
    for (integer layer = 0; layer < draft->depth; layer++) {
        const integer first = candidates;
        speak(model, heads + layer, made, pass, draft, above, wide, layer);
        rank_all(model, pass, draft, above, wide, layer, first);
        candidates += wide * draft->most;
        if (layer + 1 == draft->depth) break;
        above = before;
        wide = choose(draft, rows, before, first, candidates - first, ends);
        if (!wide) break;
        before += wide;
    }
    keep(draft, rows, candidates);
}
