/* The coupled rule (core/verify.py has the same in tensors): from the root, draw at every node arrived at; go to the
   child that carries the draw, or stop and emit it. Draws are argmax(logits + T * G), G being the noise of core/noise.py. */

typedef struct {
    integer rows, nodes, depth, vocabulary; /* `depth`: steps at most */
    const float *logits;                    /* [rows, nodes, vocabulary] */
    const integer *tokens, *parents;        /* [rows, nodes] */
    const integer *sizes;                   /* [rows] */
    const float *temperature;               /* [rows]; 0: no noise */
    const uint64_t *seeds;                  /* [rows] */
    const integer *starts;                  /* [rows]: positions of the roots */
    const int32_t *knots, *slopes;
    integer *found; /* [rows, depth + 4]: nodes of the path, the token that ends it, whether the logits of all its tokens
                       are finite, and the path, filled up by 0 */
    integer threads;
} Walk;

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

/* Noise of tokens `ids` by the two halves of a key. */
INLINE vector noises(const Walk *walk, uint64_t key, word ids) {
    const whole h = (whole)mixed_words(mixed_words(ids ^ (uint32_t)key) + (uint32_t)(key >> 32)), side = h >> 31;
    const whole most = (whole)ALL(0.0f) + ((159 << 23) - 1);
    whole x = (whole)ADD(MUL((vector) __builtin_convertvector(h ^ side, vector), ALL(2.0f)), ALL(1.0f));
    x = LEAST(x, most);
    const whole at = (x >> 14) - (127 << 9) - side * (32 << 9);
    const whole g = LOOKED(walk->knots, at) + ((LOOKED(walk->slopes, at) * (x & ((1 << 14) - 1))) >> 14);
    return MUL((vector) __builtin_convertvector(g, vector), ALL(1.0f / (1 << 18)));
}

/* The token with the largest key, the lowest of equals; the first whose logit is no number, where there is one. */
static integer drawn(const Walk *walk, integer row, integer node, integer position) {
    const float *logits = walk->logits + (row * walk->nodes + node) * walk->vocabulary, heat = walk->temperature[row];
    const uint64_t key = key_of(walk->seeds[row], position);
    const integer v = walk->vocabulary;
    float best = -INFINITY, rest[LANES], keys[LANES];
    integer found = 0;
    word ids;
    for (uint32_t j = 0; j < LANES; j++) ids[j] = j;
    for (integer i = 0; i < v; i += LANES, ids += LANES) {
        for (integer j = 0; i + LANES > v && j < LANES; j++) rest[j] = i + j < v ? logits[i + j] : -INFINITY;
        vector x = LOAD(i + LANES > v ? rest : logits + i);
        if (heat > 0) {
            if (!MAYBE_ABOVE(ADD(x, ALL(24.0f * heat)), ALL(best))) continue; /* no noise is larger */
            x = ADD(x, MUL(noises(walk, key, ids), ALL(heat)));
        }
        if (!MAYBE_ABOVE(x, ALL(best))) continue;
        STORE(keys, x);
        for (integer j = 0; j < LANES; j++) {
            if (keys[j] != keys[j]) return i + j;
            if (keys[j] > best) {
                best = keys[j];
                found = i + j;
            }
        }
    }
    return found;
}

void follow(const Walk *walk) {
    const integer n = walk->nodes;
#pragma omp parallel for schedule(dynamic, 1) num_threads(walk->threads)
    for (integer row = 0; row < walk->rows; row++) {
        const integer *tokens = walk->tokens + row * n, *parents = walk->parents + row * n;
        integer *found = walk->found + row * (walk->depth + 4), at = 0, count = 1;
        memset(found, 0, (walk->depth + 4) * sizeof(integer));
        found[2] = 1;
        for (;;) {
            const integer token = found[1] = drawn(walk, row, at, walk->starts[row] + count);
            integer child = 1;
            if (!isfinite(walk->logits[(row * n + at) * walk->vocabulary + token])) found[2] = 0;
            while (child < walk->sizes[row] && (parents[child] != at || tokens[child] != token)) child++;
            if (child >= walk->sizes[row] || count > walk->depth) break;
            found[3 + count++] = at = child;
        }
        found[0] = count;
    }
}
