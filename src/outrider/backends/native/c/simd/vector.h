/* Vectors of LANES float32, by the processor that the code is compiled for, and functions of them. Every sum has one
   fixed order: fused multiply-adds are written out, and the compiler contracts and reorders nothing. */

#ifndef OUTRIDER_VECTOR_H
#define OUTRIDER_VECTOR_H

#ifdef __AVX512F__
#include "avx512.h"
#elif defined(__aarch64__)
#include "neon.h"
#else
#include "avx2.h"
#endif

#define CACHE_LINE 64 /* bytes */

/* LANES weights, keys, values or features, as float32. */
#ifdef BF16_WEIGHTS
INLINE vec_t load_weights(const weight_t *p) {
    return v_load_bf16(p);
}
#else
INLINE vec_t load_weights(const weight_t *p) {
    return v_load(p);
}
#endif
#ifdef BF16_STATE
INLINE vec_t load_kv(const kv_t *p) {
    return v_load_bf16(p);
}
#else
INLINE vec_t load_kv(const kv_t *p) {
    return v_load(p);
}
#endif

/* What one multiply-accumulate takes: MAC_WIDTH activations (`x`) and weights (`w`). */
#ifdef BF16_ACTS
INLINE mac_t mac_load_acts(const act_t *p) {
    return mac_load(p);
}
INLINE mac_t mac_load_weights(const weight_t *p) {
    return mac_load(p);
}
INLINE void store_acts(act_t *p, vec_t x) {
    v_store_bf16(p, x);
}
#else
#define MAC_WIDTH LANES
#define PACKED 1
typedef vec_t mac_t;
INLINE mac_t mac_load_acts(const act_t *p) {
    return v_load(p);
}
INLINE mac_t mac_load_weights(const weight_t *p) {
    return load_weights(p);
}
INLINE mac_t mac_repeat(const act_t *p) {
    return v_set1(*p);
}
INLINE vec_t mac(vec_t sum, mac_t x, mac_t w) {
    return v_fma(x, w, sum);
}
INLINE vec_t v_load_packed(const kv_t *p) {
    return load_kv(p);
}
INLINE void store_acts(act_t *p, vec_t x) {
    v_store(p, x);
}
#endif

/* Keep a value in a register from here on, where the compiler would load it again for each use. */
#ifdef __aarch64__
#define IN_REGISTER(x) (x) /* instructions take no operands from memory */
#else
#define IN_REGISTER(x)                                                                                                 \
    __extension__({                                                                                                    \
        __typeof__(x) pinned = (x);                                                                                    \
        __asm__("" : "+v"(pinned));                                                                                    \
        pinned;                                                                                                        \
    })
#endif

/* Into the first-level cache, or the second-level one. */
INLINE void prefetch_near(const void *line) {
    __builtin_prefetch(line, 0, 3);
}
INLINE void prefetch_far(const void *line) {
    __builtin_prefetch(line, 0, 2);
}

/* `count` activations, a multiple of LANES. */
INLINE void to_acts(const float *from, int64_t count, act_t *to) {
    for (int64_t k = 0; k < count; k += LANES) store_acts(to + k, v_load(from + k));
}

/* e^x for x <= 88; 0 below -87; NaN stays NaN. */
INLINE vec_t v_exp(vec_t x) {
    const vec_t low = v_set1(-87.0f), bounded = v_max(low, x);
    const vec_t n = v_round(v_mul(bounded, v_set1(1.44269504f)));
    vec_t r = v_fma(n, v_set1(-0.693359375f), bounded), y = v_set1(1.3888889e-3f);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    y = v_fma(y, r, v_set1(8.3333333e-3f));
    y = v_fma(y, r, v_set1(4.1666667e-2f));
    y = v_fma(y, r, v_set1(1.6666667e-1f));
    y = v_fma(y, r, v_set1(0.5f));
    y = v_fma(y, r, v_set1(1.0f));
    y = v_fma(y, r, v_set1(1.0f));
    return v_zero_below(v_mul(y, v_exp2(n)), x, low);
}

INLINE vec_t v_silu(vec_t x) {
    return v_div(x, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), v_max(v_set1(-87.0f), x)))));
}

INLINE vec_t v_min(vec_t a, vec_t b) {
    return v_sub(v_zero(), v_max(v_sub(v_zero(), a), v_sub(v_zero(), b)));
}

INLINE vec_t v_sigmoid(vec_t x) {
    return v_div(v_set1(1.0f), v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), v_max(v_set1(-87.0f), x)))));
}

/* |x| */
INLINE vec_t v_abs(vec_t x) {
    return v_max(v_sub(v_zero(), x), x);
}

/* Absolute error below 2e-7. */
INLINE vec_t v_tanh(vec_t x) {
    const vec_t near = v_set1(0.625f), size = v_abs(x);
    const vec_t e = v_exp(v_sub(v_zero(), v_max(v_set1(-87.0f), v_add(x, x))));
    const vec_t far = v_sub(v_div(v_set1(2.0f), v_add(v_set1(1.0f), e)), v_set1(1.0f));
    const vec_t small = v_sub(x, v_zero_below(x, size, near)), z = v_mul(small, small);
    vec_t y = v_set1(-5.70498872745e-3f);
    y = v_fma(y, z, v_set1(2.06390887954e-2f));
    y = v_fma(y, z, v_set1(-5.37397155531e-2f));
    y = v_fma(y, z, v_set1(1.33314422036e-1f));
    y = v_fma(y, z, v_set1(-3.33332819422e-1f));
    return v_add(v_zero_below(far, size, near), v_fma(v_mul(y, z), small, small));
}

/* x times the normal distribution below x: absolute error below 1e-7 |x|. */
INLINE vec_t v_gelu(vec_t x) {
    const vec_t size = v_abs(x), t = v_div(v_set1(1.0f), v_fma(size, v_set1(0.3275911f * 0.70710678f), v_set1(1.0f)));
    vec_t y = v_set1(0.5f * 1.061405429f);
    y = v_fma(y, t, v_set1(0.5f * -1.453152027f));
    y = v_fma(y, t, v_set1(0.5f * 1.421413741f));
    y = v_fma(y, t, v_set1(0.5f * -0.284496736f));
    y = v_fma(y, t, v_set1(0.5f * 0.254829592f));
    const vec_t beyond = v_mul(v_mul(y, t), v_exp(v_mul(v_mul(x, v_set1(-0.5f)), x)));
    return v_sub(v_max(v_zero(), x), v_mul(size, beyond));
}

INLINE vec_t v_gelu_tanh(vec_t x) {
    const vec_t cube = v_mul(v_mul(x, x), x);
    const vec_t inner = v_mul(v_fma(cube, v_set1(0.044715f), x), v_set1(0.79788456f));
    return v_mul(v_mul(v_set1(0.5f), x), v_add(v_set1(1.0f), v_tanh(inner)));
}

INLINE vec_t v_relu(vec_t x) {
    return v_max(v_zero(), x);
}

INLINE vec_t v_relu2(vec_t x) {
    return v_mul(v_relu(x), v_relu(x));
}

/* Multiply numbers by a factor (0: none), and cap them softly (0: not). */
static UNUSED void scale_and_cap(float *x, int64_t count, float scale, float cap) {
    for (int64_t k = 0; k < count; k += LANES) {
        const int64_t rest = count - k < LANES ? count - k : LANES;
        float own[LANES] = {0};
        memcpy(own, x + k, rest * sizeof(float));
        vec_t value = v_load(own);
        if (scale) value = v_mul(value, v_set1(scale));
        if (cap) value = v_mul(v_tanh(v_div(value, v_set1(cap))), v_set1(cap));
        v_store(own, value);
        memcpy(x + k, own, rest * sizeof(float));
    }
}

INLINE float v_sum(vec_t x) {
    float lanes[LANES], total = 0;
    v_store(lanes, x);
    for (int i = 0; i < LANES; i++) total += lanes[i];
    return total;
}

#endif
