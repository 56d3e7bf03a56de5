/* The parts of a decoder layer around its products: rotary embeddings, the KV cache, attention of all nodes. */

#ifndef OUTRIDER_DECODER_H
#define OUTRIDER_DECODER_H

#include "attention.h"
#include "norm.h"

/* Elements from one slot of the cache to the next. */
INLINE int64_t slot_width(const Model *model, const Pass *pass) {
    return (pass->slot_layers > 1 ? pass->slot_layers : 1) * model->kv_heads * model->head_dim;
}

/* One norm of so many heads, of which the first `real` elements of each are not padding. */
static void norm_padded(Norm norm, int64_t heads, int64_t width, int64_t real, float eps, float *x) {
    float total = 0.0f, squares = 0.0f;
    for (int64_t k = 0; k < heads * width; k++) total += x[k];
    const float count = (float)(heads * real), mean = norm.kind == LAYER_NORM ? total / count : 0.0f;
    for (int64_t k = 0; k < heads * width; k++)
        if (k % width < real) squares += (x[k] - mean) * (x[k] - mean);
    const float root = 1.0f / sqrtf(squares / count + eps);
    for (int64_t k = 0; k < heads * width; k++)
        x[k] = (x[k] - mean) * root * norm.weight[k] + (norm.bias ? norm.bias[k] : 0.0f);
}

/* The norm of the queries or keys of so many heads. */
static void norm_heads(const Model *model, Norm norm, int64_t span, int64_t heads, float *x) {
    const int64_t width = model->head_dim, real = model->unpadded_head_dim ? model->unpadded_head_dim : width;
    const int64_t together = span == NORM_ALL_HEADS ? heads : 1;
    if (!norm.weight) return;
    for (int64_t h = 0; h < heads; h += together, x += together * width) {
        if (real < width)
            norm_padded(norm, together, width, real, model->eps, x);
        else
            norm_or_copy(x, norm, together * width, model->eps, x);
        if (span == NORM_EACH_HEAD) norm.weight += width;
        if (span == NORM_EACH_HEAD && norm.bias) norm.bias += width;
    }
}

/* The rotary embedding of so many heads, by this table. */
static void
rotate(const Model *model, const Pass *pass, int64_t table, int64_t position, int64_t heads, float *x) {
    const int64_t width = model->rotary_dim ? model->rotary_dim : model->head_dim, half = width / 2;
    if (!table) return;
    if (position >= pass->rope_positions) position = pass->rope_positions - 1;
    const float *cosine = pass->rope + ((table - 1) * pass->rope_positions + position) * 2 * width;
    const float *sine = cosine + width;
    for (int64_t h = 0; h < heads; h++, x += model->head_dim)
        for (int64_t k = 0; k < half; k++) {
            const float a = x[k], b = x[k + half];
            x[k] = a * cosine[k] - b * sine[k];
            x[k + half] = b * cosine[k + half] + a * sine[k + half];
        }
}

/* Write keys, with their rotary embedding, and values to a slot of the cache; both lie at `kv`. */
static void write_kv(const Model *model, const Pass *pass, int64_t layer, int64_t position, int64_t slot, float *kv) {
    const Layer *own = model->layer + layer;
    const int64_t width = model->head_dim, groups = model->kv_heads, at = slot * slot_width(model, pass);
    norm_heads(model, own->k_norm, own->qk_norm_span, groups, kv);
    rotate(model, pass, own->rope, position, groups, kv);
    kv_t *keys = pass->cache[2 * layer] + at, *values = pass->cache[2 * layer + 1] + at;
    for (int64_t k = 0; k < groups * width; k++) {
        keys[k] = to_kv(kv[k]);
        values[k] = to_kv(kv[groups * width + k]);
    }
}

/* The rotary embedding of node m's queries; its keys and values to the cache. */
static void place_node(const Model *model, const Pass *pass, int64_t layer, int64_t m) {
    const Layer *own = model->layer + layer;
    const int64_t width = model->head_dim, heads = model->heads, row = pass->real_nodes[m] / pass->nodes;
    const int64_t node = pass->first_node + pass->real_nodes[m] % pass->nodes;
    const int64_t position = pass->positions[row * pass->total_nodes + node];
    EXPECT(position >= 0 && pass->lengths[row] + node < pass->capacity);
    float *qkv = pass->qkv + m * (heads + 2 * model->kv_heads) * width;
    norm_heads(model, own->q_norm, own->qk_norm_span, heads, qkv);
    rotate(model, pass, own->rope, position, heads, qkv);
    to_acts(qkv, heads * width, pass->query + m * heads * width);
    write_kv(model, pass, layer, position, row * pass->capacity + pass->lengths[row] + node, qkv + heads * width);
}

/* Attention of all nodes. Threads take items in any order: some nodes of a row, in some heads that share a key head. */
static void attention_layer(const Model *model, const Pass *pass, int64_t layer, const Thread *thread) {
    const int64_t width = model->head_dim, groups = model->kv_heads, group = model->heads / groups;
    int64_t heads = group < QUERIES ? group : QUERIES;
    if (pass->rows * groups * pass->nodes < thread->count) heads = 1; /* or threads would have nothing to do */
    const int64_t cuts = (group + heads - 1) / heads, fit = QUERIES / heads, least = (pass->nodes + fit - 1) / fit;
    const int64_t items = pass->rows * groups * cuts * least; /* few that threads do not share evenly are split */
    const int64_t uneven = items % thread->count && items < 4 * thread->count &&
                           4 * least * thread->count <= pass->nodes;
    const int64_t parts = uneven ? least * thread->count : least;
    const int64_t together = parts ? (pass->nodes + parts - 1) / parts : 1, stride = slot_width(model, pass);
    AttentionWork *work = (AttentionWork *)thread_scratch(thread);
    const Layer *own = model->layer + layer;
    const Scoring scoring = {model->attention_scale, model->score_cap, own->window, own->sinks};
    begin_product_few(2, heads < LANES ? heads : LANES);
    for (int64_t item; (item = next_item(thread)) < pass->rows * groups * cuts * parts;) {
        const int64_t part = item % parts, cut = item / parts % cuts, g = item / parts / cuts % groups;
        const int64_t row = item / parts / cuts / groups, first = part * together;
        const int64_t nodes = pass->row_starts[row + 1] - pass->row_starts[row];
        const int64_t last = first + together < nodes ? first + together : nodes;
        if (first >= last) continue;
        const int64_t head = g * group + cut * heads, end = (g + 1) * group;
        const int64_t start = pass->row_starts[row] * model->heads * width;
        const int64_t cached = row * pass->capacity * stride + g * width, total = pass->total_nodes;
        attend(
            work, pass->query + start, pass->attention + start, model->heads, head,
            head + heads < end ? head + heads : end, width, pass->cache[2 * layer] + cached,
            pass->cache[2 * layer + 1] + cached, stride, first, last, pass->positions + row * total + pass->first_node,
            pass->lengths[row], pass->ancestors ? pass->paths + pass->row_starts[row] * total : NULL, total,
            &scoring
        );
    }
    end_product();
    barrier(thread);
}

#endif
