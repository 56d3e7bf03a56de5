/* One pass of a Llama-shaped model over tree nodes, or over a chunk of prompts: `parts.py` has the same structures for Python. */

#include "vectors.h"

#include "team.h"

#include "formats.h"

#include "blocks.h"

#include "products.h"

#include "scores.h"

#include "values.h"

#include "attention.h"

typedef struct {
    Matrix q, k, v, o, gate, up, down;
    const float *norm, *norm_inner, *norm_q, *norm_k; /* all but norm_inner, and biases, may be NULL */
    const float *bias_q, *bias_k, *bias_v, *bias_o;
    integer window; /* 0: none */
    integer turned; /* are positions marked by rotation? */
} Layer;

typedef struct {
    integer hidden, inner, heads, groups, width, layers, vocabulary;
    float epsilon, scale;
    const Layer *layer;
    const float *norm;  /* NULL: none */
    Matrix head; /* NULL: no logits are asked for */
    Matrix join; /* [hidden, joined]: makes the states of what is given, with its bias; or both NULL */
    const float *bias_join;
    integer joined;
    /* [2 * hidden]: EAGLE-3's norms of the embedding and the vector that are given, or NULL. `norm` is the head's alone then. */
    const float *norm_given;
} Model;

typedef struct {
    integer rows, nodes, since, all; /* of each row, the nodes `since` .. `all` - 1 are read: `nodes` */
    integer capacity;                /* slots from one row of the cache to the next */
    integer shared;                  /* one tree's shape for all rows */
    const integer *lengths, *spots;  /* [rows], [rows, all] */
    const integer *sizes;            /* [rows]: nodes of each row, behind which there is padding; NULL: all */
    const uint8_t *ancestors;        /* [rows or 1, all, all]; NULL for a chunk */
    held *const *cache;              /* keys and values of each layer: [rows, capacity, beside * groups * width] */
    const float *turns;              /* cosines and sines [position, 2, width] */
    integer positions;               /* of `turns` */
    const float *given;              /* [rows * nodes, joined] */
    const integer *tokens;           /* [rows * nodes], whose embeddings are read; NULL: `states` are there */
    const number *embeddings;        /* [entries, hidden] */
    integer entries;
    float *states;                   /* [rows * nodes, hidden]: changed in place and moved together */
    input *normed, *query, *seen, *inside; /* room: [rows * nodes, hidden or joined], two of heads * width, inner */
    float *made;                     /* [rows * nodes, (heads + 2 groups) * width] */
    int32_t *paths;                  /* [rows * nodes, all] */
    int32_t *live;                   /* [rows * nodes]: the places of the nodes that are no padding, in order */
    integer *starts;                 /* [rows + 1]: where each row begins among these */
    integer taps;
    const integer *tap;  /* layers before which states are copied; `layers`: after the last norm */
    float *tapped;       /* [taps, rows * nodes, hidden]; NULL: `features` are written instead */
    held *const *features; /* of each tap, [rows * nodes, hidden], in the precision of keys */
    integer asked;
    const integer *ask; /* [asked]: places within `nodes` of each row, in order */
    float *logits;      /* [rows, asked, vocabulary] */
    integer threads;
    integer beside; /* layers whose keys and values lie side by side in a slot of the cache; 0 or 1: one */
    integer *from, *to;   /* workspace: [rows * nodes]: the nodes whose logits are asked for, and where these go */
    char *scratch;        /* workspace: [threads, scratch_each] bytes */
    integer scratch_each; /* `scratch_bytes` at least */
} Pass;

/* Where the threads of a call meet, and what they write over. */
INLINE Gate gate_of(const Pass *pass) {
    return (Gate){.scratch = pass->scratch, .bytes = pass->scratch_each};
}

/* Numbers from one slot of the cache to the next. */
INLINE integer slot_width(const Model *model, const Pass *pass) {
    return (pass->beside > 1 ? pass->beside : 1) * model->groups * model->width;
}

static void normalise(const float *x, const float *weight, integer width, float epsilon, float *y) {
    vector total = ZERO;
    for (integer k = 0; k < width; k += LANES) total = FMA(LOAD(x + k), LOAD(x + k), total);
    const float root = 1.0f / sqrtf(sum_of(total) / (float)width + epsilon);
    for (integer k = 0; k < width; k += LANES) STORE(y + k, MUL(MUL(LOAD(x + k), ALL(root)), LOAD(weight + k)));
}

/* The same, or a copy where there is no norm. */
static void scaled(const float *x, const float *weight, integer width, float epsilon, float *y) {
    if (weight)
        normalise(x, weight, width, epsilon, y);
    else
        memcpy(y, x, width * sizeof(float));
}

/* The norm of rows `first` .. `last` - 1, as the input of a product. */
static void normed(const Model *model, const Pass *pass, const float *weight, integer first, integer last) {
    float found[model->hidden];
    for (integer m = first; m < last; m++) {
        scaled(pass->states + m * model->hidden, weight, model->hidden, model->epsilon, found);
        to_inputs(found, model->hidden, pass->normed + m * model->hidden);
    }
}

/* EAGLE-3: the first layer reads the norms of an embedding and of a vector side by side, and adds to the vector. */
static void paired(const Model *model, const Pass *pass, integer first, integer last) {
    const integer hidden = model->hidden;
    float found[2 * hidden];
    for (integer m = first; m < last; m++) {
        const float *given = pass->given + m * 2 * hidden;
        for (integer k = 0; k < 2 * hidden; k += hidden)
            normalise(given + k, model->norm_given + k, hidden, model->epsilon, found + k);
        to_inputs(found, 2 * hidden, pass->normed + m * 2 * hidden);
        memcpy(pass->states + m * hidden, given + hidden, hidden * sizeof(float));
    }
}

/* Features `first` .. `last` - 1, as the input of a product. */
static void collected(const Pass *pass, const held *const *features, integer width, integer first, integer last) {
    for (integer i = first; i < last; i++)
        for (integer k = 0; k < width; k += LANES) STORE_INPUT(pass->normed + i * width + k, HELD(features[i] + k));
}

/* One head's numbers, normalised and turned by its position. */
static void turn(const Model *model, const Pass *pass, const float *norm, integer turned, integer place, float *x) {
    const integer width = model->width, half = width / 2;
    if (norm) normalise(x, norm, width, model->epsilon, x);
    if (!turned) return;
    const float *cosine = pass->turns + (place < pass->positions ? place : pass->positions - 1) * 2 * width;
    const float *sine = cosine + width;
    for (integer k = 0; k < half; k++) {
        const float a = x[k], b = x[k + half];
        x[k] = a * cosine[k] - b * sine[k];
        x[k + half] = b * cosine[k + half] + a * sine[k + half];
    }
}

/* Keys turned by their place, and values, written to a slot of the cache; both lie at `made`. */
static void written(const Model *model, const Pass *pass, integer layer, integer place, integer slot, float *made) {
    const Layer *own = model->layer + layer;
    const integer width = model->width, groups = model->groups, at = slot * slot_width(model, pass);
    for (integer g = 0; g < groups; g++) turn(model, pass, own->norm_k, own->turned, place, made + g * width);
    held *keys = pass->cache[2 * layer] + at, *values = pass->cache[2 * layer + 1] + at;
    for (integer k = 0; k < groups * width; k++) {
        keys[k] = to_held(made[k]);
        values[k] = to_held(made[groups * width + k]);
    }
}

/* Of node m: queries turned, keys and values written to the cache. */
static void placed(const Model *model, const Pass *pass, integer layer, integer m) {
    const Layer *own = model->layer + layer;
    const integer width = model->width, heads = model->heads, row = pass->live[m] / pass->nodes;
    const integer node = pass->since + pass->live[m] % pass->nodes, place = pass->spots[row * pass->all + node];
    EXPECT(place >= 0 && pass->lengths[row] + node < pass->capacity);
    float *made = pass->made + m * (heads + 2 * model->groups) * width;
    for (integer h = 0; h < heads; h++) turn(model, pass, own->norm_q, own->turned, place, made + h * width);
    to_inputs(made, heads * width, pass->query + m * heads * width);
    written(model, pass, layer, place, row * pass->capacity + pass->lengths[row] + node, made + heads * width);
}

/* The slots of each node's path, by depth, counted from its row's length. */
static void walk(const Pass *pass, integer m) {
    const integer all = pass->all, row = pass->live[m] / pass->nodes, node = pass->since + pass->live[m] % pass->nodes;
    const uint8_t *sees = pass->ancestors + ((pass->shared ? 0 : row) * all + node) * all;
    const integer *spots = pass->spots + row * all;
    int32_t *path = pass->paths + m * all;
    memset(path, 0, all * sizeof *path);
    for (integer j = 0; j < all; j++)
        if (sees[j]) {
            EXPECT(spots[j] >= pass->lengths[row] && spots[j] - pass->lengths[row] < all);
            path[spots[j] - pass->lengths[row]] = (int32_t)j;
        }
}

/* Attention of all nodes; threads take what is left, in any order. */
static void mix(const Model *model, const Pass *pass, integer layer, Work *work, const Team *team) {
    const integer width = model->width, groups = model->groups, group = model->heads / groups;
    integer heads = group < QUERIES ? group : QUERIES;
    if (pass->rows * groups * pass->nodes < team->threads) heads = 1; /* or threads would have nothing to do */
    const integer cuts = (group + heads - 1) / heads, fit = QUERIES / heads, least = (pass->nodes + fit - 1) / fit;
    const integer items = pass->rows * groups * cuts * least; /* few that threads do not share evenly are split */
    const integer uneven = items % team->threads && items < 4 * team->threads && 4 * least * team->threads <= pass->nodes;
    const integer goes = uneven ? least * team->threads : least, together = goes ? (pass->nodes + goes - 1) / goes : 1;
    const integer stride = slot_width(model, pass);
    begin_few(2, heads < LANES ? heads : LANES);
#pragma omp for schedule(dynamic, 1) nowait
    for (integer item = 0; item < pass->rows * groups * cuts * goes; item++) {
        const integer go = item % goes, cut = item / goes % cuts, g = item / goes / cuts % groups;
        const integer row = item / goes / cuts / groups, first = go * together;
        const integer nodes = pass->starts[row + 1] - pass->starts[row];
        const integer last = first + together < nodes ? first + together : nodes;
        if (first >= last) continue;
        const integer head = g * group + cut * heads, end = (g + 1) * group;
        const integer start = pass->starts[row] * model->heads * width;
        const integer cached = row * pass->capacity * stride + g * width;
        attend(
            work, pass->query + start, pass->seen + start, model->heads, head,
            head + heads < end ? head + heads : end, width, pass->cache[2 * layer] + cached,
            pass->cache[2 * layer + 1] + cached, stride, first, last, pass->spots + row * pass->all + pass->since,
            pass->lengths[row], pass->ancestors ? pass->paths + pass->starts[row] * pass->all : NULL, pass->all,
            model->layer[layer].window, model->scale
        );
    }
    end();
    meet(team);
}

/* Copies of states `first` .. `last` - 1 before this layer, where they are asked for. */
static void tap(const Model *model, const Pass *pass, integer layer, integer first, integer last) {
    const integer width = model->hidden, ends = layer == model->layers && !model->norm_given;
    for (integer i = 0; i < pass->taps; i++) {
        if (pass->tap[i] != layer) continue;
        for (integer m = first; m < last; m++) {
            const integer place = pass->live[m];
            float found[width], *to = pass->tapped ? pass->tapped + (i * pass->rows * pass->nodes + place) * width : found;
            scaled(pass->states + m * width, ends ? model->norm : NULL, width, model->epsilon, to);
            for (integer k = 0; k < width && !pass->tapped; k++) pass->features[i][place * width + k] = to_held(found[k]);
        }
    }
}

/* The asked places that are no padding. Returns how many there are. */
static integer asked(const Pass *pass) {
    integer count = 0;
    EXPECT(pass->asked <= pass->nodes);
    for (integer i = 0; i < pass->rows * pass->asked; i++) {
        const integer row = i / pass->asked, node = pass->ask[i % pass->asked];
        EXPECT(node >= 0 && node < pass->nodes);
        if (node >= pass->starts[row + 1] - pass->starts[row]) continue;
        pass->from[count] = pass->starts[row] + node;
        pass->to[count++] = i;
    }
    return count;
}

/* The logits of these `count` places: their norms first, in the workspace of `normed`. */
static void spoken(const Model *model, const Pass *pass, integer count, const Team *team) {
    const integer width = model->hidden;
    for (integer i = own_first(team, count); i < own_last(team, count); i++) {
        float found[width];
        scaled(pass->states + pass->from[i] * width, model->norm, width, model->epsilon, found);
        to_inputs(found, width, pass->normed + i * width);
    }
    meet(team);
    product(
        pass->normed, count, width, model->head, NULL, model->vocabulary, pass->logits, pass->to, model->vocabulary, 0, team
    );
}

/* Find the nodes that are no padding, and bring their states together. Returns how many there are. */
static integer together(const Model *model, const Pass *pass) {
    integer count = 0;
    EXPECT(pass->rows > 0 && pass->nodes > 0 && pass->since + pass->nodes == pass->all && pass->threads > 0);
    for (integer row = 0; row < pass->rows; row++) {
        const integer nodes = pass->sizes ? pass->sizes[row] - pass->since : pass->nodes;
        pass->starts[row] = count;
        for (integer i = 0; i < nodes && i < pass->nodes; i++, count++) {
            const integer place = row * pass->nodes + i;
            EXPECT(!pass->tokens || (pass->tokens[place] >= 0 && pass->tokens[place] < pass->entries));
            pass->live[count] = (int32_t)place;
            if (pass->tokens)
                for (integer k = 0; k < model->hidden; k += LANES)
                    STORE(
                        pass->states + count * model->hidden + k,
                        READ(pass->embeddings + pass->tokens[place] * model->hidden + k)
                    );
            else if (place != count)
                memcpy(
                    pass->states + count * model->hidden, pass->states + place * model->hidden,
                    model->hidden * sizeof(float)
                );
        }
    }
    pass->starts[pass->rows] = count;
    return count;
}

void forward(const Model *model, const Pass *pass) {
    const integer rows = together(model, pass), hidden = model->hidden, width = model->width;
    const integer wide = model->heads * width, narrow = model->groups * width, stride = wide + 2 * narrow;
    const integer spoken_of = model->head.data ? asked(pass) : 0, since = now();
    integer hired = 1; /* may be fewer than were asked for */
    Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
    {
        const Team team = team_at(&gate);
        if (!team.thread) hired = team.threads;
        const integer first = own_first(&team, rows), last = own_last(&team, rows);
        Work work;
        for (integer m = first; m < last && pass->ancestors; m++) walk(pass, m);
        if (model->join.data) {
            to_inputs(
                pass->given + first * model->joined, (last - first) * model->joined, pass->normed + first * model->joined
            );
            meet(&team);
            product(
                pass->normed, rows, model->joined, model->join, model->bias_join, hidden, pass->states, NULL, hidden, 0,
                &team
            );
            meet(&team);
        }
        for (integer l = 0; l < model->layers; l++) {
            const Layer *own = model->layer + l;
            const integer pair = !l && model->norm_given, reads = pair ? 2 * hidden : hidden;
            tap(model, pass, l, first, last);
            if (pair)
                paired(model, pass, first, last);
            else
                normed(model, pass, own->norm, first, last);
            meet(&team);
            product(pass->normed, rows, reads, own->q, own->bias_q, wide, pass->made, NULL, stride, 0, &team);
            product(pass->normed, rows, reads, own->k, own->bias_k, narrow, pass->made + wide, NULL, stride, 0, &team);
            product(
                pass->normed, rows, reads, own->v, own->bias_v, narrow, pass->made + wide + narrow, NULL, stride, 0, &team
            );
            meet(&team);
            for (integer m = first; m < last; m++) placed(model, pass, l, m);
            meet(&team);
            mix(model, pass, l, &work, &team);
            product(pass->seen, rows, wide, own->o, own->bias_o, hidden, pass->states, NULL, hidden, 1, &team);
            meet(&team);
            normed(model, pass, own->norm_inner, first, last);
            meet(&team);
            gated(pass->normed, rows, hidden, own->gate, own->up, model->inner, pass->inside, &team);
            meet(&team);
            product(pass->inside, rows, model->inner, own->down, NULL, hidden, pass->states, NULL, hidden, 1, &team);
            meet(&team);
        }
        tap(model, pass, model->layers, first, last);
        meet(&team);
        if (model->head.data) spoken(model, pass, spoken_of, &team);
        meet(&team);
    }
    if (rows <= ROWS) judge(pass->threads, hired, now() - since, gate.late); /* with many, uneven shares take longer than the spins */
}

#if defined(HALVES) && !defined(TILES)
/* y = x W^T of one matrix, for those who check it. `given`: room for x, as the input of a product; `scratch`: of
   `scratch_bytes` for each thread. */
void multiply(
    const Matrix *w, const float *x, integer n, integer width, integer outputs, float *y, integer threads, input *given,
    char *scratch
) {
    Gate gate = {.scratch = scratch, .bytes = scratch_bytes(n, width)};
    to_inputs(x, n * width, given);
#pragma omp parallel num_threads((int)threads)
    {
        const Team team = team_at(&gate);
        product(given, n, width, *w, NULL, outputs, y, NULL, outputs, 0, &team);
    }
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

#ifdef OWN_THREADS
#include "own_threads.h"
#endif

/* What parts.py is held to when this code is loaded. */
const integer structure_sizes[] = {
    sizeof(Matrix), sizeof(Layer),     sizeof(Model),      sizeof(Pass),  sizeof(Draft), sizeof(Block),
    sizeof(Heads),  sizeof(HydraHead), sizeof(MambaLayer), sizeof(Mamba), sizeof(Slab),  sizeof(Walk),
};
const integer structures = sizeof structure_sizes / sizeof *structure_sizes;
const integer few_pairs = FEW, widest_head = WIDEST, block_numbers = GROUP;
