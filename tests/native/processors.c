/* Prints what the native code computes on the processor that it is compiled for: one line for each part, with a digest
   of its results. `test_processors.py` compares the lines of several processors. */

#include <stdio.h>
#include <stdlib.h>

#include "pass.c"

static uint64_t state = 88172645463325252u, digest;

static uint64_t random_bits(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static float uniform(void) { /* -1 .. 1 */
    return (float)(random_bits() >> 40) / (1 << 23) - 1;
}

static float *uniforms(int64_t count, float scale) {
    float *x = aligned_alloc(64, ALIGNED(count * sizeof *x));
    for (int64_t i = 0; i < count; i++) x[i] = scale * uniform();
    return x;
}

static void *zeros(int64_t bytes) {
    return memset(aligned_alloc(64, ALIGNED(bytes + 64)), 0, ALIGNED(bytes + 64));
}

static weight_t *random_weights(int64_t count, float scale) {
    weight_t *w = zeros(count * sizeof *w);
    for (int64_t i = 0; i < count; i++) {
#ifdef BF16_WEIGHTS
        w[i] = to_bf16(scale * uniform());
#else
        w[i] = scale * uniform();
#endif
    }
    return w;
}

static void add(uint32_t word) {
    digest = (digest ^ word) * 1099511628211u;
    digest ^= digest >> 29;
}

static void add_floats(const float *x, int64_t count) { /* processors differ in the bits of NaN */
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        add(x[i] != x[i] ? 0x7fc00000u : bits);
    }
}

static void add_vec(vec_t x) {
    float lanes[LANES];
    v_store(lanes, x);
    add_floats(lanes, LANES);
}

static void add_bytes(const void *p, int64_t count) {
    for (int64_t i = 0; i < count; i++) add(((const uint8_t *)p)[i]);
}

static void print(const char *part, int64_t number) {
    printf("%s %lld %016llx\n", part, (long long)number, (unsigned long long)digest);
    digest = 0;
}

/* -- vectors ------------------------------------------------------------------------------------------------------- */

/* Every bfloat16, beside others. */
static void functions(void) {
    uint16_t *all = zeros(2 * 65536);
    for (int i = 0; i < 65536; i++) all[i] = (uint16_t)i;
#define EACH(name, value)                                                                                              \
    for (int i = 0; i < 65536; i += LANES) {                                                                           \
        const vec_t x = v_load_bf16(all + i), y = v_load_bf16(all + (i * 40503u & 65528u));                            \
        (void)y;                                                                                                       \
        add_vec(value);                                                                                                \
    }                                                                                                                  \
    print(name, 0);
    EACH("bf16", x)
    EACH("add", v_add(x, y))
    EACH("sub", v_sub(x, y))
    EACH("mul", v_mul(x, y))
    EACH("div", v_div(x, y))
    EACH("fma", v_fma(x, y, v_set1(0.3f)))
    EACH("max", v_max(x, y))
    EACH("min", v_min(x, y))
    EACH("round", v_round(x))
    EACH("exp", v_exp(v_min(v_set1(88), x))) /* what it is for; NaN stays NaN */
    EACH("silu", v_silu(x))
    EACH("sigmoid", v_sigmoid(x))
    EACH("tanh", v_tanh(x))
    EACH("gelu", v_gelu(x))
    EACH("gelu_tanh", v_gelu_tanh(x))
    EACH("relu2", v_relu2(x))
    EACH("zero_below", v_zero_below(x, y, v_set1(0.5f)))
    EACH("above", v_set1((float)(v_above(x, y) + 2 * v_maybe_above(x, y))))
    EACH("i8", v_load_i8((char *)(all + i)))
    EACH("f16", v_load_f16((char *)(all + i)))
    EACH("sum", v_set1(v_sum(v_mul(x, v_set1(1e-20f)))))
#undef EACH
    for (int i = 0; i < 1000; i++) {
        vec_t a[LANES];
        float numbers[LANES];
        for (int j = 0; j < LANES; j++) {
            for (int k = 0; k < LANES; k++) numbers[k] = uniform();
            a[j] = v_load(numbers);
        }
        add_vec(v_sums(a));
        add_vec(v_set1(v_largest(a[0])));
        v_transpose(a);
        for (int j = 0; j < LANES; j++) add_vec(a[j]);
    }
    print("sums and columns", 0);
    free(all);
}

/* -- products ------------------------------------------------------------------------------------------------------ */

/* Where a kind's float16 scales lie in a block. */
static const struct {
    int64_t kind;
    int at, scales;
} kinds[] = {
    {GGUF_Q4_0, 0, 1},  {GGUF_Q4_1, 0, 2},   {GGUF_Q5_0, 0, 1}, {GGUF_Q5_1, 0, 2}, {GGUF_Q8_0, 0, 1},
    {GGUF_Q2_K, 80, 2}, {GGUF_Q3_K, 108, 1}, {GGUF_Q4_K, 0, 2}, {GGUF_Q5_K, 0, 2}, {GGUF_Q6_K, 208, 1},
    {GGUF_IQ4_NL, 0, 1}, {GGUF_IQ4_XS, 0, 1}, {GGUF_MXFP4, 0, 0},
};

static uint8_t *random_blocks(int index, int64_t blocks) {
    const int64_t bytes = format_of(kinds[index].kind)->bytes;
    uint8_t *data = zeros(blocks * bytes);
    for (int64_t i = 0; i < blocks * bytes; i++) data[i] = (uint8_t)(random_bits() >> 32);
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t *block = data + b * bytes;
        for (int s = 0; s < kinds[index].scales; s++) block[kinds[index].at + 2 * s + 1] &= 0xaf; /* below 1 */
        if (!kinds[index].scales) *block = (uint8_t)(110 + *block % 30); /* an exponent */
    }
    return data;
}

static void product(const char *name, int64_t number, Matrix w, int64_t outputs, int64_t width) {
    const int64_t rows[] = {1, 2, 3, 4, 5, 7, 70};
    for (int i = 0; i < 7; i++) {
        const int64_t n = rows[i], threads = 1 + i % 3;
        float *x = uniforms(n * width, i ? 1 : 100), *y = zeros(n * outputs * sizeof *y);
        act_t *acts = zeros(n * width * sizeof *acts);
        char *scratch = zeros(threads * scratch_bytes(n, width));
        multiply(&w, x, n, width, outputs, y, threads, acts, scratch);
        add_floats(y, n * outputs);
        free(x), free(y), free(acts), free(scratch);
    }
    print(name, number);
}

static void products(void) {
    const int64_t outputs = 44, width = 512;
    weight_t *plain = random_weights(outputs * width, 1);
    product("plain", 0, (Matrix){plain, PLAIN}, outputs, width);
#ifdef BF16_WEIGHTS
    char *packed = zeros(outputs * row_bytes(BF12, width)), *tables = zeros(1 << 20);
    for (int i = 0; i < 20; i++) plain[random_bits() % (outputs * width)] = (uint16_t)random_bits() & 0x7f7f;
    add((uint32_t)pack_bf12(plain, outputs, width, packed, tables, 1 << 15, 2));
    product("bf12", 0, (Matrix){packed, BF12}, outputs, width);
#endif
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const int64_t kind = kinds[i].kind, blocks = outputs * width / format_of(kind)->weights;
        uint8_t *file = random_blocks((int)i, blocks);
        float *numbers = zeros(outputs * width * sizeof *numbers);
        add((uint32_t)dequantise(kind, file, outputs, width, NULL, numbers, 0, 2));
        add_floats(numbers, outputs * width);
        print("weights", kind);
#ifdef OPENS_BLOCKS
        if (repacked_bytes(kind, width)) {
            char *own = zeros(outputs * repacked_bytes(kind, width));
            product("blocks", kind, (Matrix){own, repack(kind, file, outputs, width, NULL, own, 2)}, outputs, width);
        }
#endif
        const int64_t size = int8_bytes(kind, outputs, width);
        char *own = zeros(size);
        const Matrix w = {own, pack_int8(kind, file, outputs, width, NULL, 0, own, 2)};
        add_bytes(own, size);
        print("packed", kind);
        product("int8", kind, w, outputs, width);
    }
}

/* -- passes -------------------------------------------------------------------------------------------------------- */

enum { HIDDEN = 64, INNER = 96, HEADS = 4, GROUPS = 2, HEAD = 32, LAYERS = 2, VOCAB = 130, SLOTS = 160, NODES = 90 };

static Norm norm(int64_t width) {
    return (Norm){uniforms(width, 1), NULL, RMS_NORM};
}

static Matrix plain(int64_t outputs, int64_t width) {
    return (Matrix){random_weights(outputs * width, 0.3f), PLAIN};
}

/* A chunk of NODES tokens, and then a tree of eight nodes. */
static void passes(void) {
    const int64_t wide = HEADS * HEAD, narrow = GROUPS * HEAD, slot = narrow * LAYERS;
    Layer layer[LAYERS];
    for (int l = 0; l < LAYERS; l++)
        layer[l] = (Layer){
            .q = plain(wide, HIDDEN), .k = plain(narrow, HIDDEN), .v = plain(narrow, HIDDEN), .o = plain(HIDDEN, wide),
            .gate = plain(INNER, HIDDEN), .up = plain(INNER, HIDDEN), .down = plain(HIDDEN, INNER),
            .attention_norm = norm(HIDDEN), .mlp_norm = norm(HIDDEN), .q_norm = norm(HEAD), .k_norm = norm(HEAD),
            .window = l ? 40 : 0, .rope = 1,
        };
    const Model model = {
        .hidden = HIDDEN, .intermediate = INNER, .heads = HEADS, .kv_heads = GROUPS, .head_dim = HEAD, .layers = LAYERS,
        .vocab = VOCAB, .eps = 1e-5f, .attention_scale = 0.2f, .activation = SILU, .layer = layer, .norm = norm(HIDDEN),
        .head = plain(VOCAB, HIDDEN), .score_cap = 20,
    };
    kv_t *cache = zeros(2 * SLOTS * slot * sizeof *cache), *views[LAYERS * 2];
    for (int i = 0; i < LAYERS * 2; i++) views[i] = cache + i % 2 * SLOTS * slot + i / 2 * narrow;
    int64_t length = 0, positions[NODES], tokens[NODES], nodes[NODES], threads = 2;
    uint8_t ancestors[64] = {0};
    const int parent[8] = {-1, 0, 0, 1, 1, 2, 3, 6};
    for (int i = 0; i < 8; i++)
        for (int p = i; p >= 0; p = parent[p]) ancestors[8 * i + p] = 1;
    float *logits = zeros(NODES * VOCAB * sizeof *logits);
    const int64_t each = scratch_bytes(NODES, wide);
    Pass pass = {
        .rows = 1, .capacity = SLOTS, .shared_tree = 1, .lengths = &length, .positions = positions, .cache = views,
        .rope = uniforms(SLOTS * 2 * HEAD, 1), .rope_positions = SLOTS, .tokens = tokens,
        .embeddings = random_weights(VOCAB * HIDDEN, 1), .embedding_rows = VOCAB,
        .hidden_states = zeros(NODES * HIDDEN * 4), .normed = zeros(NODES * wide * 4), .query = zeros(NODES * wide * 4),
        .attention = zeros(NODES * wide * 4), .mlp = zeros(NODES * INNER * 4), .qkv = zeros(NODES * 2 * wide * 4),
        .paths = zeros(NODES * NODES * 4), .real_nodes = zeros(NODES * 4), .row_starts = zeros(16),
        .logit_from = zeros(NODES * 8), .logit_to = zeros(NODES * 8), .logit_nodes = nodes, .logits = logits,
        .threads = threads, .slot_layers = LAYERS, .scratch = zeros(threads * each), .scratch_each = each,
    };
    for (int go = 0; go < 2; go++) {
        pass.nodes = pass.total_nodes = pass.logit_count = go ? 8 : NODES;
        pass.ancestors = go ? ancestors : NULL;
        for (int i = 0; i < pass.nodes; i++) {
            int depth = i;
            for (int p = go ? i : -1; p >= 0; p = parent[p]) depth = p == i ? 0 : depth + 1;
            positions[i] = length + depth;
            tokens[i] = (int64_t)(random_bits() % VOCAB);
            nodes[i] = i;
        }
        forward(&model, &pass);
        add_floats(logits, pass.nodes * VOCAB);
        print(go ? "tree" : "chunk", pass.nodes);
        length += NODES;
    }
}

/* -- noise --------------------------------------------------------------------------------------------------------- */

/* Draws of tokens, and the sums behind a filter. */
static void draws(void) {
    int32_t *knots = zeros(4 * 65536), *slopes = zeros(4 * 65536);
    for (int i = 0; i < 65536; i++) knots[i] = (int32_t)(random_bits() >> 44), slopes[i] = (int32_t)(random_bits() >> 52);
    float *logits = uniforms(3001, 8), temperature = 0.7f;
    uint64_t seed = 77;
    const Walk walk = {
        .vocab = 3001, .nodes = 1, .logits = logits, .temperature = &temperature, .seeds = &seed, .knots = knots,
        .slopes = slopes,
    };
    for (int position = 0; position < 200; position++) add((uint32_t)draw(&walk, 0, 0, position, -INFINITY));
    for (int i = 0; i < 50; i++) {
        const Mass mass = weigh(logits, 3001, temperature, 8 / temperature, -8, 4.0f * uniform());
        add((uint32_t)mass.above), add((uint32_t)mass.beside);
        const float sums[] = {(float)mass.all, (float)mass.larger, (float)mass.same};
        add_floats(sums, 3);
    }
    print("draws", 0);
}

int main(void) {
    functions();
    products();
    passes();
    draws();
    return 0;
}
