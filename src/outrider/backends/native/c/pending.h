/* What a drafter reads of committed text before it drafts: pairs of the target's feature at a position and the next
   token.

   Later steps use only the keys and values of earlier pairs, and the products before these take about a fifth of the
   weights. So of many pending pairs, the layer computes each row's last one alone, which the draft begins with. */

#ifndef OUTRIDER_PENDING_H
#define OUTRIDER_PENDING_H

#include "formats/gguf.h"
#include "forward.h"

/* The embedding of a token, of the table as it lies in memory. */
static void embed_token(const Draft *draft, int64_t token, int64_t hidden, float *to) {
    EXPECT(token >= 0 && token < draft->embedding_rows);
    dequantise_row(format_of(draft->embedding_kind), draft->embeddings, token, hidden, draft->embedding_bf16, to);
    for (int64_t k = 0; k < hidden && draft->embedding_scale != 0; k++) to[k] *= draft->embedding_scale;
}

/* Keys and values of `count` inputs, which lie in `normed`, written after their rows' texts. `real_nodes`: the row of
   each; `row_starts`: the first of each row. */
static void write_pending_kv(
    const Model *model, const Pass *pass, int64_t layer, int64_t inputs, int64_t count, const int64_t *lengths,
    const Thread *thread
) {
    const Layer *own = model->layer + layer;
    const int64_t narrow = model->kv_heads * model->head_dim;
    matmul(pass->normed, count, inputs, own->k, own->k_bias, narrow, pass->qkv, NULL, 2 * narrow, 0, thread);
    matmul(pass->normed, count, inputs, own->v, own->v_bias, narrow, pass->qkv + narrow, NULL, 2 * narrow, 0, thread);
    barrier(thread);
    for (int64_t m = share_begin(thread, count); m < share_end(thread, count); m++) {
        const int64_t row = pass->real_nodes[m], position = lengths[row] + m - pass->row_starts[row];
        write_kv(model, pass, layer, position, row * pass->capacity + position, pass->qkv + m * 2 * narrow);
    }
    barrier(thread);
}

/* Write down which row each pending entry is of. Returns how many entries there are. */
static int64_t assign_rows(const Pass *pass, const int64_t *pending) {
    int64_t count = 0;
    for (int64_t r = 0; r < pass->rows; r++) {
        pass->row_starts[r] = count;
        for (int64_t i = 0; i < pending[r]; i++) pass->real_nodes[count++] = (int32_t)r;
    }
    return count;
}

typedef struct {
    const Model *step;
    const Pass *pass;
    const Draft *draft;
    int64_t count; /* pending pairs */
} Pending;

static void make_pairs_task(const Thread *thread, const void *call) {
    const Pending *of = call;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    const int64_t hidden = of->step->hidden, taps = draft->taps, count = of->count, width = taps * draft->feature_dim;
    float *pairs = (float *)pass->inputs;
    const int64_t first = share_begin(thread, count), last = share_end(thread, count);
    for (int64_t i = first; i < last; i++) {
        float *to = pairs + i * 2 * hidden;
        embed_token(draft, draft->next_tokens[i], hidden, to);
        for (int64_t k = 0; k < hidden && !draft->fuse.data; k += LANES)
            v_store(to + hidden + k, load_kv(draft->features[i] + k));
    }
    if (draft->fuse.data) {
        gather_features(pass, draft->features, draft->feature_dim, first * taps, last * taps);
        barrier(thread);
        matmul(pass->normed, count, width, draft->fuse, NULL, hidden, pairs + hidden, NULL, 2 * hidden, 0, thread);
    }
    barrier(thread);
}

/* The pending pairs as the layer's inputs: the token's embedding, and beside it its feature, or for EAGLE-3 one vector
   of its features. Returns how many pairs there are. */
static int64_t make_pairs(const Model *step, const Pass *pass, const Draft *draft) {
    const int64_t count = assign_rows(pass, draft->pending);
    run_pass(pass, make_pairs_task, &(Pending){step, pass, draft, count});
    return count;
}

static void write_pairs_kv_task(const Thread *thread, const void *call) {
    const Pending *of = call;
    const Model *step = of->step;
    const Pass *pass = of->pass;
    const int64_t hidden = step->hidden, count = of->count;
    const int64_t first = share_begin(thread, count), last = share_end(thread, count);
    if (step->input_proj.data) project_inputs(step, pass, count, thread);
    if (step->pair_norms)
        norm_pairs(step, pass, first, last, thread);
    else
        norm_rows(pass, step->layer->attention_norm, hidden, step->eps, first, last, thread);
    barrier(thread);
    write_pending_kv(step, pass, 0, step->pair_norms ? 2 * hidden : hidden, count, of->draft->lengths, thread);
}

/* Feed the pending pairs to the layer, after each row's text. */
static void feed_pairs(const Model *step, Pass *pass, Draft *draft) {
    const int64_t hidden = step->hidden, most = draft->most_pending;
    make_pairs(step, pass, draft);
    for (int64_t r = 0; r < pass->rows; r++)
        for (int64_t i = 0; i < most; i++) draft->positions[r * most + i] = draft->lengths[r] + i;
    pass->nodes = pass->total_nodes = most;
    pass->first_node = pass->logit_count = 0;
    pass->taps = 1;
    pass->sizes = draft->pending;
    pass->positions = draft->positions;
    pass->ancestors = NULL;
    forward(step, pass);
    pass->sizes = NULL;
    for (int64_t r = 0; r < pass->rows; r++) {
        const int64_t count = draft->pending[r];
        if (!count) continue;
        memcpy(draft->last_hidden + r * hidden, pass->tapped + (r * most + count - 1) * hidden, hidden * sizeof(float));
        draft->lengths[r] += count;
    }
}

/* Read the pending pairs. Few: all go through the layer. Many: their keys and values first, and then each row's last
   one goes through the layer. */
static void read_pairs(const Model *step, Pass *pass, Draft *draft) {
    const int64_t rows = pass->rows, taps = draft->taps;
    if (draft->most_pending <= MAX_FED_PAIRS) {
        feed_pairs(step, pass, draft);
        return;
    }
    const kv_t **features = draft->last_features;
    int64_t *tokens = draft->last_tokens, *pending = draft->last_pending, count = 0, last = 0;
    const int64_t pairs = make_pairs(step, pass, draft);
    run_pass(pass, write_pairs_kv_task, &(Pending){step, pass, draft, pairs});
    for (int64_t r = 0; r < rows; r++) { /* the last pair of each */
        pending[r] = draft->pending[r] > 0;
        count += draft->pending[r];
        if (!pending[r]) continue;
        for (int64_t i = 0; i < taps; i++) features[last * taps + i] = draft->features[(count - 1) * taps + i];
        tokens[last++] = draft->next_tokens[count - 1];
        draft->lengths[r] += draft->pending[r] - 1;
    }
    Draft last_pairs = *draft;
    last_pairs.most_pending = 1;
    last_pairs.pending = pending;
    last_pairs.features = features;
    last_pairs.next_tokens = tokens;
    feed_pairs(step, pass, &last_pairs);
}

#endif
