/* Norms, and what products read: hidden states normed and rounded to activations. */

#ifndef OUTRIDER_NORM_H
#define OUTRIDER_NORM_H

#include <math.h>

#include "../gemm/rows.h"

/* Run a task on the threads that a pass may use. */
static Region run_pass(const Pass *pass, Task *task, const void *call) {
    return run(usable_threads(pass->threads), pass->scratch, pass->scratch_each, task, call);
}

/* Workspace of this thread for one row of so many float32. */
INLINE float *row_scratch(const Thread *thread, int64_t width) {
    EXPECT(width * (int64_t)sizeof(float) <= SCALES_BYTES(width) && SCALES_BYTES(width) < thread->region->bytes);
    (void)width;
    return (float *)thread_scratch(thread);
}

static void rms_norm(const float *x, const float *weight, int64_t width, float eps, float *y) {
    vec_t total = v_zero();
    for (int64_t k = 0; k < width; k += LANES) total = v_fma(v_load(x + k), v_load(x + k), total);
    const float root = 1.0f / sqrtf(v_sum(total) / (float)width + eps);
    for (int64_t k = 0; k < width; k += LANES)
        v_store(y + k, v_mul(v_mul(v_load(x + k), v_set1(root)), v_load(weight + k)));
}

static void layer_norm(const float *x, Norm norm, int64_t width, float eps, float *y) {
    vec_t total = v_zero(), squares = v_zero();
    for (int64_t k = 0; k < width; k += LANES) total = v_add(total, v_load(x + k));
    const vec_t mean = v_set1(v_sum(total) / (float)width);
    for (int64_t k = 0; k < width; k += LANES) {
        const vec_t apart = v_sub(v_load(x + k), mean);
        squares = v_fma(apart, apart, squares);
    }
    const vec_t root = v_set1(1.0f / sqrtf(v_sum(squares) / (float)width + eps));
    for (int64_t k = 0; k < width; k += LANES) {
        const vec_t scaled = v_mul(v_mul(v_sub(v_load(x + k), mean), root), v_load(norm.weight + k));
        v_store(y + k, norm.bias ? v_add(scaled, v_load(norm.bias + k)) : scaled);
    }
}

/* A norm, or a copy where there is none. `y` may be `x`. */
static void norm_or_copy(const float *x, Norm norm, int64_t width, float eps, float *y) {
    if (norm.weight && norm.kind == LAYER_NORM)
        layer_norm(x, norm, width, eps, y);
    else if (norm.weight)
        rms_norm(x, norm.weight, width, eps, y);
    else if (y != x)
        memcpy(y, x, width * sizeof(float));
}

/* Rows `first` .. `last` - 1 of the hidden states, normed, to `normed`. */
static void norm_rows(
    const Pass *pass, Norm norm, int64_t hidden, float eps, int64_t first, int64_t last, const Thread *thread
) {
    float *row = row_scratch(thread, hidden);
    for (int64_t m = first; m < last; m++) {
        norm_or_copy(pass->hidden_states + m * hidden, norm, hidden, eps, row);
        to_acts(row, hidden, pass->normed + m * hidden);
    }
}

/* EAGLE-3: the first layer reads the norms of an embedding and of a hidden state side by side, and adds to the
   latter. */
static void norm_pairs(const Model *model, const Pass *pass, int64_t first, int64_t last, const Thread *thread) {
    const int64_t hidden = model->hidden;
    float *row = row_scratch(thread, 2 * hidden);
    for (int64_t m = first; m < last; m++) {
        const float *pair = pass->inputs + m * 2 * hidden;
        for (int64_t k = 0; k < 2 * hidden; k += hidden)
            rms_norm(pair + k, model->pair_norms + k, hidden, model->eps, row + k);
        to_acts(row, 2 * hidden, pass->normed + m * 2 * hidden);
        memcpy(pass->hidden_states + m * hidden, pair + hidden, hidden * sizeof(float));
    }
}

/* Features `first` .. `last` - 1, to `normed`. */
static void gather_features(const Pass *pass, const kv_t *const *features, int64_t width, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
        for (int64_t k = 0; k < width; k += LANES) store_acts(pass->normed + i * width + k, load_kv(features[i] + k));
}

#endif
