/* Hydra's heads in one call (drafters/_hydra.py is the tensor reference): a tree of EAGLE-2's kind, whose layers have a
   head each. A head reads the row's feature and the embeddings of a node's path, the root's first. */

#ifndef OUTRIDER_HYDRA_H
#define OUTRIDER_HYDRA_H

#include "growth.h"

/* The inputs of a node's head: the feature, and its path's embeddings. */
static void path_inputs(
    const Draft *draft, int64_t hidden, int64_t row, int64_t node, int64_t layer, act_t *to, const Thread *thread
) {
    float *embedding = row_scratch(thread, hidden);
    const int64_t at = row * draft->max_candidates;
    for (int64_t k = 0; k < hidden; k += LANES) store_acts(to + k, load_kv(draft->features[row] + k));
    for (int64_t place = layer + 1; place; place--) {
        embed_token(draft, draft->token[at + node], hidden, embedding);
        to_acts(embedding, hidden, to + place * hidden);
        node = draft->parent[at + node];
    }
}

typedef struct {
    const Model *model;
    const HydraHead *head;
    float *residual;
    const Pass *pass;
    const Draft *draft;
    int64_t above, wide, layer;
} HydraLayer;

/* Logits below the `wide` fed nodes from `above` on, of every row; of layer 0 below the roots. */
static void hydra_logits(const Thread *thread, const void *call) {
    const HydraLayer *of = call;
    const HydraHead *head = of->head;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    float *residual = of->residual;
    const int64_t wide = of->wide, layer = of->layer, vocab = of->model->vocab,
                  fed_nodes = (draft->depth - 1) * draft->width;
    const int64_t hidden = of->model->hidden, inputs = (layer + 2) * hidden, count = pass->rows * wide;
    const int64_t first = share_begin(thread, count), last = share_end(thread, count);
    for (int64_t i = first; i < last; i++) {
        const int64_t r = i / wide, fed = r * fed_nodes + of->above + i % wide;
        const int64_t node = layer && draft->fed_candidate[fed] >= 0 ? draft->fed_candidate[fed]
                                                                     : 0; /* a row may have fewer */
        path_inputs(draft, hidden, r, node, layer, pass->normed + i * inputs, thread);
    }
    barrier(thread);
    matmul(pass->normed, count, inputs, head->block, head->bias, 2 * hidden, residual, NULL, 2 * hidden, 0, thread);
    barrier(thread);
    for (int64_t i = first; i < last; i++) {
        float *own = residual + i * 2 * hidden;
        for (int64_t k = 0; k < hidden; k += LANES)
            v_store(own + k, v_add(v_load(own + k), v_silu(v_load(own + hidden + k))));
        to_acts(own, hidden, pass->normed + i * hidden);
    }
    barrier(thread);
    matmul(pass->normed, count, hidden, head->head, head->head_bias, vocab, pass->logits, NULL, vocab, 0, thread);
    barrier(thread);
}

void step_hydra(
    const Model *model, const HydraHead *heads, float *residual, Pass *pass, const Draft *draft, int64_t layer
) {
    run_pass(
        pass, hydra_logits, &(HydraLayer){model, heads + layer, residual, pass, draft, 0, layer ? draft->width : 1, layer}
    );
}

void draft_hydra(const Model *model, const HydraHead *heads, float *residual, Pass *pass, Draft *draft) {
    const int64_t rows = pass->rows;
    int64_t above = 0, wide = 1, before = 0, candidates = 1, *ends = draft->ends;
    place_roots(draft, rows);
    for (int64_t layer = 0; layer < draft->depth; layer++) {
        const int64_t first = candidates;
        run_pass(pass, hydra_logits, &(HydraLayer){model, heads + layer, residual, pass, draft, above, wide, layer});
        rank_layer(model, pass, draft, above, wide, layer, first);
        candidates += wide * draft->top_k;
        if (layer + 1 == draft->depth) break;
        above = before;
        wide = choose_fed(draft, rows, before, first, candidates - first, ends);
        if (!wide) break;
        before += wide;
    }
    select_nodes(draft, rows, candidates);
}

#endif
