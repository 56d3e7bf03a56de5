/* One pass of a Llama-shaped model over tree nodes, or over a chunk of prompts: `parts.py` has the same structures for Python. */

#include "vectors.h"

#include "threads.h"

#include "formats.h"

#include "blocks.h"

#include "products.h"

#include "scores.h"

#include "values.h"

#include "attention.h"

/* Run a task on the threads that a pass may take. */
static Region run_pass(const Pass *pass, Task *task, const void *call) {
    return run(hands(pass->threads), pass->scratch, pass->scratch_each, task, call);
}

/* Numbers from one slot of the cache to the next. */
INLINE int64_t slot_width(const Model *model, const Pass *pass) {
    return (pass->slot_layers > 1 ? pass->slot_layers : 1) * model->kv_heads * model->head_dim;
}

static void normalise(const float *x, const float *weight, int64_t width, float epsilon, float *y) {
    vector total = ZERO;
    for (int64_t k = 0; k < width; k += LANES) total = FMA(LOAD(x + k), LOAD(x + k), total);
    const float root = 1.0f / sqrtf(sum_of(total) / (float)width + epsilon);
    for (int64_t k = 0; k < width; k += LANES) STORE(y + k, MUL(MUL(LOAD(x + k), ALL(root)), LOAD(weight + k)));
}

/* The same, or a copy where there is no norm. */
static void scaled(const float *x, const float *weight, int64_t width, float epsilon, float *y) {
    if (weight)
        normalise(x, weight, width, epsilon, y);
    else
        memcpy(y, x, width * sizeof(float));
}

/* The norm of rows `first` .. `last` - 1, as the input of a product. */
static void normed(const Model *model, const Pass *pass, const float *weight, int64_t first, int64_t last) {
    float found[model->hidden];
    for (int64_t m = first; m < last; m++) {
        scaled(pass->hidden_states + m * model->hidden, weight, model->hidden, model->eps, found);
        to_inputs(found, model->hidden, pass->normed + m * model->hidden);
    }
}

/* EAGLE-3: the first layer reads the norms of an embedding and of a vector side by side, and adds to the vector. */
static void paired(const Model *model, const Pass *pass, int64_t first, int64_t last) {
    const int64_t hidden = model->hidden;
    float found[2 * hidden];
    for (int64_t m = first; m < last; m++) {
        const float *given = pass->inputs + m * 2 * hidden;
        for (int64_t k = 0; k < 2 * hidden; k += hidden)
            normalise(given + k, model->pair_norms + k, hidden, model->eps, found + k);
        to_inputs(found, 2 * hidden, pass->normed + m * 2 * hidden);
        memcpy(pass->hidden_states + m * hidden, given + hidden, hidden * sizeof(float));
    }
}

/* Features `first` .. `last` - 1, as the input of a product. */
static void collected(const Pass *pass, const kv_t *const *features, int64_t width, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
        for (int64_t k = 0; k < width; k += LANES) STORE_INPUT(pass->normed + i * width + k, HELD(features[i] + k));
}

/* One head's numbers, normalised and turned by its position. */
static void turn(const Model *model, const Pass *pass, const float *norm, int64_t turned, int64_t place, float *x) {
    const int64_t width = model->head_dim, half = width / 2;
    if (norm) normalise(x, norm, width, model->eps, x);
    if (!turned) return;
    const float *cosine = pass->rope + (place < pass->rope_positions ? place : pass->rope_positions - 1) * 2 * width;
    const float *sine = cosine + width;
    for (int64_t k = 0; k < half; k++) {
        const float a = x[k], b = x[k + half];
        x[k] = a * cosine[k] - b * sine[k];
        x[k + half] = b * cosine[k + half] + a * sine[k + half];
    }
}

/* Keys turned by their place, and values, written to a slot of the cache; both lie at `made`. */
static void written(const Model *model, const Pass *pass, int64_t layer, int64_t place, int64_t slot, float *made) {
    const Layer *own = model->layer + layer;
    const int64_t width = model->head_dim, groups = model->kv_heads, at = slot * slot_width(model, pass);
    for (int64_t g = 0; g < groups; g++) turn(model, pass, own->k_norm, own->rope, place, made + g * width);
    kv_t *keys = pass->cache[2 * layer] + at, *values = pass->cache[2 * layer + 1] + at;
    for (int64_t k = 0; k < groups * width; k++) {
        keys[k] = to_held(made[k]);
        values[k] = to_held(made[groups * width + k]);
    }
}

/* Of node m: queries turned, keys and values written to the cache. */
static void placed(const Model *model, const Pass *pass, int64_t layer, int64_t m) {
    const Layer *own = model->layer + layer;
    const int64_t width = model->head_dim, heads = model->heads, row = pass->real_nodes[m] / pass->nodes;
    const int64_t node = pass->first_node + pass->real_nodes[m] % pass->nodes, place = pass->positions[row * pass->total_nodes + node];
    EXPECT(place >= 0 && pass->lengths[row] + node < pass->capacity);
    float *made = pass->qkv + m * (heads + 2 * model->kv_heads) * width;
    for (int64_t h = 0; h < heads; h++) turn(model, pass, own->q_norm, own->rope, place, made + h * width);
    to_inputs(made, heads * width, pass->query + m * heads * width);
    written(model, pass, layer, place, row * pass->capacity + pass->lengths[row] + node, made + heads * width);
}

/* The slots of each node's path, by depth, counted from its row's length. */
static void walk(const Pass *pass, int64_t m) {
    const int64_t all = pass->total_nodes, row = pass->real_nodes[m] / pass->nodes, node = pass->first_node + pass->real_nodes[m] % pass->nodes;
    const uint8_t *sees = pass->ancestors + ((pass->shared_tree ? 0 : row) * all + node) * all;
    const int64_t *spots = pass->positions + row * all;
    int32_t *path = pass->paths + m * all;
    memset(path, 0, all * sizeof *path);
    for (int64_t j = 0; j < all; j++)
        if (sees[j]) {
            EXPECT(spots[j] >= pass->lengths[row] && spots[j] - pass->lengths[row] < all);
            path[spots[j] - pass->lengths[row]] = (int32_t)j;
        }
}

/* Attention of all nodes; threads take what is left, in any order. */
static void mix(const Model *model, const Pass *pass, int64_t layer, Work *work, const Team *team) {
    const int64_t width = model->head_dim, groups = model->kv_heads, group = model->heads / groups;
    int64_t heads = group < QUERIES ? group : QUERIES;
    if (pass->rows * groups * pass->nodes < team->threads) heads = 1; /* or threads would have nothing to do */
    const int64_t cuts = (group + heads - 1) / heads, fit = QUERIES / heads, least = (pass->nodes + fit - 1) / fit;
    const int64_t items = pass->rows * groups * cuts * least; /* few that threads do not share evenly are split */
    const int64_t uneven = items % team->threads && items < 4 * team->threads && 4 * least * team->threads <= pass->nodes;
    const int64_t goes = uneven ? least * team->threads : least, together = goes ? (pass->nodes + goes - 1) / goes : 1;
    const int64_t stride = slot_width(model, pass);
    begin_few(2, heads < LANES ? heads : LANES);
    for (int64_t item; (item = take(team)) < pass->rows * groups * cuts * goes;) {
        const int64_t go = item % goes, cut = item / goes % cuts, g = item / goes / cuts % groups;
        const int64_t row = item / goes / cuts / groups, first = go * together;
        const int64_t nodes = pass->row_starts[row + 1] - pass->row_starts[row];
        const int64_t last = first + together < nodes ? first + together : nodes;
        if (first >= last) continue;
        const int64_t head = g * group + cut * heads, end = (g + 1) * group;
        const int64_t start = pass->row_starts[row] * model->heads * width;
        const int64_t cached = row * pass->capacity * stride + g * width;
        attend(
            work, pass->query + start, pass->attention + start, model->heads, head,
            head + heads < end ? head + heads : end, width, pass->cache[2 * layer] + cached,
            pass->cache[2 * layer + 1] + cached, stride, first, last, pass->positions + row * pass->total_nodes + pass->first_node,
            pass->lengths[row], pass->ancestors ? pass->paths + pass->row_starts[row] * pass->total_nodes : NULL, pass->total_nodes,
            model->layer[layer].window, model->attention_scale
        );
    }
    end();
    meet(team);
}

/* Copies of states `first` .. `last` - 1 before this layer, where they are asked for. */
static void tap(const Model *model, const Pass *pass, int64_t layer, int64_t first, int64_t last) {
    const int64_t width = model->hidden, ends = layer == model->layers && !model->pair_norms;
    for (int64_t i = 0; i < pass->taps; i++) {
        if (pass->tap_layers[i] != layer) continue;
        for (int64_t m = first; m < last; m++) {
            const int64_t place = pass->real_nodes[m];
            float found[width], *to = pass->tapped ? pass->tapped + (i * pass->rows * pass->nodes + place) * width : found;
            scaled(pass->hidden_states + m * width, ends ? model->norm : NULL, width, model->eps, to);
            for (int64_t k = 0; k < width && !pass->tapped; k++) pass->features[i][place * width + k] = to_held(found[k]);
        }
    }
}

/* The asked places that are no padding. Returns how many there are. */
static int64_t asked(const Pass *pass) {
    int64_t count = 0;
    EXPECT(pass->logit_count <= pass->nodes);
    for (int64_t i = 0; i < pass->rows * pass->logit_count; i++) {
        const int64_t row = i / pass->logit_count, node = pass->logit_nodes[i % pass->logit_count];
        EXPECT(node >= 0 && node < pass->nodes);
        if (node >= pass->row_starts[row + 1] - pass->row_starts[row]) continue;
        pass->logit_from[count] = pass->row_starts[row] + node;
        pass->logit_to[count++] = i;
    }
    return count;
}

/* The logits of these `count` places: their norms first, in the workspace of `normed`. */
static void spoken(const Model *model, const Pass *pass, int64_t count, const Team *team) {
    const int64_t width = model->hidden;
    for (int64_t i = own_first(team, count); i < own_last(team, count); i++) {
        float found[width];
        scaled(pass->hidden_states + pass->logit_from[i] * width, model->norm, width, model->eps, found);
        to_inputs(found, width, pass->normed + i * width);
    }
    meet(team);
    product(
        pass->normed, count, width, model->head, NULL, model->vocab, pass->logits, pass->logit_to, model->vocab, 0, team
    );
}

/* Find the nodes that are no padding, and bring their states together. Returns how many there are. */
static int64_t together(const Model *model, const Pass *pass) {
    int64_t count = 0;
    EXPECT(pass->rows > 0 && pass->nodes > 0 && pass->first_node + pass->nodes == pass->total_nodes && pass->threads > 0);
    for (int64_t row = 0; row < pass->rows; row++) {
        const int64_t nodes = pass->sizes ? pass->sizes[row] - pass->first_node : pass->nodes;
        pass->row_starts[row] = count;
        for (int64_t i = 0; i < nodes && i < pass->nodes; i++, count++) {
            const int64_t place = row * pass->nodes + i;
            EXPECT(!pass->tokens || (pass->tokens[place] >= 0 && pass->tokens[place] < pass->embedding_rows));
            pass->real_nodes[count] = (int32_t)place;
            if (pass->tokens)
                for (int64_t k = 0; k < model->hidden; k += LANES)
                    STORE(
                        pass->hidden_states + count * model->hidden + k,
                        READ(pass->embeddings + pass->tokens[place] * model->hidden + k)
                    );
            else if (place != count)
                memcpy(
                    pass->hidden_states + count * model->hidden, pass->hidden_states + place * model->hidden,
                    model->hidden * sizeof(float)
                );
        }
    }
    pass->row_starts[pass->rows] = count;
    return count;
}

typedef struct {
    const Model *model;
    const Pass *pass;
    int64_t rows, logits; /* nodes; those whose logits are asked for */
} Forward;

static void forward_task(const Team *team, const void *call) {
    const Forward *of = call;
    const Model *model = of->model;
    const Pass *pass = of->pass;
    const int64_t rows = of->rows, hidden = model->hidden, width = model->head_dim;
    const int64_t wide = model->heads * width, narrow = model->kv_heads * width, stride = wide + 2 * narrow;
    const int64_t first = own_first(team, rows), last = own_last(team, rows);
    Work work;
    for (int64_t m = first; m < last && pass->ancestors; m++) walk(pass, m);
    if (model->input_proj.data) {
        to_inputs(
            pass->inputs + first * model->input_dim, (last - first) * model->input_dim, pass->normed + first * model->input_dim
        );
        meet(team);
        product(
            pass->normed, rows, model->input_dim, model->input_proj, model->input_bias, hidden, pass->hidden_states, NULL, hidden, 0,
            team
        );
        meet(team);
    }
    for (int64_t l = 0; l < model->layers; l++) {
        const Layer *own = model->layer + l;
        const int64_t pair = !l && model->pair_norms, reads = pair ? 2 * hidden : hidden;
        tap(model, pass, l, first, last);
        if (pair)
            paired(model, pass, first, last);
        else
            normed(model, pass, own->attention_norm, first, last);
        meet(team);
        product(pass->normed, rows, reads, own->q, own->q_bias, wide, pass->qkv, NULL, stride, 0, team);
        product(pass->normed, rows, reads, own->k, own->k_bias, narrow, pass->qkv + wide, NULL, stride, 0, team);
        product(
            pass->normed, rows, reads, own->v, own->v_bias, narrow, pass->qkv + wide + narrow, NULL, stride, 0, team
        );
        meet(team);
        for (int64_t m = first; m < last; m++) placed(model, pass, l, m);
        meet(team);
        mix(model, pass, l, &work, team);
        product(pass->attention, rows, wide, own->o, own->o_bias, hidden, pass->hidden_states, NULL, hidden, 1, team);
        meet(team);
        normed(model, pass, own->mlp_norm, first, last);
        meet(team);
        gated(pass->normed, rows, hidden, own->gate, own->up, model->intermediate, pass->mlp, team);
        meet(team);
        product(pass->mlp, rows, model->intermediate, own->down, NULL, hidden, pass->hidden_states, NULL, hidden, 1, team);
        meet(team);
    }
    tap(model, pass, model->layers, first, last);
    meet(team);
    if (model->head.data) spoken(model, pass, of->logits, team);
    meet(team);
}

void forward(const Model *model, const Pass *pass) {
    const int64_t since = now(), rows = together(model, pass), logits = model->head.data ? asked(pass) : 0;
    const Region region = run_pass(pass, forward_task, &(Forward){model, pass, rows, logits});
    if (rows <= ROWS) /* with many, uneven shares take longer than the spins */
        judge(pass->threads, region.threads, now() - since, region.late);
}

#if defined(HALVES) && !defined(TILES)
typedef struct {
    const Matrix *w;
    const act_t *x;
    int64_t n, width, outputs;
    float *y;
} Multiply;

static void multiply_task(const Team *team, const void *call) {
    const Multiply *of = call;
    product(of->x, of->n, of->width, *of->w, NULL, of->outputs, of->y, NULL, of->outputs, 0, team);
}

/* y = x W^T of one matrix, for those who check it. `given`: room for x, as the input of a product; `scratch`: of
   `scratch_bytes` for each thread. */
void multiply(
    const Matrix *w, const float *x, int64_t n, int64_t width, int64_t outputs, float *y, int64_t threads, act_t *given,
    char *scratch
) {
    to_inputs(x, n * width, given);
    run(threads, scratch, scratch_bytes(n, width), multiply_task, &(Multiply){w, given, n, width, outputs, y});
}
#endif

#include "noise.h"

#include "reading.h"

#include "draft.h"

#include "hydra.h"

#include "mamba.h"

#include "lattice.h"

#include "heads.h"

#include "walk.h"

#if defined(NARROW) || defined(HALVES) && LANES == 8
const int64_t block_lanes = LANES;
#else
const int64_t block_lanes = 0;
#endif
#if defined(HALVES) && !defined(TILES)
const int64_t integer_products = 1;
#else
const int64_t integer_products = 0;
#endif
