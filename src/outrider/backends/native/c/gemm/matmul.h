/* y = x W^T, with the rows of W as they lie in memory (`formats/layout.h`): `width` weights for each output. */

#ifndef OUTRIDER_MATMUL_H
#define OUTRIDER_MATMUL_H

#include "int8.h"
#include "rows.h"

#ifdef AMX
#include "tiles_many.h"
#elif LANES == 8
#include "lanes8.h"
#else
#include "lanes16.h"
#endif

#ifdef AMX
/* Of `pack_acts`, or the workspace of `matmul_many`. */
#define PACKED_BYTES(n, width)                                                                                         \
    ((n) > 1 ? ((n) > FEWER ? 3 * LANES : PADDED_ROWS(n)) * (width) * (int64_t)sizeof(act_t) : 0)
#else
#define PACKED_BYTES(n, width) 0
INLINE const act_t *pack_acts(const act_t *x, int64_t n, int64_t width, act_t *buffer) {
    (void)n, (void)width, (void)buffer;
    return x;
}
INLINE void begin_product(int64_t n) {
    (void)n;
}
INLINE void begin_int8_product(void) {}
INLINE void begin_product_few(int64_t n, int64_t few) {
    (void)n, (void)few;
}
INLINE void end_product(void) {}
#endif

/* With tiles, rows after the last block are read, and their results discarded. */
#define INT8_BYTES(n, width) (((n) * (width) / BLOCK_WEIGHTS + 16) * (int64_t)sizeof(Activations))
#define ACTS_BYTES(n, width)                                                                                           \
    (PACKED_BYTES(n, width) > INT8_BYTES(n, width) ? PACKED_BYTES(n, width) : INT8_BYTES(n, width))

#define SHARED_ROWS 16 /* rows from which threads quantise activations together, in the scratch of the first one */

INLINE int shares_acts(int64_t kind, int64_t n, const Thread *thread) {
    return IS_INTEGER(kind) && n >= SHARED_ROWS && thread->count > 1;
}

/* Rows of x as the GEMM with a matrix of this kind reads them. Where `shares_acts`, all threads call this. Barriers keep
   the first thread's scratch from being overwritten while it is read: by that thread in the GEMM before, by all in this
   one (a third barrier, after the GEMM). */
INLINE const void *
prepare_acts(int64_t kind, const act_t *x, int64_t n, int64_t width, act_t *buffer, const Thread *thread) {
    if (!IS_INTEGER(kind)) {
        begin_product(n);
        return pack_acts(x, n, width, buffer);
    }
    const int64_t blocks = width / BLOCK_WEIGHTS;
    const Thread first = {.scratch = thread->region->scratch};
    begin_int8_product();
    if (!shares_acts(kind, n, thread)) {
        quantise_rows(x, n, width, 0, blocks, (Activations *)buffer);
        return buffer;
    }
    buffer = scratch_of(&first, width).acts;
    barrier(thread);
    quantise_rows(x, n, width, share_begin(thread, blocks), share_end(thread, blocks), (Activations *)buffer);
    barrier(thread);
    return buffer;
}

/* The results of `n` prepared rows for the LANES outputs from `first` on, as rows of LANES numbers. Outputs from `last`
   on are discarded. */
INLINE void multiply_lanes(
    const void *acts, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, Scratch scratch, float *y
) {
    if (IS_INTEGER(w.kind))
        multiply_int8(acts, n, width, w, first, y);
    else
        multiply_column(acts, n, width, w, first, last, scratch, y);
}

/* This thread's share of so many outputs, in full columns. */
INLINE void column_share(int64_t outputs, const Thread *thread, int64_t *first, int64_t *last) {
    const int64_t columns = (outputs + LANES - 1) / LANES;
    *first = share_begin(thread, columns) * LANES;
    *last = share_end(thread, columns) * LANES;
    if (*last > outputs) *last = outputs;
}

/* y[:, own outputs] = x W^T + bias, or added to what is there. `to`: the row of y for each of x; NULL: the same. */
static void matmul(
    const act_t *x, int64_t n, int64_t width, Matrix w, const float *bias, int64_t outputs, float *y, const int64_t *to,
    int64_t stride, int add, const Thread *thread
) {
    int64_t first, last;
    float results[CHUNK_ROWS * LANES];
    column_share(outputs, thread, &first, &last);
    EXPECT(scratch_bytes(n, width) <= thread->region->bytes);
#ifdef AMX
    if (n > FEWER && !IS_INTEGER(w.kind))
        return matmul_many(x, n, width, w, bias, outputs, first, last, y, to, stride, add, thread);
#endif
    const Scratch scratch = scratch_of(thread, width);
    for (int64_t m = 0; m < n; m += CHUNK_ROWS) {
        const int64_t rows = n - m < CHUNK_ROWS ? n - m : CHUNK_ROWS;
        const void *acts = prepare_acts(w.kind, x + m * width, rows, width, scratch.acts, thread);
        for (int64_t j = first; j < last; j += LANES) {
            const int64_t count = last - j < LANES ? last - j : LANES;
            multiply_lanes(acts, rows, width, w, j, outputs, scratch, results);
            for (int64_t i = 0; i < rows; i++) {
                float *own = y + (to ? to[m + i] : m + i) * stride + j;
                const float *from = results + i * LANES;
                if (count == LANES) {
                    const vec_t value = bias ? v_add(v_load(from), v_load(bias + j)) : v_load(from);
                    v_store(own, add ? v_add(v_load(own), value) : value);
                    continue;
                }
                for (int64_t k = 0; k < count; k++) {
                    float value = from[k];
                    if (bias) value += bias[j + k];
                    own[k] = add ? own[k] + value : value;
                }
            }
        }
        end_product();
        if (shares_acts(w.kind, rows, thread)) barrier(thread);
    }
}

/* y[:, own outputs] of the inner layer of an MLP. */
static void matmul_inner(
    const act_t *x, int64_t n, int64_t width, const Inner *inner, int64_t outputs, act_t *y, const Thread *thread
) {
    int64_t first, last;
    float gates[CHUNK_ROWS * LANES], ups[CHUNK_ROWS * LANES];
    column_share(outputs, thread, &first, &last);
    EXPECT(scratch_bytes(n, width) <= thread->region->bytes);
#ifdef AMX
    if (n > FEWER && !IS_INTEGER(inner->up.kind))
        return matmul_inner_many(x, n, width, inner, outputs, first, last, y, thread);
#endif
    const Scratch scratch = scratch_of(thread, width);
    for (int64_t m = 0; m < n; m += CHUNK_ROWS) {
        const int64_t rows = n - m < CHUNK_ROWS ? n - m : CHUNK_ROWS;
        const void *acts = prepare_acts(inner->up.kind, x + m * width, rows, width, scratch.acts, thread);
        for (int64_t j = first; j < last; j += LANES) {
            const int64_t count = last - j < LANES ? last - j : LANES;
            if (inner->gate.data) multiply_lanes(acts, rows, width, inner->gate, j, outputs, scratch, gates);
            multiply_lanes(acts, rows, width, inner->up, j, outputs, scratch, ups);
            finish_inner(inner, gates, ups, LANES, rows, j, count, y + m * outputs, outputs);
        }
        end_product();
        if (shares_acts(inner->up.kind, rows, thread)) barrier(thread);
    }
}

typedef struct {
    const Matrix *matrix;
    const act_t *x;
    int64_t rows, width, outputs;
    float *y;
} Multiply;

static void multiply_task(const Thread *thread, const void *call) {
    const Multiply *of = call;
    matmul(of->x, of->rows, of->width, *of->matrix, NULL, of->outputs, of->y, NULL, of->outputs, 0, thread);
}

void multiply(
    const Matrix *matrix, const float *x, int64_t rows, int64_t width, int64_t outputs, float *y, int64_t threads,
    act_t *activations, char *scratch
) {
    to_acts(x, rows * width, activations);
    run(threads, scratch, scratch_bytes(rows, width), multiply_task,
        &(Multiply){matrix, activations, rows, width, outputs, y});
}

#endif
