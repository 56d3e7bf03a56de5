/* Attention of tree nodes, summed by absolute position in blocks of BLOCK, so that a node's result depends on the keys
   of its own path alone: not on the slots they lie in, nor on what else was drafted. */

/* Scores of a block's keys `from` .. `count` to shares of what was seen so far, which shrinks with them. */
static void shared(Work *w, integer first, integer last, integer from, integer count, integer width) {
    for (integer q = first; q < last; q++) {
        float *score = w->score[q];
        for (integer j = 0; j < from; j++) score[j] = -INFINITY;
        for (integer j = count; j < BLOCK; j++) score[j] = -INFINITY;
        vector most = LOAD(score);
        for (integer j = LANES; j < BLOCK; j += LANES) most = MAX(LOAD(score + j), most);
        const float before = w->most[q], found = most_of(most), now = found > before ? found : before;
        float less[LANES];
        STORE(less, exponential(ALL(before - now)));
        vector sum = MUL(LOAD(w->sum[q]), ALL(less[0]));
        for (integer j = 0; j < BLOCK; j += LANES) {
            const vector share = exponential(SUB(LOAD(score + j), ALL(now)));
            STORE(score + j, share);
            sum = ADD(sum, share);
        }
        STORE(w->sum[q], sum);
        w->most[q] = now;
        if (less[0] != 1.0f)
            for (integer d = 0; d < width; d += LANES) STORE(w->out[q] + d, MUL(LOAD(w->out[q] + d), ALL(less[0])));
    }
}

/* The values of a block's keys `from` .. `count`, weighed and added in this order. */
static void gathered(
    Work *w, integer first, integer last, const held *values, const integer *at, integer from, integer count,
    integer width, integer ahead
) {
#define GATHER(rows, parts)                                                                                   \
    for (; d + parts * LANES <= width; d += parts * LANES) {                                                  \
        vector sum[rows * parts];                                                                             \
        for (int i = 0; i < rows; i++)                                                                        \
            for (int p = 0; p < parts; p++) sum[i * parts + p] = LOAD(w->out[q + i] + d + p * LANES);         \
        for (integer j = from; j < count; j++) {                                                              \
            const held *value = values + at[j] + d;                                                           \
            vector part[parts];                                                                               \
            for (int p = 0; p < parts; p++) part[p] = HELD(value + p * LANES);                                \
            for (int p = 0; p < parts && ahead; p += LINE / (int)sizeof(held) / LANES)                        \
                _mm_prefetch((const char *)(value + ahead + p * LANES), _MM_HINT_T1);                         \
            for (int i = 0; i < rows; i++) {                                                                  \
                const vector weight = ALL(w->score[q + i][j]);                                                \
                for (int p = 0; p < parts; p++) sum[i * parts + p] = FMA(weight, part[p], sum[i * parts + p]); \
            }                                                                                                 \
        }                                                                                                     \
        for (int i = 0; i < rows; i++)                                                                        \
            for (int p = 0; p < parts; p++) STORE(w->out[q + i] + d + p * LANES, sum[i * parts + p]);         \
    }
#define GATHERS(rows)                       \
    for (; q + rows <= last; q += rows) {   \
        integer d = 0;                      \
        GATHER(rows, 4)                     \
        GATHER(rows, 1)                     \
        ahead = 0;                          \
    }
    integer q = first;
    if (from >= count) return;
#if LANES == 16
    GATHERS(4)
    GATHERS(3)
#endif
    GATHERS(1)
#undef GATHERS
#undef GATHER
}

/* Scores of block `begin` that belong to drafted nodes, whose `slots` begin at `known`: all are found once, and the
   queries of a node, `group` of them, take those of its own path, from key `plain` to its `count`. */
static void branched(
    Work *w, const input *query, integer group, integer left, integer right, const held *keys, integer stride,
    integer begin, integer plain, const integer *count, integer known, const int32_t *path, integer depth,
    integer slots, integer width, float scale
) {
    for (integer c = 0; c < slots; c += BLOCK) {
        const integer some = slots - c < BLOCK ? slots - c : BLOCK;
        const held *from = keys + (known + c) * stride;
        scored(w, query, left * group, right * group, from, stride, some, width, scale, 0, w->branch);
        for (integer i = left; i < right; i++)
            for (integer j = plain; j < count[i]; j++) {
                const integer slot = path[i * depth + begin + j - known] - c;
                for (integer q = i * group; q < (i + 1) * group && slot >= 0 && slot < some; q++)
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
    Work *w, const input *query, input *out, integer heads, integer head, integer beyond, integer width,
    const held *keys, const held *values, integer stride, integer first, integer last, const integer *places,
    integer known, const int32_t *path, integer depth, integer window, float scale
) {
    const integer group = beyond - head, nodes = last - first, rows = nodes * group;
    const integer common = path ? known : places[last - 1] + 1; /* positions that are slots */
    input own[QUERIES * WIDEST] __attribute__((aligned(64))), room[QUERIES * WIDEST] __attribute__((aligned(64)));
    integer at[BLOCK], from[QUERIES], count[QUERIES], block = places[first], end = 0, slots = 0;
    places += first, path = path ? path + first * depth : NULL;
    for (integer i = 0; i < nodes; i++) {
        memcpy(own + i * group * width, query + ((first + i) * heads + head) * width, group * width * sizeof(input));
        const integer least = window && places[i] >= window ? places[i] - window + 1 : 0;
        if (least < block) block = least;
        if (places[i] > end) end = places[i];
        for (integer j = common; j <= places[i]; j++)
            if (path[i * depth + j - known] >= slots) slots = path[i * depth + j - known] + 1;
    }
    const input *given = asking(own, rows, width, room);
    for (integer q = 0; q < rows; q++) {
        w->most[q] = -1e30f; /* finite: less than any score, and no difference of infinities */
        memset(w->sum[q], 0, sizeof w->sum[q]);
        memset(w->out[q], 0, width * sizeof(float));
    }
    for (block /= BLOCK; block * BLOCK <= end; block++) {
        const integer begin = block * BLOCK, rest = common - begin;
        const integer plain = rest < 0 ? 0 : rest < BLOCK ? rest : BLOCK;
        integer low = 0, high = plain, left = nodes, right = 0, seeing = 0; /* all who look here see `low` .. `high` */
        for (integer i = 0; i < nodes; i++) {
            const integer least = window && places[i] >= window ? places[i] - window + 1 - begin : 0;
            from[i] = least > 0 ? least : 0;
            count[i] = places[i] + 1 - begin < BLOCK ? places[i] + 1 - begin : BLOCK;
            if (count[i] <= from[i]) {
                from[i] = count[i] = 0;
                continue;
            }
            if (!seeing++) left = i;
            right = i + 1;
            low = from[i] > low ? from[i] : low;
            high = count[i] < high ? count[i] : high;
        }
        if (seeing < right - left || high < low) low = high = 0;
        const integer ahead = begin + BLOCK < common ? BLOCK * stride : 0;
        for (integer j = 0; j < plain; j++) at[j] = (begin + j) * stride;
        const held *from_keys = keys + begin * stride;
        scored(w, given, left * group, right * group, from_keys, stride, plain, width, scale, ahead, w->score);
        if (begin + BLOCK > common)
            branched(
                w, given, group, left, right, keys, stride, begin, plain, count, known, path, depth, slots, width, scale
            );
        for (integer i = left; i < right; i++) {
            if (!count[i]) continue;
            shared(w, i * group, (i + 1) * group, from[i], count[i], width);
            gathered(w, i * group, (i + 1) * group, values, at, from[i], low, width, 0);
        }
        gathered(w, left * group, right * group, values, at, low, high, width, ahead);
        for (integer i = left; i < right; i++) {
            for (integer j = plain; j < count[i]; j++)
                at[j] = (known + path[i * depth + begin + j - known]) * stride;
            gathered(w, i * group, (i + 1) * group, values, at, high > from[i] ? high : from[i], count[i], width, 0);
        }
    }
    for (integer q = 0; q < rows; q++) {
        const float sum = sum_of(LOAD(w->sum[q]));
        input *to = out + ((first + q / group) * heads + head + q % group) * width;
        for (integer d = 0; d < width; d += LANES) STORE_INPUT(to + d, DIV(LOAD(w->out[q] + d), ALL(sum)));
    }
}
