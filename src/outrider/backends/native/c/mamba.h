/* A Mamba-2 that drafts, in one call: read the pending tokens, and grow a tree of EAGLE-2's kind. Every node that is
   fed keeps its state in a slot of its own; the root's is slot 0. */

#ifndef OUTRIDER_MAMBA_H
#define OUTRIDER_MAMBA_H

#include "growth.h"
#include "layers/mamba2.h"

typedef struct {
    const Mamba *mamba;
    const MambaStates *states;
    const Pass *pass;
    int64_t count, logits; /* nodes; 1: compute the logits after them */
    int64_t in_order; /* 1: the nodes of a row follow one another and update one state, on one thread */
} MambaStep;

static void mamba_layer(const MambaStep *of, int64_t l, const Thread *thread) {
    const Mamba *mamba = of->mamba;
    const MambaStates *states = of->states;
    const Pass *pass = of->pass;
    const int64_t count = of->count;
    const MambaLayer *own = mamba->layer + l;
    const int64_t hidden = mamba->hidden, inner = mamba->intermediate, wide = mamba->in_proj_rows;
    const int64_t window = (inner + 2 * mamba->groups * mamba->state_size) * (mamba->conv_kernel - 1);
    const int64_t memory = inner * mamba->state_size, slots = pass->rows * states->slots;
    const int64_t first = share_begin(thread, count), last = share_end(thread, count);
    norm_rows(pass, (Norm){own->norm, NULL, RMS_NORM}, hidden, mamba->eps, first, last, thread);
    barrier(thread);
    matmul(pass->normed, count, hidden, own->in_proj, NULL, wide, pass->qkv, NULL, wide, 0, thread);
    barrier(thread);
    float *y = row_scratch(thread, inner);
    for (int64_t i = of->in_order ? 0 : first; i < (of->in_order ? count : last); i++) {
        if (of->in_order && states->target[i] / states->slots % thread->count != thread->index) continue;
        const int64_t from = l * slots + states->source[i], to = l * slots + states->target[i];
        float *projected = pass->qkv + i * wide;
        convolve(mamba, own, states->conv + from * window, states->conv + to * window, projected + inner);
        ssm_step(
            mamba, own, states->ssm + from * memory, states->ssm + to * memory, projected, y,
            pass->attention + i * inner
        );
    }
    barrier(thread);
    matmul(pass->attention, count, inner, own->out_proj, NULL, hidden, pass->hidden_states, NULL, hidden, 1, thread);
    barrier(thread);
}

static void mamba_step_task(const Thread *thread, const void *call) {
    const MambaStep *of = call;
    const Mamba *mamba = of->mamba;
    const MambaStates *states = of->states;
    const Pass *pass = of->pass;
    const int64_t hidden = mamba->hidden, vocab = mamba->vocab, count = of->count;
    const int64_t first = share_begin(thread, count), last = share_end(thread, count);
    for (int64_t i = first; i < last; i++) {
        EXPECT(states->token[i] >= 0 && states->token[i] < mamba->embedding_rows);
        EXPECT(states->source[i] < pass->rows * states->slots && states->target[i] < pass->rows * states->slots);
        for (int64_t k = 0; k < hidden; k += LANES)
            v_store(pass->hidden_states + i * hidden + k, load_kv(mamba->embeddings + states->token[i] * hidden + k));
    }
    for (int64_t l = 0; l < mamba->layers; l++) mamba_layer(of, l, thread);
    if (!of->logits) return;
    norm_rows(pass, (Norm){mamba->norm, NULL, RMS_NORM}, hidden, mamba->eps, first, last, thread);
    barrier(thread);
    matmul(pass->normed, count, hidden, mamba->head, NULL, vocab, pass->logits, NULL, vocab, 0, thread);
    barrier(thread);
}

static void mamba_step(const Mamba *mamba, const MambaStates *states, Pass *pass, int64_t count, int64_t logits) {
    run_pass(pass, mamba_step_task, &(MambaStep){mamba, states, pass, count, logits, 0});
}

/* Read the pending tokens, row by row, into slot 0; the logits are those after each row's last token. */
static void read_tokens(const Mamba *mamba, const MambaStates *states, Pass *pass, const Draft *draft) {
    for (int64_t step = 0; step < draft->most_pending; step++) {
        int64_t count = 0, at = 0;
        for (int64_t r = 0; r < pass->rows; at += draft->pending[r++]) {
            const int64_t entry = step - (draft->most_pending - draft->pending[r]); /* all rows end together */
            if (entry < 0) continue;
            states->source[count] = states->target[count] = r * states->slots;
            states->token[count++] = draft->next_tokens[at + entry];
        }
        mamba_step(mamba, states, pass, count, step + 1 == draft->most_pending);
    }
}

void read_mamba(const Mamba *mamba, const MambaStates *states, Pass *pass, int64_t count) {
    run_pass(pass, mamba_step_task, &(MambaStep){mamba, states, pass, count, 0, 1});
}

void step_mamba(const Mamba *mamba, const MambaStates *states, Pass *pass, int64_t count) {
    mamba_step(mamba, states, pass, count, 1);
}

void draft_mamba(const Mamba *mamba, const MambaStates *states, Pass *pass, Draft *draft) {
    const int64_t rows = pass->rows, fed_nodes = (draft->depth - 1) * draft->width;
    const Model head = {.vocab = mamba->vocab};
    int64_t above = 0, wide = 1, before = 0, candidates = 1, *ends = draft->ends;
    read_tokens(mamba, states, pass, draft);
    if (!draft->depth) return;
    place_roots(draft, rows);
    for (int64_t layer = 0; layer < draft->depth; layer++) {
        const int64_t first = candidates;
        rank_layer(&head, pass, draft, above, wide, layer, first);
        candidates += wide * draft->top_k;
        if (layer + 1 == draft->depth) break;
        above = before;
        wide = choose_fed(draft, rows, before, first, candidates - first, ends);
        if (!wide) break;
        for (int64_t i = 0; i < rows * wide; i++) {
            const int64_t r = i / wide, at = r * draft->max_candidates;
            const int64_t candidate = draft->fed_candidate[r * fed_nodes + above + i % wide];
            const int64_t node = candidate < 0 ? 0 : candidate,
                          up = draft->parent[at + node]; /* a row may have fewer */
            states->source[i] = r * states->slots + (up ? 1 + draft->fed[at + up] : 0);
            states->target[i] = r * states->slots + 1 + above + i % wide;
            states->token[i] = draft->token[at + node];
        }
        mamba_step(mamba, states, pass, rows * wide, 1);
        before += wide;
    }
    select_nodes(draft, rows, candidates);
}

#endif
