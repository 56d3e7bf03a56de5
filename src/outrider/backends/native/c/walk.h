/* The coupled rule (core/verify.py has the same in tensors): from the root, draw at every node arrived at; go to the
   child that carries the draw, or stop and emit it. Draws are argmax(logits + T * G), G being the noise of core/noise.py.

   Where a filter applies (top-k, top-p, min-p), the draw is the largest key of those that it keeps (core/nucleus.py has
   the same in tensors). So the largest key of all is looked at: are the tokens with larger logits fewer than k, and
   likelier than p together? If the filter does not keep it, it keeps none with a smaller logit, and the next key is
   looked for among the larger ones. Where rounding could decide, nothing is drawn here.

   Penalties and biases change few logits of a row. They are written over them for each draw, and then taken back. */

typedef int32_t whole __attribute__((vector_size(4 * LANES)));
typedef uint32_t word __attribute__((vector_size(4 * LANES)));

#if LANES == 16
#define LOOKED(table, at) (whole) _mm512_i32gather_epi32((__m512i)(at), table, 4)
#define LEAST(a, b) (whole) _mm512_min_epi32((__m512i)(a), (__m512i)(b))
#else
#define LEAST(a, b) (whole) _mm256_min_epi32((__m256i)(a), (__m256i)(b))
#define LOOKED(table, at) (whole) _mm256_i32gather_epi32((const int *)(table), (__m256i)(at), 4)
#endif

INLINE word mixed_words(word x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* The random bits of tokens `ids`, by the two halves of a key. */
INLINE whole hashed(uint64_t key, word ids) {
    return (whole)mixed_words(mixed_words(ids ^ (uint32_t)key) + (uint32_t)(key >> 32));
}

/* The bits as a number from 1 at the tails to 2^32 at the median; bits below 0 lie under it. */
INLINE vector from_tail(whole h) {
    return ADD(MUL((vector) __builtin_convertvector(h ^ (h >> 31), vector), ALL(2.0f)), ALL(1.0f));
}

/* Noise by the bits. */
INLINE vector noises(const Walk *walk, whole h) {
    const whole most = (whole)ALL(0.0f) + ((159 << 23) - 1), side = h >> 31;
    const whole x = LEAST((whole)from_tail(h), most);
    const whole at = (x >> 14) - (127 << 9) - side * (32 << 9);
    const whole g = LOOKED(walk->knots, at) + ((LOOKED(walk->slopes, at) * (x & ((1 << 14) - 1))) >> 14);
    return MUL((vector) __builtin_convertvector(g, vector), ALL(1.0f / (1 << 18)));
}

/* Can noise by these bits reach `wanted` in any lane? It is below 0.37 under the median, and above it below
   log(2^33 / x), x being `from_tail`. 2^33 / e^wanted is rounded up to a power of two: this is cheaper than looking noise
   up, and lets few tokens through that cannot win. */
INLINE int reaches(whole h, vector wanted) {
    const vector power = NEAREST(SUB(ALL(33.55f), MUL(wanted, ALL(1.44269504f))));
    const vector most = POWER(MAX(power, ZERO)), room = (vector)((whole)most & ~(h >> 31));
    return ABOVE(room, from_tail(h)) || MAYBE_ABOVE(ALL(0.4f), wanted);
}

/* The token with the largest key of those whose logits are above `floor`, the lowest of equals; the first whose logit is
   no number, where there is one. */
static int64_t drawn(const Walk *walk, int64_t row, int64_t node, int64_t position, float floor) {
    const float *logits = walk->logits + (row * walk->nodes + node) * walk->vocab, heat = walk->temperature[row];
    const uint64_t key = key_of(walk->seeds[row], position);
    const int64_t v = walk->vocab;
    float best = -INFINITY, rest[LANES], keys[LANES];
    int64_t found = 0;
    word ids;
    for (uint32_t j = 0; j < LANES; j++) ids[j] = j;
    for (int64_t i = 0; i < v; i += LANES, ids += LANES) {
        for (int64_t j = 0; i + LANES > v && j < LANES; j++) rest[j] = i + j < v ? logits[i + j] : -INFINITY;
        vector x = LOAD(i + LANES > v ? rest : logits + i);
        if (floor > -INFINITY && !MAYBE_ABOVE(x, ALL(floor))) continue;
        if (heat > 0) {
            if (!MAYBE_ABOVE(ADD(x, ALL(24.0f * heat)), ALL(best))) continue; /* no noise is larger */
            const whole h = hashed(key, ids);
            if (!reaches(h, DIV(SUB(ALL(best), x), ALL(heat)))) continue;
            x = ADD(x, MUL(noises(walk, h), ALL(heat)));
        }
        if (!MAYBE_ABOVE(x, ALL(best))) continue;
        STORE(keys, x);
        for (int64_t j = 0; j < LANES && i + j < v; j++) { /* no lane behind the vocabulary's end is ever drawn */
            if (keys[j] != keys[j]) return i + j;
            if (keys[j] > best && (floor == -INFINITY || logits[i + j] > floor)) {
                best = keys[j];
                found = i + j;
            }
        }
    }
    return found;
}

#define CLOSE 1e-5f  /* of logits divided by T: so near to each other, their order is left to the sort in tensors */
#define DOUBT 1e-4   /* of probabilities: a sum in float32 differs by some 1e-6 */
#define LIKELY 128   /* a larger k is left to tensors */
#define SUMMED 32    /* vectors that are added in float32 */

/* What lies above a logit, and beside it: how many, and the sums of e^(logit / T - the largest). */
typedef struct {
    int64_t above, beside;
    double all, larger, same;
} Mass;

/* `most`: the largest logit divided by T; `least`: the smallest that counts. */
static Mass weighed(const float *logits, int64_t v, float heat, float most, float least, float mine) {
    const float low = mine - most - 1 < -40 ? mine - most - 1 : -40; /* a vocabulary of smaller ones weighs nothing */
    Mass mass = {0};
    float rest[LANES];
    for (int64_t first = 0; first < v; first += SUMMED * LANES) {
        vector all = ZERO, larger = ZERO, same = ZERO;
        whole above = {0}, beside = {0};
        for (int64_t i = first; i < v && i < first + SUMMED * LANES; i += LANES) {
            for (int64_t j = 0; i + LANES > v && j < LANES; j++) rest[j] = i + j < v ? logits[i + j] : -INFINITY;
            const vector x = DIV(LOAD(i + LANES > v ? rest : logits + i), ALL(heat)), from = SUB(x, ALL(most));
            if (!MAYBE_ABOVE(from, ALL(low))) continue;
            const vector weight = exponential(from);
            const whole over = (whole)(x > ALL(mine + CLOSE)), near = (whole)(x >= ALL(mine - CLOSE)) & ~over;
            all = ADD(all, (vector)((whole)weight & (whole)(x >= ALL(least))));
            larger = ADD(larger, (vector)((whole)weight & over));
            same = ADD(same, (vector)((whole)weight & near));
            above -= over;
            beside -= near;
        }
        for (int64_t j = 0; j < LANES; j++) {
            mass.above += above[j];
            mass.beside += beside[j];
        }
        mass.all += sum_of(all);
        mass.larger += sum_of(larger);
        mass.same += sum_of(same);
    }
    return mass;
}

/* The largest key of the tokens that the row's filters keep; -1 where that is not sure. */
static int64_t filtered(const Walk *walk, int64_t row, int64_t node, int64_t position) {
    const float *logits = walk->logits + (row * walk->nodes + node) * walk->vocab, heat = walk->temperature[row];
    const int64_t v = walk->vocab, k = walk->top_k[row] < v ? walk->top_k[row] : 0; /* 0: all */
    const double p = walk->top_p[row], m = walk->min_p[row];
    float tops[LIKELY], floor = -INFINITY, least = -INFINITY;
    int64_t ids[LIKELY];
    if (k > LIKELY || largest(logits, v, k ? k : 1, ids, tops) < (k ? k : 1)) return -1;
    const float most = tops[0] / heat;
    if (k) least = tops[k - 1] / heat;
    for (;;) {
        const int64_t token = drawn(walk, row, node, position, floor);
        const float mine = logits[token] / heat;
        if (!(mine - most <= 0) || !isfinite(mine)) return -1; /* no number, or none is left */
        const Mass mass = weighed(logits, v, heat, most, least, mine);
        const double ratio = exp((double)mine - most); /* its own weight */
        const double before = mass.larger / mass.all, after = (mass.larger + mass.same - ratio) / mass.all;
        const int64_t first = mass.above == 0 && mass.beside == 1; /* the likeliest token is never dropped */
        if ((k && mass.above >= k) || (p < 1 && before >= p + DOUBT) || ratio < m * (1 - DOUBT)) {
            floor = logits[token];
            continue;
        }
        if (k && mass.above + mass.beside > k) return -1;
        if (!first && ((p < 1 && after >= p - DOUBT) || ratio < m * (1 + DOUBT))) return -1;
        if (first && m >= 1 - DOUBT) return -1;
        return token;
    }
}

/* The changed tokens of a row on its way down: `count` of them, and the logits that they had. */
typedef struct {
    int64_t count, *ids;
    float *said, *factors, *biases, *had;
} Changes;

/* Those of a row, in its part of `scratch`. */
static Changes changes_of(const Walk *walk, int64_t row) {
    const int64_t count = walk->changes ? walk->changes[row] : 0, room = walk->changes_capacity;
    Changes found = {.count = count};
    if (!count) return found;
    EXPECT(count + walk->depth < room);
    found.ids = (int64_t *)(walk->scratch + row * room * (int64_t)(sizeof(int64_t) + 4 * sizeof(float)));
    found.said = (float *)(found.ids + room);
    found.factors = found.said + room;
    found.biases = found.factors + room;
    found.had = found.biases + room;
    memcpy(found.ids, walk->changed[row], count * sizeof(int64_t));
    memcpy(found.said, walk->counts[row], count * sizeof(float));
    memcpy(found.factors, walk->factors[row], count * sizeof(float));
    memcpy(found.biases, walk->biases[row], count * sizeof(float));
    return found;
}

/* What core/sampling.py makes of them, in its order. */
static void change(const Walk *walk, int64_t row, int64_t node, const Changes *changes) {
    if (!changes->count) return;
    float *logits = walk->logits + (row * walk->nodes + node) * walk->vocab;
    const float presence = walk->presence[row], frequency = walk->frequency[row];
    for (int64_t i = 0; i < changes->count; i++) {
        float z = changes->had[i] = logits[changes->ids[i]];
        z = z + changes->biases[i];
        z = z < 0 ? z * changes->factors[i] : z / changes->factors[i];
        logits[changes->ids[i]] = z - presence * (changes->said[i] > 0) - frequency * changes->said[i];
    }
}

static void change_back(const Walk *walk, int64_t row, int64_t node, const Changes *changes) {
    float *logits = walk->logits + (row * walk->nodes + node) * walk->vocab;
    for (int64_t i = 0; i < changes->count; i++) logits[changes->ids[i]] = changes->had[i];
}

/* The path goes on with this token. */
static void say(const Walk *walk, int64_t row, int64_t token, Changes *changes) {
    int64_t at = 0;
    if (!changes->ids || !walk->penalised[row]) return;
    while (at < changes->count && changes->ids[at] != token) at++;
    if (at == changes->count) {
        EXPECT(at < walk->changes_capacity);
        changes->ids[changes->count++] = token;
        changes->said[at] = changes->biases[at] = 0;
    }
    changes->said[at]++;
    changes->factors[at] = walk->repetition[row];
}

static void walk_task(const Team *team, const void *call) {
    const Walk *walk = call;
    const int64_t n = walk->nodes;
    for (int64_t row; (row = take(team)) < walk->rows;) {
        const int64_t *tokens = walk->tokens + row * n, *parents = walk->parents + row * n;
        int64_t *found = walk->result + row * (walk->depth + 4), at = 0, count = 1;
        const int64_t whole_law = !walk->top_k[row] && walk->top_p[row] >= 1 && walk->min_p[row] <= 0;
        const int64_t plain = whole_law || !(walk->temperature[row] > 0);
        Changes changes = changes_of(walk, row);
        EXPECT(walk->temperature[row] >= 0 && isfinite(walk->temperature[row]));
        EXPECT(walk->top_k[row] >= 0 && walk->top_k[row] <= walk->vocab);
        EXPECT(walk->top_p[row] > 0 && walk->min_p[row] >= 0);
        EXPECT(walk->sizes[row] >= 1 && walk->sizes[row] <= n);
        for (int64_t i = 0; i < changes.count; i++) EXPECT(changes.ids[i] >= 0 && changes.ids[i] < walk->vocab);
        memset(found, 0, (walk->depth + 4) * sizeof(int64_t));
        found[2] = 1;
        for (;;) {
            const int64_t position = walk->start_positions[row] + count;
            change(walk, row, at, &changes);
            const int64_t token = plain ? drawn(walk, row, at, position, -INFINITY) : filtered(walk, row, at, position);
            found[1] = token;
            change_back(walk, row, at, &changes);
            int64_t child = 1;
            if (token < 0) break;
            if (!isfinite(walk->logits[(row * n + at) * walk->vocab + token])) found[2] = 0;
            while (child < walk->sizes[row] && (parents[child] != at || tokens[child] != token)) child++;
            if (child >= walk->sizes[row] || count > walk->depth) break;
            found[3 + count++] = at = child;
            say(walk, row, token, &changes);
        }
        found[0] = found[1] < 0 ? 0 : count;
    }
}

void walk_trees(const Walk *walk) {
    run(hands(walk->threads), NULL, 0, walk_task, walk);
}
