/* Attention of tree nodes, summed by absolute position in blocks of BLOCK, so that a node's result depends on the keys
   of its own path alone: not on the slots they lie in, nor on what else was drafted. */

/* Scores of a block that belong to drafted nodes, whose slots begin at `known`: all are found once, and the queries of a node
   take those of its own path. */
static void branched(
    Work *w, const act_t *query, const View *view, const kv_t *keys, int64_t stride, int64_t slots, int64_t width,
    float scale
) {
    const int64_t group = view->group;
    for (int64_t c = view->known; c < view->known + slots; c += BLOCK) {
        const int64_t rest = view->known + slots - c, some = rest < BLOCK ? rest : BLOCK;
        scored(
            w, query, view->left * group, view->right * group, keys + c * stride, stride, some, width, scale, 0, w->branch
        );
        for (int64_t i = view->left; i < view->right; i++)
            for (int64_t j = view->plain; j < view->count[i]; j++) {
                const int64_t slot = slot_of(view, i, j) - c;
                for (int64_t q = i * group; q < (i + 1) * group && slot >= 0 && slot < some; q++)
                    w->score[q][j] = w->branch[q][slot];
            }
    }
}

/* The nodes `first` .. `last` of one row of the batch, in heads `head` .. `beyond`, which read one key head.

   query, out: [node, head of all, width]; keys, values: of this row and key head, `stride` from slot to slot.
   known: positions whose slots are they themselves, for all these nodes. path: [node, depth], the slots beyond `known`
   of each node's own path, counted from `known`; NULL where every slot is its position, and positions rise.

   Block by block; what all nodes see of one is read once for all of them. */
static void attend(
    Work *w, const act_t *query, act_t *out, int64_t heads, int64_t head, int64_t beyond, int64_t width,
    const kv_t *keys, const kv_t *values, int64_t stride, int64_t first, int64_t last, const int64_t *places,
    int64_t known, const int32_t *path, int64_t depth, int64_t window, float scale
) {
    const int64_t group = beyond - head, nodes = last - first, rows = nodes * group;
    const int64_t common = path ? known : places[last - 1] + 1; /* positions that are slots */
    act_t own[QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64))), room[QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64)));
    int64_t block = places[first], end = 0, slots = 0;
    View view = {
        .nodes = nodes, .group = group, .known = known, .depth = depth, .path = path ? path + first * depth : NULL
    };
    path = view.path;
    places += first;
    for (int64_t i = 0; i < nodes; i++) {
        memcpy(own + i * group * width, query + ((first + i) * heads + head) * width, group * width * sizeof(act_t));
        const int64_t least = window && places[i] >= window ? places[i] - window + 1 : 0;
        if (least < block) block = least;
        if (places[i] > end) end = places[i];
        for (int64_t j = common; j <= places[i]; j++)
            if (path[i * depth + j - known] >= slots) slots = path[i * depth + j - known] + 1;
    }
    const act_t *given = asking(own, rows, width, room);
    for (int64_t q = 0; q < rows; q++) {
        w->most[q] = -1e30f; /* finite: less than any score, and no difference of infinities */
        memset(w->sum[q], 0, sizeof w->sum[q]);
        memset(w->out[q], 0, width * sizeof(float));
    }
    for (block /= BLOCK; block * BLOCK <= end; block++) {
        const int64_t begin = block * BLOCK, rest = common - begin;
        view.begin = begin;
        view.plain = rest < 0 ? 0 : rest < BLOCK ? rest : BLOCK;
        view.left = nodes;
        view.right = 0;
        for (int64_t i = 0; i < nodes; i++) {
            const int64_t least = window && places[i] >= window ? places[i] - window + 1 - begin : 0;
            view.from[i] = least > 0 ? least : 0;
            view.count[i] = places[i] + 1 - begin < BLOCK ? places[i] + 1 - begin : BLOCK;
            if (view.count[i] <= view.from[i]) {
                view.from[i] = view.count[i] = 0;
                continue;
            }
            if (!view.right) view.left = i;
            view.right = i + 1;
        }
        view.ahead = begin + BLOCK < common ? BLOCK * stride : 0;
        scored(
            w, given, view.left * group, view.right * group, keys + begin * stride, stride, view.plain, width, scale,
            view.ahead, w->score
        );
        if (begin + BLOCK > common) branched(w, given, &view, keys, stride, slots, width, scale);
        for (int64_t i = view.left; i < view.right; i++)
            if (view.count[i]) shared(w, i * group, (i + 1) * group, view.from[i], view.count[i], width);
        valued(w, &view, values, stride, width);
    }
    for (int64_t q = 0; q < rows; q++) {
        const float sum = sum_of(LOAD(w->sum[q]));
        act_t *to = out + ((first + q / group) * heads + head + q % group) * width;
        for (int64_t d = 0; d < width; d += LANES) STORE_INPUT(to + d, DIV(LOAD(w->out[q] + d), ALL(sum)));
    }
}
