/* The recurrent part of a Mamba-2 layer for one node (nets/mamba.py is the tensor reference). */

#ifndef OUTRIDER_MAMBA2_H
#define OUTRIDER_MAMBA2_H

#include "norm.h"

/* The convolution of one node's inputs `x`; the window of earlier inputs moves on by one, from slot to slot. */
static void convolve(const Mamba *mamba, const MambaLayer *own, const kv_t *before, kv_t *after, float *x) {
    const int64_t channels = mamba->intermediate + 2 * mamba->groups * mamba->state_size;
    const int64_t kernel = mamba->conv_kernel, window = kernel - 1;
    for (int64_t c = 0; c < channels; c++) {
        const kv_t *old = before + c * window;
        kv_t *new = after + c *window;
        const float *weight = own->conv_weight + c * kernel;
        float sum = own->conv_bias[c] + x[c] * weight[window];
        for (int64_t k = 0; k < window; k++) sum += from_kv(old[k]) * weight[k];
        for (int64_t k = 0; k + 1 < window; k++) new[k] = old[k + 1];
        new[window - 1] = to_kv(x[c]);
        x[c] = sum;
    }
    for (int64_t c = 0; c < channels; c += LANES) v_store(x + c, v_silu(v_load(x + c)));
}

/* The state-space step of one node. `projected`: gate, convolved inputs (x, B, C) and time steps; `to`: the inputs of
   the output projection; its state goes from `old` to `new`. `y`: workspace, [intermediate]. */
static void ssm_step(
    const Mamba *mamba, const MambaLayer *own, const float *old, float *new, const float *projected, float *y, act_t *to
) {
    const int64_t inner = mamba->intermediate, states = mamba->state_size, width = mamba->head_dim;
    const int64_t each = mamba->heads / mamba->groups;
    const float *b = projected + 2 * inner, *c = b + mamba->groups * states, *times = c + mamba->groups * states;
    for (int64_t h = 0; h < mamba->heads; h++) {
        const float raw = times[h] + own->dt_bias[h], softplus = raw > 20 ? raw : log1pf(expf(raw));
        const float dt = fminf(fmaxf(softplus, mamba->dt_min), mamba->dt_max);
        const vec_t decay = v_set1(expf(dt * own->a[h]));
        const float *bs = b + h / each * states, *cs = c + h / each * states;
        for (int64_t p = 0; p < width; p++) {
            const int64_t at = h * width + p;
            const float x = projected[inner + at];
            const vec_t added = v_set1(dt * x);
            vec_t sum = v_zero();
            for (int64_t s = 0; s < states; s += LANES) {
                const vec_t state = v_fma(added, v_load(bs + s), v_mul(decay, v_load(old + at * states + s)));
                v_store(new + at *states + s, state);
                sum = v_fma(state, v_load(cs + s), sum);
            }
            y[at] = v_sum(sum) + x * own->d[h];
        }
    }
    for (int64_t k = 0; k < inner; k += LANES) v_store(y + k, v_mul(v_load(y + k), v_silu(v_load(projected + k))));
    for (int64_t k = 0; k < inner; k += mamba->norm_group)
        rms_norm(y + k, own->gated_norm + k, mamba->norm_group, mamba->gated_eps, y + k);
    to_acts(y, inner, to);
}

#endif
