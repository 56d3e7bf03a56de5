/* A Mamba-2 as a drafter (nets/mamba.py has a step of it in tensors) in one call: read the tokens that wait, and grow a
   tree of EAGLE-2's kind. Every node that is fed keeps its state in a slot of its own; the root's is slot 0. */

typedef struct {
    Matrix in, out;    /* [outputs, hidden]: gate, what is convolved, time steps; [hidden, inner] */
    const float *norm; /* [hidden] */
    const float *taps; /* [channels, kernel] */
    const float *bias; /* [channels] */
    const float *bias_time, *rate, *skip; /* [heads]; rate: what decays in a unit of time, below 0 */
    const float *norm_out;                /* [inner] */
} MambaLayer;

typedef struct {
    integer hidden, inner, heads, width, states, groups, kernel, layers, vocabulary, outputs;
    integer normed;     /* numbers that the norm before `out` takes together */
    float epsilon, epsilon_out, shortest, longest; /* of norms; limits of time steps */
    const MambaLayer *layer;
    const float *norm;
    Matrix head;
    const held *embeddings; /* [entries, hidden] */
    integer entries;
} Mamba;

typedef struct {
    integer slots;   /* of a row */
    held *inputs;    /* [layers, rows, slots, channels, kernel - 1]: what the convolution saw last */
    float *memory;   /* [layers, rows, slots, heads, width, states] */
    integer *from, *to, *token; /* room: of every node of a step, slots of all rows side by side */
} Slab;

/* The convolution's output for one node, which lies behind the gate in `made`; what it saw moves on by one. */
static void convolved(const Mamba *mamba, const MambaLayer *own, const held *before, held *after, float *x) {
    const integer channels = mamba->inner + 2 * mamba->groups * mamba->states, kernel = mamba->kernel, kept = kernel - 1;
    for (integer c = 0; c < channels; c++) {
        const held *old = before + c * kept;
        held *new = after + c * kept;
        const float *taps = own->taps + c * kernel;
        float sum = own->bias[c] + x[c] * taps[kept];
        for (integer k = 0; k < kept; k++) sum += from_held(old[k]) * taps[k];
        for (integer k = 0; k + 1 < kept; k++) new[k] = old[k + 1];
        new[kept - 1] = to_held(x[c]);
        x[c] = sum;
    }
    for (integer c = 0; c < channels; c += LANES) STORE(x + c, silu(LOAD(x + c)));
}

/* One node of one layer: what its product made becomes what `out` reads, and its state goes from slot to slot. */
static void remembers(
    const Mamba *mamba, const MambaLayer *own, const float *old, float *new, float *made, input *to
) {
    const integer inner = mamba->inner, states = mamba->states, width = mamba->width, each = mamba->heads / mamba->groups;
    const float *b = made + 2 * inner, *c = b + mamba->groups * states, *times = c + mamba->groups * states;
    float y[inner];
    for (integer h = 0; h < mamba->heads; h++) {
        const float raw = times[h] + own->bias_time[h], soft = raw > 20 ? raw : log1pf(expf(raw));
        const float time = fminf(fmaxf(soft, mamba->shortest), mamba->longest);
        const vector decay = ALL(expf(time * own->rate[h]));
        const float *keys = b + h / each * states, *asks = c + h / each * states;
        for (integer p = 0; p < width; p++) {
            const integer at = h * width + p;
            const float x = made[inner + at];
            const vector added = ALL(time * x);
            vector sum = ZERO;
            for (integer s = 0; s < states; s += LANES) {
                const vector now = FMA(added, LOAD(keys + s), MUL(decay, LOAD(old + at * states + s)));
                STORE(new + at * states + s, now);
                sum = FMA(now, LOAD(asks + s), sum);
            }
            y[at] = sum_of(sum) + x * own->skip[h];
        }
    }
    for (integer k = 0; k < inner; k += LANES) STORE(y + k, MUL(LOAD(y + k), silu(LOAD(made + k))));
    for (integer k = 0; k < inner; k += mamba->normed)
        normalise(y + k, own->norm_out + k, mamba->normed, mamba->epsilon_out, y + k);
    to_inputs(y, inner, to);
}

/* The norms of nodes `first` .. `last` - 1, as the input of a product. */
static void read_norms(const Mamba *mamba, const Pass *pass, const float *weight, integer first, integer last) {
    float found[mamba->hidden];
    for (integer i = first; i < last; i++) {
        normalise(pass->states + i * mamba->hidden, weight, mamba->hidden, mamba->epsilon, found);
        to_inputs(found, mamba->hidden, pass->normed + i * mamba->hidden);
    }
}

/* A step of `count` nodes from slots to slots, each by its token; with `speak`, the logits behind them. */
static void advance(const Mamba *mamba, const Slab *slab, Pass *pass, integer count, integer speak) {
    const integer hidden = mamba->hidden, inner = mamba->inner, kept = mamba->kernel - 1;
    const integer channels = inner + 2 * mamba->groups * mamba->states, memory = inner * mamba->states;
    const integer all = pass->rows * slab->slots;
    Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
    {
        const Team team = team_at(&gate);
        const integer first = own_first(&team, count), last = own_last(&team, count);
        for (integer i = first; i < last; i++)
            EXPECT(slab->token[i] >= 0 && slab->token[i] < mamba->entries && slab->from[i] < all && slab->to[i] < all);
        for (integer i = first; i < last; i++)
            for (integer k = 0; k < hidden; k += LANES)
                STORE(pass->states + i * hidden + k, HELD(mamba->embeddings + slab->token[i] * hidden + k));
        for (integer l = 0; l < mamba->layers; l++) {
            const MambaLayer *own = mamba->layer + l;
            read_norms(mamba, pass, own->norm, first, last);
            meet(&team);
            product(
                pass->normed, count, hidden, own->in, NULL, mamba->outputs, pass->made, NULL, mamba->outputs, 0, &team
            );
            meet(&team);
            for (integer i = first; i < last; i++) {
                const integer from = l * all + slab->from[i], to = l * all + slab->to[i];
                float *made = pass->made + i * mamba->outputs;
                convolved(
                    mamba, own, slab->inputs + from * channels * kept, slab->inputs + to * channels * kept, made + inner
                );
                remembers(
                    mamba, own, slab->memory + from * memory, slab->memory + to * memory, made, pass->seen + i * inner
                );
            }
            meet(&team);
            product(pass->seen, count, inner, own->out, NULL, hidden, pass->states, NULL, hidden, 1, &team);
            meet(&team);
        }
        if (speak) {
            read_norms(mamba, pass, mamba->norm, first, last);
            meet(&team);
            product(
                pass->normed, count, hidden, mamba->head, NULL, mamba->vocabulary, pass->logits, NULL,
                mamba->vocabulary, 0, &team
            );
            meet(&team);
        }
    }
}

/* Read what waits, `behind`, row by row, into slot 0; the logits are those behind each row's last token. */
static void read_waiting(const Mamba *mamba, const Slab *slab, Pass *pass, const Draft *draft) {
    for (integer step = 0; step < draft->waits; step++) {
        integer count = 0, at = 0;
        for (integer r = 0; r < pass->rows; at += draft->waiting[r++]) {
            const integer place = step - (draft->waits - draft->waiting[r]); /* all rows end together */
            if (place < 0) continue;
            slab->from[count] = slab->to[count] = r * slab->slots;
            slab->token[count++] = draft->behind[at + place];
        }
        advance(mamba, slab, pass, count, step + 1 == draft->waits);
    }
}

/* One step alone, for trees that are grown elsewhere. */
void step_mamba(const Mamba *mamba, const Slab *slab, Pass *pass, integer count) {
    advance(mamba, slab, pass, count, 1);
}

/* A tree for every row; `waits`: what is read before, the root last. `depth` 0: that alone, and the logits behind it. */
void draft_mamba(const Mamba *mamba, const Slab *slab, Pass *pass, Draft *draft) {
    const integer rows = pass->rows, most = (draft->depth - 1) * draft->width;
    const Model head = {.vocabulary = mamba->vocabulary};
    integer above = 0, wide = 1, before = 0, candidates = 1, *ends = draft->ends;
    read_waiting(mamba, slab, pass, draft);
    if (!draft->depth) return;
    rooted(draft, rows);
    for (integer layer = 0; layer < draft->depth; layer++) {
        const integer first = candidates;
        rank_all(&head, pass, draft, above, wide, layer, first);
        candidates += wide * draft->most;
        if (layer + 1 == draft->depth) break;
        above = before;
        wide = choose(draft, rows, before, first, candidates - first, ends);
        if (!wide) break;
        for (integer i = 0; i < rows * wide; i++) {
            const integer r = i / wide, place = draft->place[r * most + above + i % wide], at = r * draft->candidates;
            const integer node = place < 0 ? 0 : place, up = draft->below[at + node]; /* a row may have fewer */
            slab->from[i] = r * slab->slots + (up ? 1 + draft->fed[at + up] : 0);
            slab->to[i] = r * slab->slots + 1 + above + i % wide;
            slab->token[i] = draft->token[at + node];
        }
        advance(mamba, slab, pass, rows * wide, 1);
        before += wide;
    }
    keep(draft, rows, candidates);
}
