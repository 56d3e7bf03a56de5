/* The coupled rule (the reference: core/verify.py): from the root, draw a token at every node; go to the
   child that carries it, or stop and emit it. A draw is argmax(logits + T * G), G being the noise of core/noise.py;
   logits + T * G is a token's key.

   Where a filter applies (top-k, top-p, min-p), the draw is the largest key that it keeps (the reference in tensors:
   backends/torch/nucleus.py). So the largest key of all is tested: are fewer than k logits larger, and are these tokens
   together less likely than p? If the filter drops it, it drops all tokens with smaller logits, and the largest key
   among the others is tested next. Where rounding could decide, nothing is drawn here.

   Penalties and biases change few logits of a row. They are written over the logits for each draw, and then
   restored. */

#ifndef OUTRIDER_WALK_H
#define OUTRIDER_WALK_H

#include "growth.h"
#include "noise.h"

typedef uint32_t uints_t __attribute__((vector_size(4 * LANES)));

INLINE uints_t mix_words(uints_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* The random bits of tokens `ids`, by the two halves of a key. */
INLINE ints_t hash_tokens(uint64_t key, uints_t ids) {
    return (ints_t)mix_words(mix_words(ids ^ (uint32_t)key) + (uint32_t)(key >> 32));
}

/* The bits as a number from 1 at the tails to 2^32 at the median; negative bits lie below the median. */
INLINE vec_t from_tail(ints_t h) {
    return v_add(v_mul((vec_t) __builtin_convertvector(h ^ (h >> 31), vec_t), v_set1(2.0f)), v_set1(1.0f));
}

/* The noise of these bits. */
INLINE vec_t noise_of(const Walk *walk, ints_t h) {
    const ints_t most = (ints_t)v_set1(0.0f) + ((159 << 23) - 1), side = h >> 31;
    const ints_t x = i_min((ints_t)from_tail(h), most);
    const ints_t at = (x >> 14) - (127 << 9) - side * (32 << 9);
    const ints_t g = i_gather(walk->knots, at) + ((i_gather(walk->slopes, at) * (x & ((1 << 14) - 1))) >> 14);
    return v_mul((vec_t) __builtin_convertvector(g, vec_t), v_set1(1.0f / (1 << 18)));
}

/* Can the noise of these bits reach `needed` in any lane? Below the median it is below 0.37, and above it below
   log(2^33 / x), x being `from_tail`. 2^33 / e^needed is rounded up to a power of two: this is cheaper than the noise
   itself, and few tokens that cannot win pass it. */
INLINE int can_reach(ints_t h, vec_t needed) {
    const vec_t exponent = v_round(v_sub(v_set1(33.55f), v_mul(needed, v_set1(1.44269504f))));
    const vec_t most = v_exp2(v_max(exponent, v_zero())), bound = (vec_t)((ints_t)most & ~(h >> 31));
    return v_above(bound, from_tail(h)) || v_maybe_above(v_set1(0.4f), needed);
}

/* The token with the largest key of those whose logits are above `floor`, the lowest id of equals; the first NaN,
   where there is one. */
static int64_t draw(const Walk *walk, int64_t row, int64_t node, int64_t position, float floor) {
    const float *logits = walk->logits + (row * walk->nodes + node) * walk->vocab, temperature = walk->temperature[row];
    const uint64_t key = key_of(walk->seeds[row], position);
    const int64_t v = walk->vocab;
    float best = -INFINITY, rest[LANES], keys[LANES];
    int64_t token = 0;
    uints_t ids;
    for (uint32_t j = 0; j < LANES; j++) ids[j] = j;
    for (int64_t i = 0; i < v; i += LANES, ids += LANES) {
        for (int64_t j = 0; i + LANES > v && j < LANES; j++) rest[j] = i + j < v ? logits[i + j] : -INFINITY;
        vec_t x = v_load(i + LANES > v ? rest : logits + i);
        if (floor > -INFINITY && !v_maybe_above(x, v_set1(floor))) continue;
        if (temperature > 0) {
            if (!v_maybe_above(v_add(x, v_set1(24.0f * temperature)), v_set1(best)))
                continue; /* no noise is larger than 24 */
            const ints_t h = hash_tokens(key, ids);
            if (!can_reach(h, v_div(v_sub(v_set1(best), x), v_set1(temperature)))) continue;
            x = v_add(x, v_mul(noise_of(walk, h), v_set1(temperature)));
        }
        if (!v_maybe_above(x, v_set1(best))) continue;
        v_store(keys, x);
        for (int64_t j = 0; j < LANES && i + j < v; j++) { /* lanes beyond the vocabulary are not drawn */
            if (keys[j] != keys[j]) return i + j;
            if (keys[j] > best && (floor == -INFINITY || logits[i + j] > floor)) {
                best = keys[j];
                token = i + j;
            }
        }
    }
    return token;
}

#define CLOSE 1e-5f /* logits divided by T that are so close are left to the tensors' sort */
#define DOUBT 1e-4 /* of probabilities: sums in float32 differ by some 1e-6 */
#define LIKELY 128 /* a larger k is left to the tensors */
#define SUMMED 32 /* vectors that are added in float32 */

/* What lies above a logit, and beside it: how many, and the sums of e^(logit / T - the largest). */
typedef struct {
    int64_t above, beside;
    double all, larger, same;
} Mass;

/* `most`: the largest logit divided by T; `least`: the smallest that counts. */
static Mass weigh(const float *logits, int64_t v, float temperature, float most, float least, float mine) {
    const float low = mine - most - 1 < -40 ? mine - most - 1 : -40; /* a vocabulary of smaller ones weighs nothing */
    Mass mass = {0};
    float rest[LANES];
    for (int64_t first = 0; first < v; first += SUMMED * LANES) {
        vec_t all = v_zero(), larger = v_zero(), same = v_zero();
        ints_t above = {0}, beside = {0};
        for (int64_t i = first; i < v && i < first + SUMMED * LANES; i += LANES) {
            for (int64_t j = 0; i + LANES > v && j < LANES; j++) rest[j] = i + j < v ? logits[i + j] : -INFINITY;
            const vec_t x = v_div(v_load(i + LANES > v ? rest : logits + i), v_set1(temperature)),
                        from = v_sub(x, v_set1(most));
            if (!v_maybe_above(from, v_set1(low))) continue;
            const vec_t weight = v_exp(from);
            const ints_t over = (ints_t)(x > v_set1(mine + CLOSE)), near = (ints_t)(x >= v_set1(mine - CLOSE)) & ~over;
            all = v_add(all, (vec_t)((ints_t)weight & (ints_t)(x >= v_set1(least))));
            larger = v_add(larger, (vec_t)((ints_t)weight & over));
            same = v_add(same, (vec_t)((ints_t)weight & near));
            above -= over;
            beside -= near;
        }
        for (int64_t j = 0; j < LANES; j++) {
            mass.above += above[j];
            mass.beside += beside[j];
        }
        mass.all += v_sum(all);
        mass.larger += v_sum(larger);
        mass.same += v_sum(same);
    }
    return mass;
}

/* The largest key of the tokens that the row's filters keep; -1 where that is not sure. */
static int64_t draw_filtered(const Walk *walk, int64_t row, int64_t node, int64_t position) {
    const float *logits = walk->logits + (row * walk->nodes + node) * walk->vocab, temperature = walk->temperature[row];
    const int64_t v = walk->vocab, k = walk->top_k[row] < v ? walk->top_k[row] : 0; /* 0: all */
    const double p = walk->top_p[row], m = walk->min_p[row];
    float tops[LIKELY], floor = -INFINITY, least = -INFINITY;
    int64_t ids[LIKELY];
    if (k > LIKELY || top_k(logits, v, k ? k : 1, ids, tops) < (k ? k : 1)) return -1;
    const float most = tops[0] / temperature;
    if (k) least = tops[k - 1] / temperature;
    for (;;) {
        const int64_t token = draw(walk, row, node, position, floor);
        const float mine = logits[token] / temperature;
        if (!(mine - most <= 0) || !isfinite(mine)) return -1; /* NaN, or no token is left */
        const Mass mass = weigh(logits, v, temperature, most, least, mine);
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
    float *counts, *factors, *biases, *had;
} Changes;

/* Those of a row, in its part of `scratch`. */
static Changes changes_of(const Walk *walk, int64_t row) {
    const int64_t count = walk->changes ? walk->changes[row] : 0, capacity = walk->changes_capacity;
    Changes own = {.count = count};
    if (!count) return own;
    EXPECT(count + walk->depth < capacity);
    own.ids = (int64_t *)(walk->scratch + row * capacity * (int64_t)(sizeof(int64_t) + 4 * sizeof(float)));
    own.counts = (float *)(own.ids + capacity);
    own.factors = own.counts + capacity;
    own.biases = own.factors + capacity;
    own.had = own.biases + capacity;
    memcpy(own.ids, walk->changed[row], count * sizeof(int64_t));
    memcpy(own.counts, walk->counts[row], count * sizeof(float));
    memcpy(own.factors, walk->factors[row], count * sizeof(float));
    memcpy(own.biases, walk->biases[row], count * sizeof(float));
    return own;
}

/* What core/sampling.py makes of them, in its order. */
static void change_logits(const Walk *walk, int64_t row, int64_t node, const Changes *changes) {
    if (!changes->count) return;
    float *logits = walk->logits + (row * walk->nodes + node) * walk->vocab;
    const float presence = walk->presence[row], frequency = walk->frequency[row];
    for (int64_t i = 0; i < changes->count; i++) {
        float z = changes->had[i] = logits[changes->ids[i]];
        z = z + changes->biases[i];
        z = z < 0 ? z * changes->factors[i] : z / changes->factors[i];
        logits[changes->ids[i]] = z - presence * (changes->counts[i] > 0) - frequency * changes->counts[i];
    }
}

static void restore_logits(const Walk *walk, int64_t row, int64_t node, const Changes *changes) {
    float *logits = walk->logits + (row * walk->nodes + node) * walk->vocab;
    for (int64_t i = 0; i < changes->count; i++) logits[changes->ids[i]] = changes->had[i];
}

/* The path goes on with this token. */
static void extend_path(const Walk *walk, int64_t row, int64_t token, Changes *changes) {
    int64_t at = 0;
    if (!changes->ids || !walk->penalised[row]) return;
    while (at < changes->count && changes->ids[at] != token) at++;
    if (at == changes->count) {
        EXPECT(at < walk->changes_capacity);
        changes->ids[changes->count++] = token;
        changes->counts[at] = changes->biases[at] = 0;
    }
    changes->counts[at]++;
    changes->factors[at] = walk->repetition[row];
}

static void walk_task(const Thread *thread, const void *call) {
    const Walk *walk = call;
    const int64_t n = walk->nodes;
    for (int64_t row; (row = next_item(thread)) < walk->rows;) {
        const int64_t *tokens = walk->tokens + row * n, *parents = walk->parents + row * n;
        int64_t *result = walk->result + row * (walk->depth + 4), at = 0, count = 1;
        const int64_t unfiltered = !walk->top_k[row] && walk->top_p[row] >= 1 && walk->min_p[row] <= 0;
        const int64_t plain = unfiltered || !(walk->temperature[row] > 0);
        Changes changes = changes_of(walk, row);
        EXPECT(walk->temperature[row] >= 0 && isfinite(walk->temperature[row]));
        EXPECT(walk->top_k[row] >= 0 && walk->top_k[row] <= walk->vocab);
        EXPECT(walk->top_p[row] > 0 && walk->min_p[row] >= 0);
        EXPECT(walk->sizes[row] >= 1 && walk->sizes[row] <= n);
        for (int64_t i = 0; i < changes.count; i++) EXPECT(changes.ids[i] >= 0 && changes.ids[i] < walk->vocab);
        memset(result, 0, (walk->depth + 4) * sizeof(int64_t));
        result[2] = 1;
        for (;;) {
            const int64_t position = walk->start_positions[row] + count;
            change_logits(walk, row, at, &changes);
            const int64_t token = plain ? draw(walk, row, at, position, -INFINITY)
                                        : draw_filtered(walk, row, at, position);
            result[1] = token;
            restore_logits(walk, row, at, &changes);
            int64_t child = 1;
            if (token < 0) break;
            if (!isfinite(walk->logits[(row * n + at) * walk->vocab + token])) result[2] = 0;
            while (child < walk->sizes[row] && (parents[child] != at || tokens[child] != token)) child++;
            if (child >= walk->sizes[row] || count > walk->depth) break;
            result[3 + count++] = at = child;
            extend_path(walk, row, token, &changes);
        }
        result[0] = result[1] < 0 ? 0 : count;
    }
}

void walk_trees(const Walk *walk) {
    run(usable_threads(walk->threads), NULL, 0, walk_task, walk);
}

#endif
