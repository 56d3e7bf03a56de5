/* What product kernels share: how many rows they take at once, and the workspace of a thread. */

#ifndef OUTRIDER_ROWS_H
#define OUTRIDER_ROWS_H

#include "../formats/layout.h"
#include "../threads.h"

#define CHUNK_ROWS 64 /* rows of x that stay in the processor's cache while the weights pass by */
#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

/* Of each thread, in its scratch: scales of the weights that are multiplied, opened weights, and activations in the
   order of the kernels. */
typedef struct {
    float *scales;  /* of a column of LANES outputs */
    void *weights;  /* four rows, as float32 at most */
    act_t *acts;
} Scratch;

#define SCALES_BYTES(width) ALIGNED(((width) / BLOCK_WEIGHTS * MOST_SCALE_FLOATS + 16) * (int64_t)sizeof(float))
#define WEIGHTS_BYTES(width) ALIGNED(4 * (width) * (int64_t)sizeof(float))

/* The inner layer of an MLP: activation(x G^T + bias) * (x U^T + bias), or activation(x U^T + bias) where `gate.data`
   is NULL. Biases may be NULL. Both matrices quantise x, or neither does. `limit`: as in `Experts`. */
typedef struct {
    Matrix gate, up;
    const float *gate_bias, *up_bias;
    int64_t activation;
    float alpha, limit;
} Inner;

/* From products, `rows` of LANES that lie `apart` numbers apart, of the outputs `j` .. `j + count - 1` to these of y,
   which has `outputs`. */
static void finish_inner(
    const Inner *inner, const float *gates, const float *ups, int64_t apart, int64_t rows, int64_t j, int64_t count,
    act_t *y, int64_t outputs
) {
    float biases[2][LANES] = {{0}};
    const int64_t gated = inner->gate.data != NULL;
    const float *first = gated ? gates : ups, *bias = gated ? inner->gate_bias : inner->up_bias;
    if (bias) memcpy(biases[0], bias + j, count * sizeof(float));
    if (gated && inner->up_bias) memcpy(biases[1], inner->up_bias + j, count * sizeof(float));
#define FINISH(activation)                                                                                             \
    for (int64_t i = 0; i < rows; i++) {                                                                               \
        act_t part[LANES], *own = y + i * outputs + j;                                                                 \
        const vec_t product = v_load(first + i * apart);                                                               \
        vec_t value = activation(bias ? v_add(product, v_load(biases[0])) : product);                                  \
        if (gated && inner->up_bias)                                                                                   \
            value = v_mul(value, v_add(v_load(ups + i * apart), v_load(biases[1])));                                   \
        else if (gated)                                                                                                \
            value = v_mul(value, v_load(ups + i * apart));                                                             \
        store_acts(count < LANES ? part : own, value);                                                                 \
        if (count < LANES) memcpy(own, part, count * sizeof(act_t));                                                   \
    }                                                                                                                  \
    return;
    if (inner->limit) {
        for (int64_t i = 0; i < rows; i++) {
            act_t part[LANES], *own = y + i * outputs + j;
            const vec_t most = v_set1(inner->limit), least = v_set1(-inner->limit);
            const vec_t gate = v_min(most, v_add(v_load(gates + i * apart), v_load(biases[0])));
            const vec_t up = v_max(least, v_min(most, v_add(v_load(ups + i * apart), v_load(biases[1]))));
            const vec_t value = v_mul(v_mul(gate, v_sigmoid(v_mul(gate, v_set1(inner->alpha)))), v_add(up, v_set1(1)));
            store_acts(count < LANES ? part : own, value);
            if (count < LANES) memcpy(own, part, count * sizeof(act_t));
        }
        return;
    }
    switch (inner->activation) {
    case GELU: FINISH(v_gelu)
    case GELU_TANH: FINISH(v_gelu_tanh)
    case RELU: FINISH(v_relu)
    case RELU2: FINISH(v_relu2)
    default: FINISH(v_silu)
    }
#undef FINISH
}

/* The thread's scratch, from a multiple of 64 bytes on. */
INLINE char *thread_scratch(const Thread *thread) {
    return (char *)(((uintptr_t)thread->scratch + 63) / 64 * 64);
}

INLINE Scratch scratch_of(const Thread *thread, int64_t width) {
    char *scratch = thread_scratch(thread);
    return (Scratch){
        (float *)scratch, scratch + SCALES_BYTES(width), (act_t *)(scratch + SCALES_BYTES(width) + WEIGHTS_BYTES(width))
    };
}

#endif
