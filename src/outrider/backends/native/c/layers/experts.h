/* A mixture of experts. The rows that chose an expert are computed together, so that its weights are read once for all
   of them. The results of a row are added in the order of its own choices, so its bits do not depend on other rows. */

#ifndef OUTRIDER_EXPERTS_H
#define OUTRIDER_EXPERTS_H

#include "../gemm/matmul.h"

INLINE float exp_of(float x) {
    float lanes[LANES];
    v_store(lanes, v_exp(v_set1(x)));
    return lanes[0];
}

/* The indices of the `top_k` greatest of `count` logits, in falling order; of equal ones the first. */
static void choose(const float *logits, int64_t count, int64_t top_k, int64_t *chosen) {
    for (int64_t e = 0; e < count; e++) {
        int64_t at = e < top_k ? e : top_k;
        for (; at && logits[e] > logits[chosen[at - 1]]; at--)
            if (at < top_k) chosen[at] = chosen[at - 1];
        if (at < top_k) chosen[at] = e;
    }
}

/* The experts of the rows `first` .. `last` - 1, and their weights. */
static void route(const Model *model, const Experts *own, const ExpertWork *work, int64_t first, int64_t last) {
    const int64_t count = model->experts, top_k = model->top_k;
    for (int64_t m = first; m < last; m++) {
        const float *logits = work->logits + m * (count + 1);
        const int64_t *chosen = work->chosen + m * top_k;
        float *weight = work->weight + m * (top_k + 1), total = 0;
        choose(logits, count, top_k, work->chosen + m * top_k);
        for (int64_t r = 0; r < top_k; r++) weight[r] = exp_of(logits[chosen[r]] - logits[chosen[0]]);
        if (own->normalised)
            for (int64_t r = 0; r < top_k; r++) total += weight[r];
        else
            for (int64_t e = 0; e < count; e++) total += exp_of(logits[e] - logits[chosen[0]]);
        for (int64_t r = 0; r < top_k; r++) weight[r] /= total;
        if (model->shared_intermediate) weight[top_k] = 1.0f / (1.0f + exp_of(logits[count] > -87 ? -logits[count] : 87));
    }
}

/* Slots of the choices of all rows; the inputs of the rows `first` .. `last` - 1 are copied to theirs. */
static void assign_slots(
    const Model *model, const ExpertWork *work, const act_t *rows, int64_t n, int64_t first, int64_t last,
    const Thread *thread
) {
    const int64_t count = model->experts, top_k = model->top_k, hidden = model->hidden;
    int64_t *next = (int64_t *)thread_scratch(thread), begin = 0; /* each thread counts for itself */
    EXPECT(64 + count * (int64_t)sizeof *next <= thread->region->bytes);
    memset(next, 0, count * sizeof *next);
    for (int64_t i = 0; i < n * top_k; i++) next[work->chosen[i]]++;
    for (int64_t e = 0; e < count; e++) {
        const int64_t end = begin + next[e];
        if (!thread->index) work->starts[e] = begin;
        next[e] = begin;
        begin = end;
    }
    if (!thread->index) work->starts[count] = begin;
    for (int64_t i = 0; i < last * top_k; i++) {
        const int64_t slot = next[work->chosen[i]]++;
        if (i < first * top_k) continue;
        work->slot[i] = slot;
        memcpy(work->inputs + slot * hidden, rows + i / top_k * hidden, hidden * sizeof(act_t));
    }
}

/* Add the results of the rows `first` .. `last` - 1 to their hidden states. */
static void
add_experts(const Model *model, const ExpertWork *work, float *states, int64_t n, int64_t first, int64_t last) {
    const int64_t top_k = model->top_k, hidden = model->hidden;
    const vec_t scale = v_set1(model->residual_scale ? model->residual_scale : 1.0f);
    for (int64_t m = first; m < last; m++) {
        const float *weight = work->weight + m * (top_k + 1), *shared = work->outputs + (n * top_k + m) * hidden;
        for (int64_t k = 0; k < hidden; k += LANES) {
            vec_t sum = v_zero();
            for (int64_t r = 0; r < top_k; r++) {
                const float *from = work->outputs + work->slot[m * top_k + r] * hidden;
                sum = v_fma(v_set1(weight[r]), v_load(from + k), sum);
            }
            if (model->shared_intermediate) sum = v_fma(v_set1(weight[top_k]), v_load(shared + k), sum);
            v_store(states + m * hidden + k, v_fma(sum, scale, v_load(states + m * hidden + k)));
        }
    }
}

/* The outputs of all experts for their slots, and of the shared one for all rows. */
static void multiply_experts(
    const Model *model, const Experts *own, const ExpertWork *work, const act_t *rows, int64_t n, const Thread *thread
) {
    const int64_t count = model->experts, hidden = model->hidden, inner = model->expert_intermediate;
    const int64_t shared = model->shared_intermediate, slots = n * model->top_k;
    for (int64_t e = 0; e < count; e++) {
        const int64_t first = work->starts[e], own_rows = work->starts[e + 1] - first;
        const Inner products = {
            own->gate[e], own->up[e], own->gate_bias ? own->gate_bias + e * inner : NULL,
            own->up_bias ? own->up_bias + e * inner : NULL, model->activation, own->alpha, own->limit
        };
        if (own_rows)
            matmul_inner(
                work->inputs + first * hidden, own_rows, hidden, &products, inner, work->inner + first * inner, thread
            );
    }
    const Inner products = {own->shared_gate, own->shared_up, NULL, NULL, model->activation, 0, 0};
    if (shared) matmul_inner(rows, n, hidden, &products, shared, work->inner + slots * inner, thread);
    barrier(thread);
    for (int64_t e = 0; e < count; e++) {
        const int64_t first = work->starts[e], own_rows = work->starts[e + 1] - first;
        if (own_rows)
            matmul(
                work->inner + first * inner, own_rows, inner, own->down[e],
                own->down_bias ? own->down_bias + e * hidden : NULL, hidden, work->outputs + first * hidden, NULL,
                hidden, 0, thread
            );
    }
    if (shared)
        matmul(
            work->inner + slots * inner, n, shared, own->shared_down, NULL, hidden, work->outputs + slots * hidden,
            NULL, hidden, 0, thread
        );
}

/* The mixture of `n` rows from `begin` on, which are normed: its results are added to their hidden states. */
static void experts_layer(
    const Model *model, const Pass *pass, const Experts *own, int64_t begin, int64_t n, const Thread *thread
) {
    const int64_t count = model->experts, hidden = model->hidden;
    const int64_t first = share_begin(thread, n), last = share_end(thread, n);
    const ExpertWork *work = &pass->experts;
    const act_t *rows = pass->normed + begin * hidden;
    matmul(rows, n, hidden, own->router, own->router_bias, count, work->logits, NULL, count + 1, 0, thread);
    if (model->shared_intermediate)
        matmul(rows, n, hidden, own->shared_router, NULL, 1, work->logits + count, NULL, count + 1, 0, thread);
    barrier(thread);
    route(model, own, work, first, last);
    barrier(thread);
    assign_slots(model, work, rows, n, first, last, thread);
    barrier(thread);
    multiply_experts(model, own, work, rows, n, thread);
    barrier(thread);
    add_experts(model, work, pass->hidden_states + begin * hidden, n, first, last);
    barrier(thread);
}

#endif
