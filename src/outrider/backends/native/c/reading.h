/* What a drafter reads of committed text before it drafts: features of the target, each with the next token. (The
   structure of a whole draft call stands here as well, since this file comes first.)

   Later steps use only the keys and values of earlier pairs. With the joining product before them these take about a
   fifth of the weights. So of many pairs that wait, the layer as a whole reads each row's last one alone, which the draft
   begins with. */

#define FEW 16 /* pairs of a row: to read these as a whole takes hardly longer, since the weights are read once for all */

typedef struct {
    integer waits;              /* pairs of the row that has most */
    const integer *waiting;     /* [rows]: pairs of each; their features and tokens row by row, without gaps */
    const held *const *features;
    Matrix fuse;                /* [hidden, taps * wide]: EAGLE-3's, of the features of a pair; or none, and taps is 1 */
    integer taps, wide;
    const integer *behind;
    integer *lengths;           /* [rows]: pairs that were fed before, and then these too */
    integer depth, width, most; /* layers at most, 0: no tree; nodes fed for each; candidates below a node */
    integer pool;               /* likeliest tokens that race where there is noise */
    float scale, floor, reach;  /* of confidences; the logs of the values below which nodes are dropped, or not fed */
    integer nodes, sizes;       /* nodes to keep at most, the root included; length of `seconds`, or 0 */
    integer summed;             /* are `seconds` by the drafted nodes of all rows, or by those of the widest? */
    const double *seconds;
    double trust;
    const held *embeddings;   /* [entries, hidden] */
    integer entries;
    const integer *names;     /* token ids of the head's columns; NULL: the columns are the ids */
    const float *temperature; /* of each row */
    const uint64_t *seeds;    /* of the noise, [rows]; NULL: none */
    const integer *starts;    /* [rows]: positions of the roots */
    const int32_t *knots, *slopes;
    const integer *root;      /* [rows] */
    float *last;              /* [rows, hidden]: what the candidates below the roots come from, the last pair's vector */
    /* Workspace of the ranking: scores with noise, and the best ones, of each of rows * width (or depth) nodes. */
    float *raced;             /* [nodes, pool] */
    float *top_values;        /* [nodes, pool + most] */
    integer *top_columns;     /* the same */
    /* Workspace of what keeps the best candidates. */
    float *all, *sorted, *tops; /* [rows * nodes], the same, [nodes or width] */
    integer *order, *renamed;   /* [rows * nodes], [candidates] */
    double *gains;              /* [rows * nodes] */
    integer *ends;              /* [rows]: the places behind those that each row feeds */
    /* Workspace of reading many pairs: each row's last one. */
    const held **last_features; /* [rows, taps] */
    integer *last_behind, *last_waiting; /* [rows] */
    float *vectors;           /* room: [rows, fed, hidden], fed = (depth - 1) * width */
    integer *spots;           /* room: [rows, fed or waits] */
    uint8_t *ancestors;       /* room: [rows, fed, fed] */
    integer candidates;       /* of a row, at most, the root included */
    integer *place;           /* room: [rows, fed], the candidate that was fed as this one; -1: none */
    integer *token, *below, *level, *fed, *chosen; /* room: [rows, candidates]; a candidate's place, -1: it was not fed */
    float *value;                                  /* room: the same */
    integer kept;                                  /* found: nodes of the widest row */
    integer *size, *tokens, *parents, *depths;     /* found: [rows], then [rows, kept] */
    integer *where; /* found: the same, 1 + a node's place among the fed, 0: the root, -1: it was not fed; or NULL */
    float *values;
    uint8_t *sees; /* found: [rows, kept, kept] */
} Draft;

/* Keys and values of `count` inputs of `reads` numbers each, which lie in `normed`, written behind their rows' texts.
   `live`: the row of each; `starts`: the first of each row. */
static void remembered(
    const Model *model, const Pass *pass, integer layer, integer reads, integer count, const integer *lengths,
    const Team *team
) {
    const Layer *own = model->layer + layer;
    const integer narrow = model->groups * model->width;
    product(pass->normed, count, reads, own->k, own->bias_k, narrow, pass->made, NULL, 2 * narrow, 0, team);
    product(pass->normed, count, reads, own->v, own->bias_v, narrow, pass->made + narrow, NULL, 2 * narrow, 0, team);
    meet(team);
    for (integer m = own_first(team, count); m < own_last(team, count); m++) {
        const integer row = pass->live[m], place = lengths[row] + m - pass->starts[row];
        written(model, pass, layer, place, row * pass->capacity + place, pass->made + m * 2 * narrow);
    }
    meet(team);
}

/* Which row each thing that waits is of. Returns how many there are. */
static integer counted(const Pass *pass, const integer *waiting) {
    integer count = 0;
    for (integer r = 0; r < pass->rows; r++) {
        pass->starts[r] = count;
        for (integer i = 0; i < waiting[r]; i++) pass->live[count++] = (int32_t)r;
    }
    return count;
}

/* The first product's input of each pair that waits: its embedding, and beside it its feature, or for EAGLE-3 one vector
   of its features. Returns how many pairs there are. */
static integer given_pairs(const Model *step, const Pass *pass, const Draft *draft) {
    const integer hidden = step->hidden, taps = draft->taps, count = counted(pass, draft->waiting);
    float *given = (float *)pass->given;
    Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
    {
        const Team team = team_at(&gate);
        const integer first = own_first(&team, count), last = own_last(&team, count);
        for (integer i = first; i < last; i++) {
            EXPECT(draft->behind[i] >= 0 && draft->behind[i] < draft->entries);
            const held *embedding = draft->embeddings + draft->behind[i] * hidden;
            float *to = given + i * 2 * hidden;
            for (integer k = 0; k < hidden; k += LANES) STORE(to + k, HELD(embedding + k));
            for (integer k = 0; k < hidden && !draft->fuse.data; k += LANES)
                STORE(to + hidden + k, HELD(draft->features[i] + k));
        }
        if (draft->fuse.data) {
            collected(pass, draft->features, draft->wide, first * taps, last * taps);
            meet(&team);
            product(
                pass->normed, count, taps * draft->wide, draft->fuse, NULL, hidden, given + hidden, NULL, 2 * hidden, 0,
                &team
            );
        }
        meet(&team);
    }
    return count;
}

/* Keys and values of the pairs that wait. */
static void read_keys(const Model *step, const Pass *pass, const Draft *draft) {
    const integer hidden = step->hidden, joined = step->joined;
    const integer count = given_pairs(step, pass, draft);
    Gate gate = gate_of(pass);
#pragma omp parallel num_threads(hands(pass->threads))
    {
        const Team team = team_at(&gate);
        const integer first = own_first(&team, count), last = own_last(&team, count);
        if (step->join.data) {
            to_inputs(pass->given + first * joined, (last - first) * joined, pass->normed + first * joined);
            meet(&team);
            product(pass->normed, count, joined, step->join, step->bias_join, hidden, pass->states, NULL, hidden, 0, &team);
            meet(&team);
        }
        if (step->norm_given)
            paired(step, pass, first, last);
        else
            normed(step, pass, step->layer->norm, first, last);
        meet(&team);
        remembered(step, pass, 0, step->norm_given ? 2 * hidden : hidden, count, draft->lengths, &team);
    }
}

/* Feed the pairs that wait to the layer, behind each row's text. */
static void feed_pairs(const Model *step, Pass *pass, Draft *draft) {
    const integer hidden = step->hidden, waits = draft->waits;
    given_pairs(step, pass, draft);
    for (integer r = 0; r < pass->rows; r++)
        for (integer i = 0; i < waits; i++) draft->spots[r * waits + i] = draft->lengths[r] + i;
    pass->nodes = pass->all = waits;
    pass->since = pass->asked = 0;
    pass->taps = 1;
    pass->sizes = draft->waiting;
    pass->spots = draft->spots;
    pass->ancestors = NULL;
    forward(step, pass);
    pass->sizes = NULL;
    for (integer r = 0; r < pass->rows; r++) {
        const integer count = draft->waiting[r];
        if (!count) continue;
        memcpy(draft->last + r * hidden, pass->tapped + (r * waits + count - 1) * hidden, hidden * sizeof(float));
        draft->lengths[r] += count;
    }
}

/* Read the pairs that wait. Few: all go through the layer. Many: their keys and values first, and then each row's last
   one goes through the layer. */
static void read_pairs(const Model *step, Pass *pass, Draft *draft) {
    const integer rows = pass->rows, taps = draft->taps;
    if (draft->waits <= FEW) {
        feed_pairs(step, pass, draft);
        return;
    }
    const held **features = draft->last_features;
    integer *behind = draft->last_behind, *waiting = draft->last_waiting, count = 0, ends = 0;
    read_keys(step, pass, draft);
    for (integer r = 0; r < rows; r++) { /* the layer reads the last one of each */
        waiting[r] = draft->waiting[r] > 0;
        count += draft->waiting[r];
        if (!waiting[r]) continue;
        for (integer i = 0; i < taps; i++) features[ends * taps + i] = draft->features[(count - 1) * taps + i];
        behind[ends++] = draft->behind[count - 1];
        draft->lengths[r] += draft->waiting[r] - 1;
    }
    Draft last_ones = *draft;
    last_ones.waits = 1;
    last_ones.waiting = waiting;
    last_ones.features = features;
    last_ones.behind = behind;
    feed_pairs(step, pass, &last_ones);
}
