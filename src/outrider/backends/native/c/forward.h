/* One pass over tree nodes, or over a chunk of prompts. */

#ifndef OUTRIDER_FORWARD_H
#define OUTRIDER_FORWARD_H

#include "layers/decoder.h"
#include "layers/experts.h"

/* The slots of node m's path, by depth, counted from its row's length. */
static void find_path(const Pass *pass, int64_t m) {
    const int64_t total = pass->total_nodes, row = pass->real_nodes[m] / pass->nodes;
    const int64_t node = pass->first_node + pass->real_nodes[m] % pass->nodes;
    const uint8_t *ancestors = pass->ancestors + ((pass->shared_tree ? 0 : row) * total + node) * total;
    const int64_t *positions = pass->positions + row * total;
    int32_t *path = pass->paths + m * total;
    memset(path, 0, total * sizeof *path);
    for (int64_t j = 0; j < total; j++)
        if (ancestors[j]) {
            EXPECT(positions[j] >= pass->lengths[row] && positions[j] - pass->lengths[row] < total);
            path[positions[j] - pass->lengths[row]] = (int32_t)j;
        }
}

/* Copy the hidden states `first` .. `last` - 1 before this layer, where they are tapped. */
static void
copy_taps(const Model *model, const Pass *pass, int64_t layer, int64_t first, int64_t last, const Thread *thread) {
    const int64_t width = model->hidden, ends = layer == model->layers && !model->pair_norms;
    float *row = row_scratch(thread, width);
    for (int64_t i = 0; i < pass->taps; i++) {
        if (pass->tap_layers[i] != layer) continue;
        for (int64_t m = first; m < last; m++) {
            const int64_t node = pass->real_nodes[m];
            float *to = pass->tapped ? pass->tapped + (i * pass->rows * pass->nodes + node) * width : row;
            norm_or_copy(pass->hidden_states + m * width, ends ? model->norm : (Norm){0}, width, model->eps, to);
            for (int64_t k = 0; k < width && !pass->tapped; k++) pass->features[i][node * width + k] = to_kv(row[k]);
        }
    }
}

/* List the nodes whose logits are wanted and that are not padding. Returns how many there are. */
static int64_t list_logit_nodes(const Pass *pass) {
    int64_t count = 0;
    EXPECT(pass->logit_count <= pass->nodes);
    for (int64_t i = 0; i < pass->rows * pass->logit_count; i++) {
        const int64_t row = i / pass->logit_count;
        const int64_t node = pass->logit_nodes[pass->own_logit_nodes ? i : i % pass->logit_count];
        EXPECT(node >= 0 && node < pass->nodes);
        if (node >= pass->row_starts[row + 1] - pass->row_starts[row]) continue;
        pass->logit_from[count] = pass->row_starts[row] + node;
        pass->logit_to[count++] = i;
    }
    return count;
}

/* Scale and cap logits [count, vocab], at `to` (NULL: one after the other): the columns that this thread computed. */
static void cap_logits(
    const Model *model, float *logits, const int64_t *to, int64_t count, const Thread *thread
) {
    int64_t first, last;
    column_share(model->vocab, thread, &first, &last);
    for (int64_t i = 0; i < count; i++)
        scale_and_cap(
            logits + (to ? to[i] : i) * model->vocab + first, last - first, model->logit_scale, model->logit_cap
        );
}

/* The logits of these `count` nodes. */
static void compute_logits(const Model *model, const Pass *pass, int64_t count, const Thread *thread) {
    const int64_t width = model->hidden;
    float *row = row_scratch(thread, width);
    for (int64_t i = share_begin(thread, count); i < share_end(thread, count); i++) {
        norm_or_copy(pass->hidden_states + pass->logit_from[i] * width, model->norm, width, model->eps, row);
        to_acts(row, width, pass->normed + i * width);
    }
    barrier(thread);
    matmul(
        pass->normed, count, width, model->head, model->head_bias, model->vocab, pass->logits, pass->logit_to,
        model->vocab, 0, thread
    );
    if (model->logit_scale || model->logit_cap) cap_logits(model, pass->logits, pass->logit_to, count, thread);
}

/* The embedding of a token, and of its position. Scaled embeddings are rounded as keys and values are. */
static void embed(const Model *model, const Pass *pass, int64_t node, float *to) {
    const int64_t hidden = model->hidden;
    const weight_t *from = pass->embeddings + pass->tokens[node] * hidden;
    EXPECT(pass->tokens[node] >= 0 && pass->tokens[node] < pass->embedding_rows);
    for (int64_t k = 0; k < hidden; k += LANES) v_store(to + k, load_weights(from + k));
    for (int64_t k = 0; k < hidden && model->embedding_scale; k++) to[k] = from_kv(to_kv(to[k] * model->embedding_scale));
}

/* Add the learned embedding of a position. */
static void add_position(const Model *model, int64_t position, float *to) {
    const int64_t row = position < model->position_rows ? position : model->position_rows - 1;
    const float *from = model->position_embeddings + row * model->hidden;
    for (int64_t k = 0; k < model->hidden; k += LANES) v_store(to + k, v_add(v_load(to + k), v_load(from + k)));
}

/* List the nodes that are not padding, and bring their hidden states together, or look up their embeddings. Returns
   how many there are. */
static int64_t pack_rows(const Model *model, const Pass *pass) {
    const int64_t hidden = model->hidden;
    int64_t count = 0;
    EXPECT(pass->rows > 0 && pass->nodes > 0 && pass->threads > 0);
    EXPECT(pass->first_node + pass->nodes == pass->total_nodes);
    for (int64_t row = 0; row < pass->rows; row++) {
        const int64_t nodes = pass->sizes ? pass->sizes[row] - pass->first_node : pass->nodes;
        pass->row_starts[row] = count;
        for (int64_t i = 0; i < nodes && i < pass->nodes; i++, count++) {
            const int64_t node = row * pass->nodes + i;
            float *to = pass->hidden_states + count * hidden;
            pass->real_nodes[count] = (int32_t)node;
            if (pass->tokens)
                embed(model, pass, node, to);
            else if (node != count)
                memcpy(to, pass->hidden_states + node * hidden, hidden * sizeof(float));
            if (model->position_embeddings)
                add_position(model, pass->positions[row * pass->total_nodes + pass->first_node + i], to);
        }
    }
    pass->row_starts[pass->rows] = count;
    return count;
}

typedef struct {
    const Model *model;
    const Pass *pass;
    int64_t nodes, logits; /* that are not padding; those whose logits are wanted */
} Forward;

/* Hidden states of the inputs. */
static void project_inputs(const Model *model, const Pass *pass, int64_t nodes, const Thread *thread) {
    const int64_t first = share_begin(thread, nodes), last = share_end(thread, nodes), width = model->input_dim;
    to_acts(pass->inputs + first * width, (last - first) * width, pass->normed + first * width);
    barrier(thread);
    matmul(
        pass->normed, nodes, width, model->input_proj, model->input_bias, model->hidden, pass->hidden_states, NULL,
        model->hidden, 0, thread
    );
    barrier(thread);
}

/* Add the outputs of attention or of the MLP, x W^T + bias, to the hidden states, after a norm where there is one. */
static void add_outputs(
    const Model *model, const Pass *pass, const act_t *x, int64_t nodes, int64_t width, Matrix w, const float *bias,
    Norm norm, const Thread *thread
) {
    const int64_t hidden = model->hidden;
    if (!norm.weight && !model->residual_scale) {
        matmul(x, nodes, width, w, bias, hidden, pass->hidden_states, NULL, hidden, 1, thread);
        return;
    }
    const vec_t scale = v_set1(model->residual_scale ? model->residual_scale : 1.0f);
    matmul(x, nodes, width, w, bias, hidden, pass->qkv, NULL, hidden, 0, thread);
    barrier(thread);
    for (int64_t m = share_begin(thread, nodes); m < share_end(thread, nodes); m++) {
        float *own = pass->qkv + m * hidden, *to = pass->hidden_states + m * hidden;
        norm_or_copy(own, norm, hidden, model->eps, own);
        for (int64_t k = 0; k < hidden; k += LANES) v_store(to + k, v_fma(v_load(own + k), scale, v_load(to + k)));
    }
}

static void decoder_layer(const Model *model, const Pass *pass, int64_t l, int64_t nodes, const Thread *thread) {
    const Layer *own = model->layer + l;
    const int64_t hidden = model->hidden, inner = model->intermediate;
    const int64_t wide = model->heads * model->head_dim, narrow = model->kv_heads * model->head_dim;
    const int64_t pair = !l && model->pair_norms, inputs = pair ? 2 * hidden : hidden, stride = wide + 2 * narrow;
    const int64_t first = share_begin(thread, nodes), last = share_end(thread, nodes);
    copy_taps(model, pass, l, first, last, thread);
    if (pair)
        norm_pairs(model, pass, first, last, thread);
    else
        norm_rows(pass, own->attention_norm, hidden, model->eps, first, last, thread);
    barrier(thread);
    float *keys = pass->qkv + wide, *values = keys + narrow;
    matmul(pass->normed, nodes, inputs, own->q, own->q_bias, wide, pass->qkv, NULL, stride, 0, thread);
    matmul(pass->normed, nodes, inputs, own->k, own->k_bias, narrow, keys, NULL, stride, 0, thread);
    matmul(pass->normed, nodes, inputs, own->v, own->v_bias, narrow, values, NULL, stride, 0, thread);
    barrier(thread);
    for (int64_t m = first; m < last; m++) place_node(model, pass, l, m);
    barrier(thread);
    attention_layer(model, pass, l, thread);
    if (!own->parallel) {
        add_outputs(
            model, pass, pass->attention, nodes, wide, own->o, own->o_bias, own->attention_post_norm, thread
        );
        barrier(thread);
    }
    if (!own->parallel || own->mlp_norm.weight) {
        norm_rows(pass, own->mlp_norm, hidden, model->eps, first, last, thread);
        barrier(thread);
    }
    if (own->experts) {
        EXPECT(!own->parallel && !own->mlp_post_norm.weight);
        for (int64_t m = 0; m < nodes; m += EXPERT_ROWS) {
            const int64_t count = nodes - m < EXPERT_ROWS ? nodes - m : EXPERT_ROWS;
            experts_layer(model, pass, own->experts, m, count, thread);
        }
        return;
    }
    const Inner products = {own->gate, own->up, own->gate_bias, own->up_bias, model->activation, 0, 0};
    matmul_inner(pass->normed, nodes, hidden, &products, inner, pass->mlp, thread);
    barrier(thread);
    if (own->parallel) { /* both products add to the same columns of each thread */
        EXPECT(!own->attention_post_norm.weight && !own->mlp_post_norm.weight && !model->residual_scale);
        matmul(pass->attention, nodes, wide, own->o, own->o_bias, hidden, pass->hidden_states, NULL, hidden, 1, thread);
    }
    add_outputs(model, pass, pass->mlp, nodes, inner, own->down, own->down_bias, own->mlp_post_norm, thread);
    barrier(thread);
}

static void forward_task(const Thread *thread, const void *call) {
    const Forward *of = call;
    const Model *model = of->model;
    const Pass *pass = of->pass;
    const int64_t first = share_begin(thread, of->nodes), last = share_end(thread, of->nodes);
    for (int64_t m = first; m < last && pass->ancestors; m++) find_path(pass, m);
    if (model->input_proj.data) project_inputs(model, pass, of->nodes, thread);
    for (int64_t l = 0; l < model->layers; l++) decoder_layer(model, pass, l, of->nodes, thread);
    copy_taps(model, pass, model->layers, first, last, thread);
    barrier(thread);
    if (model->head.data) compute_logits(model, pass, of->logits, thread);
    barrier(thread);
}

void forward(const Model *model, const Pass *pass) {
    const int64_t since = now(), nodes = pack_rows(model, pass), logits = model->head.data ? list_logit_nodes(pass) : 0;
    const Forward call = {model, pass, nodes, logits};
    if (nodes > CHUNK_ROWS) { /* where threads mostly compute, each of them pays; and uneven shares outlast the spins */
        run(pass->threads, pass->scratch, pass->scratch_each, forward_task, &call);
        return;
    }
    const Region region = run_pass(pass, forward_task, &call);
    adapt_threads(pass->threads, region.threads, now() - since, region.waited);
}

#endif
