/* A Mamba-2 as a drafter (nets/mamba.py has a step of it in tensors) in one call: read the tokens that wait, and grow a
   tree of EAGLE-2's kind. Every node that is fed keeps its state in a slot of its own; the root's is slot 0. */

/* The convolution's output for one node, which lies behind the gate in `made`; what it saw moves on by one. */
static void convolved(const Mamba *mamba, const MambaLayer *own, const kv_t *before, kv_t *after, float *x) {
    const int64_t channels = mamba->intermediate + 2 * mamba->groups * mamba->state_size, kernel = mamba->conv_kernel, kept = kernel - 1;
    for (int64_t c = 0; c < channels; c++) {
        const kv_t *old = before + c * kept;
        kv_t *new = after + c * kept;
        const float *taps = own->conv_weight + c * kernel;
        float sum = own->conv_bias[c] + x[c] * taps[kept];
        for (int64_t k = 0; k < kept; k++) sum += from_held(old[k]) * taps[k];
        for (int64_t k = 0; k + 1 < kept; k++) new[k] = old[k + 1];
        new[kept - 1] = to_held(x[c]);
        x[c] = sum;
    }
    for (int64_t c = 0; c < channels; c += LANES) STORE(x + c, silu(LOAD(x + c)));
}

/* One node of one layer: what its product made becomes what `out` reads, and its state goes from slot to slot. */
static void remembers(
    const Mamba *mamba, const MambaLayer *own, const float *old, float *new, float *made, act_t *to
) {
    const int64_t inner = mamba->intermediate, states = mamba->state_size, width = mamba->head_dim, each = mamba->heads / mamba->groups;
    const float *b = made + 2 * inner, *c = b + mamba->groups * states, *times = c + mamba->groups * states;
    float y[inner];
    for (int64_t h = 0; h < mamba->heads; h++) {
        const float raw = times[h] + own->dt_bias[h], soft = raw > 20 ? raw : log1pf(expf(raw));
        const float time = fminf(fmaxf(soft, mamba->dt_min), mamba->dt_max);
        const vector decay = ALL(expf(time * own->a[h]));
        const float *keys = b + h / each * states, *asks = c + h / each * states;
        for (int64_t p = 0; p < width; p++) {
            const int64_t at = h * width + p;
            const float x = made[inner + at];
            const vector added = ALL(time * x);
            vector sum = ZERO;
            for (int64_t s = 0; s < states; s += LANES) {
                const vector now = FMA(added, LOAD(keys + s), MUL(decay, LOAD(old + at * states + s)));
                STORE(new + at * states + s, now);
                sum = FMA(now, LOAD(asks + s), sum);
            }
            y[at] = sum_of(sum) + x * own->d[h];
        }
    }
    for (int64_t k = 0; k < inner; k += LANES) STORE(y + k, MUL(LOAD(y + k), silu(LOAD(made + k))));
    for (int64_t k = 0; k < inner; k += mamba->norm_group)
        normalise(y + k, own->gated_norm + k, mamba->norm_group, mamba->gated_eps, y + k);
    to_inputs(y, inner, to);
}

/* The norms of nodes `first` .. `last` - 1, as the input of a product. */
static void read_norms(const Mamba *mamba, const Pass *pass, const float *weight, int64_t first, int64_t last) {
    float found[mamba->hidden];
    for (int64_t i = first; i < last; i++) {
        normalise(pass->hidden_states + i * mamba->hidden, weight, mamba->hidden, mamba->eps, found);
        to_inputs(found, mamba->hidden, pass->normed + i * mamba->hidden);
    }
}

typedef struct {
    const Mamba *mamba;
    const MambaStates *states;
    const Pass *pass;
    int64_t count, speak;
} Step;

static void advance_task(const Team *team, const void *call) {
    const Step *of = call;
    const Mamba *mamba = of->mamba;
    const MambaStates *states = of->states;
    const Pass *pass = of->pass;
    const int64_t hidden = mamba->hidden, inner = mamba->intermediate, kept = mamba->conv_kernel - 1, count = of->count;
    const int64_t channels = inner + 2 * mamba->groups * mamba->state_size, memory = inner * mamba->state_size;
    const int64_t all = pass->rows * states->slots;
    const int64_t first = own_first(team, count), last = own_last(team, count);
    for (int64_t i = first; i < last; i++)
        EXPECT(states->token[i] >= 0 && states->token[i] < mamba->embedding_rows && states->source[i] < all && states->target[i] < all);
    for (int64_t i = first; i < last; i++)
        for (int64_t k = 0; k < hidden; k += LANES)
            STORE(pass->hidden_states + i * hidden + k, HELD(mamba->embeddings + states->token[i] * hidden + k));
    for (int64_t l = 0; l < mamba->layers; l++) {
        const MambaLayer *own = mamba->layer + l;
        read_norms(mamba, pass, own->norm, first, last);
        meet(team);
        product(
            pass->normed, count, hidden, own->in_proj, NULL, mamba->in_proj_rows, pass->qkv, NULL, mamba->in_proj_rows, 0, team
        );
        meet(team);
        for (int64_t i = first; i < last; i++) {
            const int64_t from = l * all + states->source[i], to = l * all + states->target[i];
            float *made = pass->qkv + i * mamba->in_proj_rows;
            convolved(
                mamba, own, states->conv + from * channels * kept, states->conv + to * channels * kept, made + inner
            );
            remembers(
                mamba, own, states->ssm + from * memory, states->ssm + to * memory, made, pass->attention + i * inner
            );
        }
        meet(team);
        product(pass->attention, count, inner, own->out_proj, NULL, hidden, pass->hidden_states, NULL, hidden, 1, team);
        meet(team);
    }
    if (of->speak) {
        read_norms(mamba, pass, mamba->norm, first, last);
        meet(team);
        product(
            pass->normed, count, hidden, mamba->head, NULL, mamba->vocab, pass->logits, NULL,
            mamba->vocab, 0, team
        );
        meet(team);
    }
}

/* A step of `count` nodes from slots to slots, each by its token; with `speak`, the logits behind them. */
static void advance(const Mamba *mamba, const MambaStates *states, Pass *pass, int64_t count, int64_t speak) {
    run_pass(pass, advance_task, &(Step){mamba, states, pass, count, speak});
}

/* Read what waits, `behind`, row by row, into slot 0; the logits are those behind each row's last token. */
static void read_waiting(const Mamba *mamba, const MambaStates *states, Pass *pass, const Draft *draft) {
    for (int64_t step = 0; step < draft->most_pending; step++) {
        int64_t count = 0, at = 0;
        for (int64_t r = 0; r < pass->rows; at += draft->pending[r++]) {
            const int64_t place = step - (draft->most_pending - draft->pending[r]); /* all rows end together */
            if (place < 0) continue;
            states->source[count] = states->target[count] = r * states->slots;
            states->token[count++] = draft->next_tokens[at + place];
        }
        advance(mamba, states, pass, count, step + 1 == draft->most_pending);
    }
}

/* One step alone, for trees that are grown elsewhere. */
void step_mamba(const Mamba *mamba, const MambaStates *states, Pass *pass, int64_t count) {
    advance(mamba, states, pass, count, 1);
}

/* A tree for every row; `waits`: what is read before, the root last. `depth` 0: that alone, and the logits behind it. */
void draft_mamba(const Mamba *mamba, const MambaStates *states, Pass *pass, Draft *draft) {
    const int64_t rows = pass->rows, most = (draft->depth - 1) * draft->width;
    const Model head = {.vocab = mamba->vocab};
    int64_t above = 0, wide = 1, before = 0, candidates = 1, *ends = draft->ends;
    read_waiting(mamba, states, pass, draft);
    if (!draft->depth) return;
    rooted(draft, rows);
    for (int64_t layer = 0; layer < draft->depth; layer++) {
        const int64_t first = candidates;
        rank_all(&head, pass, draft, above, wide, layer, first);
        candidates += wide * draft->top_k;
        if (layer + 1 == draft->depth) break;
        above = before;
        wide = choose(draft, rows, before, first, candidates - first, ends);
        if (!wide) break;
        for (int64_t i = 0; i < rows * wide; i++) {
            const int64_t r = i / wide, place = draft->fed_candidate[r * most + above + i % wide], at = r * draft->max_candidates;
            const int64_t node = place < 0 ? 0 : place, up = draft->parent[at + node]; /* a row may have fewer */
            states->source[i] = r * states->slots + (up ? 1 + draft->fed[at + up] : 0);
            states->target[i] = r * states->slots + 1 + above + i % wide;
            states->token[i] = draft->token[at + node];
        }
        advance(mamba, states, pass, rows * wide, 1);
        before += wide;
    }
    keep(draft, rows, candidates);
}
