/* What a drafter reads of committed text before it drafts: features of the target, each with the next token. (The
   structure of a whole draft call stands here as well, since this file comes first.)

   Later steps use only the keys and values of earlier pairs. With the joining product before them these take about a
   fifth of the weights. So of many pairs that wait, the layer as a whole reads each row's last one alone, which the draft
   begins with. */

/* Keys and values of `count` inputs of `reads` numbers each, which lie in `normed`, written behind their rows' texts.
   `live`: the row of each; `starts`: the first of each row. */
static void remembered(
    const Model *model, const Pass *pass, int64_t layer, int64_t reads, int64_t count, const int64_t *lengths,
    const Team *team
) {
    const Layer *own = model->layer + layer;
    const int64_t narrow = model->kv_heads * model->head_dim;
    product(pass->normed, count, reads, own->k, own->k_bias, narrow, pass->qkv, NULL, 2 * narrow, 0, team);
    product(pass->normed, count, reads, own->v, own->v_bias, narrow, pass->qkv + narrow, NULL, 2 * narrow, 0, team);
    meet(team);
    for (int64_t m = own_first(team, count); m < own_last(team, count); m++) {
        const int64_t row = pass->real_nodes[m], place = lengths[row] + m - pass->row_starts[row];
        written(model, pass, layer, place, row * pass->capacity + place, pass->qkv + m * 2 * narrow);
    }
    meet(team);
}

/* Which row each thing that waits is of. Returns how many there are. */
static int64_t counted(const Pass *pass, const int64_t *waiting) {
    int64_t count = 0;
    for (int64_t r = 0; r < pass->rows; r++) {
        pass->row_starts[r] = count;
        for (int64_t i = 0; i < waiting[r]; i++) pass->real_nodes[count++] = (int32_t)r;
    }
    return count;
}

typedef struct {
    const Model *step;
    const Pass *pass;
    const Draft *draft;
    int64_t count; /* pairs that wait */
} Reading;

static void given_pairs_task(const Team *team, const void *call) {
    const Reading *of = call;
    const Pass *pass = of->pass;
    const Draft *draft = of->draft;
    const int64_t hidden = of->step->hidden, taps = draft->taps, count = of->count;
    float *given = (float *)pass->inputs;
    const int64_t first = own_first(team, count), last = own_last(team, count);
    for (int64_t i = first; i < last; i++) {
        EXPECT(draft->next_tokens[i] >= 0 && draft->next_tokens[i] < draft->embedding_rows);
        const kv_t *embedding = draft->embeddings + draft->next_tokens[i] * hidden;
        float *to = given + i * 2 * hidden;
        for (int64_t k = 0; k < hidden; k += LANES) STORE(to + k, HELD(embedding + k));
        for (int64_t k = 0; k < hidden && !draft->fuse.data; k += LANES)
            STORE(to + hidden + k, HELD(draft->features[i] + k));
    }
    if (draft->fuse.data) {
        collected(pass, draft->features, draft->feature_dim, first * taps, last * taps);
        meet(team);
        product(
            pass->normed, count, taps * draft->feature_dim, draft->fuse, NULL, hidden, given + hidden, NULL, 2 * hidden, 0,
            team
        );
    }
    meet(team);
}

/* The first product's input of each pair that waits: its embedding, and beside it its feature, or for EAGLE-3 one vector
   of its features. Returns how many pairs there are. */
static int64_t given_pairs(const Model *step, const Pass *pass, const Draft *draft) {
    const int64_t count = counted(pass, draft->pending);
    run_pass(pass, given_pairs_task, &(Reading){step, pass, draft, count});
    return count;
}

static void read_keys_task(const Team *team, const void *call) {
    const Reading *of = call;
    const Model *step = of->step;
    const Pass *pass = of->pass;
    const int64_t hidden = step->hidden, joined = step->input_dim, count = of->count;
    const int64_t first = own_first(team, count), last = own_last(team, count);
    if (step->input_proj.data) {
        to_inputs(pass->inputs + first * joined, (last - first) * joined, pass->normed + first * joined);
        meet(team);
        product(pass->normed, count, joined, step->input_proj, step->input_bias, hidden, pass->hidden_states, NULL, hidden, 0, team);
        meet(team);
    }
    if (step->pair_norms)
        paired(step, pass, first, last);
    else
        normed(step, pass, step->layer->attention_norm, first, last);
    meet(team);
    remembered(step, pass, 0, step->pair_norms ? 2 * hidden : hidden, count, of->draft->lengths, team);
}

/* Keys and values of the pairs that wait. */
static void read_keys(const Model *step, const Pass *pass, const Draft *draft) {
    const int64_t count = given_pairs(step, pass, draft);
    run_pass(pass, read_keys_task, &(Reading){step, pass, draft, count});
}

/* Feed the pairs that wait to the layer, behind each row's text. */
static void feed_pairs(const Model *step, Pass *pass, Draft *draft) {
    const int64_t hidden = step->hidden, waits = draft->most_pending;
    given_pairs(step, pass, draft);
    for (int64_t r = 0; r < pass->rows; r++)
        for (int64_t i = 0; i < waits; i++) draft->positions[r * waits + i] = draft->lengths[r] + i;
    pass->nodes = pass->total_nodes = waits;
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
        memcpy(draft->last_hidden + r * hidden, pass->tapped + (r * waits + count - 1) * hidden, hidden * sizeof(float));
        draft->lengths[r] += count;
    }
}

/* Read the pairs that wait. Few: all go through the layer. Many: their keys and values first, and then each row's last
   one goes through the layer. */
static void read_pairs(const Model *step, Pass *pass, Draft *draft) {
    const int64_t rows = pass->rows, taps = draft->taps;
    if (draft->most_pending <= MAX_FED_PAIRS) {
        feed_pairs(step, pass, draft);
        return;
    }
    const kv_t **features = draft->last_features;
    int64_t *behind = draft->last_tokens, *waiting = draft->last_pending, count = 0, ends = 0;
    read_keys(step, pass, draft);
    for (int64_t r = 0; r < rows; r++) { /* the layer reads the last one of each */
        waiting[r] = draft->pending[r] > 0;
        count += draft->pending[r];
        if (!waiting[r]) continue;
        for (int64_t i = 0; i < taps; i++) features[ends * taps + i] = draft->features[(count - 1) * taps + i];
        behind[ends++] = draft->next_tokens[count - 1];
        draft->lengths[r] += draft->pending[r] - 1;
    }
    Draft last_ones = *draft;
    last_ones.most_pending = 1;
    last_ones.pending = waiting;
    last_ones.features = features;
    last_ones.next_tokens = behind;
    feed_pairs(step, pass, &last_ones);
}
