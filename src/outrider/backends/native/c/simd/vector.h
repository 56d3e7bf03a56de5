/* Vectors of LANES float32, by the processor that the code is compiled for, and functions of them. Every sum has one
   fixed order: fused multiply-adds are written out, and the compiler contracts and reorders nothing. */

#ifndef OUTRIDER_VECTOR_H
#define OUTRIDER_VECTOR_H

#ifdef __AVX512F__
#include "avx512.h"
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
#define IN_REGISTER(x)                                                                                                 \
    __extension__({                                                                                                    \
        __typeof__(x) pinned = (x);                                                                                    \
        __asm__("" : "+v"(pinned));                                                                                    \
        pinned;                                                                                                        \
    })

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

INLINE float v_sum(vec_t x) {
    float lanes[LANES], total = 0;
    v_store(lanes, x);
    for (int i = 0; i < LANES; i++) total += lanes[i];
    return total;
}

#endif
