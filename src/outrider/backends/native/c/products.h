/* y = x W^T, with W as the model keeps it: a row of `width` numbers for each output. */

#define ROWS 64 /* of x, whose numbers stay in the processor's cache while the weights pass by */

/* Bytes of scratch that each thread of a product needs, at most. */
#define LINED(bytes) (((bytes) + 63) / 64 * 64)
#ifdef TILES
#include "tiles.h"
#define ROOM(kind, n, width) ((n) > 1 ? LAID(n) * (width) : 1)
#else
#ifdef HALVES
#include "integers.h"
#define ROOM(kind, n, width) (WHOLE(kind) ? (n) * (width) / BLOCK_WEIGHTS * (int64_t)(sizeof(Activations) / sizeof(act_t)) : 1)
#else
#define ROOM(kind, n, width) 1
#endif
#if LANES == 8
#include "eights.h"
#else
#include "lanes.h"
#endif
#endif

/* This thread's share of so many outputs, in whole columns. */
INLINE void share(int64_t outputs, const Team *team, int64_t *first, int64_t *last) {
    const int64_t columns = (outputs + LANES - 1) / LANES;
    *first = own_first(team, columns) * LANES;
    *last = own_last(team, columns) * LANES;
    if (*last > outputs) *last = outputs;
}

INLINE vector silu(vector x) {
    return DIV(x, ADD(ALL(1.0f), exponential(SUB(ZERO, MAX(ALL(-87.0f), x)))));
}

int64_t scratch_bytes(int64_t rows, int64_t width) {
    const int64_t n = rows < ROWS ? rows : ROWS, most = ROOM(W8A8, n, width);
    return LINED(most * (int64_t)sizeof(act_t));
}

/* The same of rows for a kind of weights: where `laid` writes them. */
INLINE act_t *scratch_of(const Team *team, int64_t kind, int64_t rows, int64_t width) {
    EXPECT(ROOM(kind, rows, width) * (int64_t)sizeof(act_t) <= team->region->bytes || ROOM(kind, rows, width) == 1);
    return (act_t *)team->scratch;
}

#ifdef TILES
#include "many.h"
#endif

/* y[:, own outputs] = x W^T + bias, or added to what is there. `to`: the row of y for each of x; NULL: the same. */
static void product(
    const act_t *x, int64_t n, int64_t width, Matrix w, const float *bias, int64_t outputs, float *y,
    const int64_t *to, int64_t stride, int add, const Team *team
) {
    int64_t first, last;
    float found[ROWS * LANES];
    share(outputs, team, &first, &last);
#ifdef TILES
    if (n > FEWER) return product_of_many(x, n, width, w, bias, outputs, first, last, y, to, stride, add, team);
#endif
    for (int64_t m = 0; m < n; m += ROWS) {
        const int64_t rows = n - m < ROWS ? n - m : ROWS;
        const act_t *given = laid(w.kind, x + m * width, rows, width, scratch_of(team, w.kind, rows, width));
        begin(rows);
        for (int64_t j = first; j < last; j += LANES) {
            const int64_t count = last - j < LANES ? last - j : LANES;
            column(given, rows, width, w, j, outputs, found);
            for (int64_t i = 0; i < rows; i++) {
                float *own = y + (to ? to[m + i] : m + i) * stride + j;
                const float *from = found + i * LANES;
                if (count == LANES) {
                    const vector value = bias ? ADD(LOAD(from), LOAD(bias + j)) : LOAD(from);
                    STORE(own, add ? ADD(LOAD(own), value) : value);
                    continue;
                }
                for (int64_t k = 0; k < count; k++) {
                    float value = from[k];
                    if (bias) value += bias[j + k];
                    own[k] = add ? own[k] + value : value;
                }
            }
        }
        end();
    }
}

/* y[:, own outputs] = silu(x G^T) * (x U^T): the inner layer of a gated network. Both round x, or neither does. */
static void gated(
    const act_t *x, int64_t n, int64_t width, Matrix gate, Matrix up, int64_t outputs, act_t *y, const Team *team
) {
    int64_t first, last;
    float opened[ROWS * LANES], found[ROWS * LANES];
    share(outputs, team, &first, &last);
#ifdef TILES
    if (n > FEWER) return gated_of_many(x, n, width, gate, up, outputs, first, last, y, team);
#endif
    for (int64_t m = 0; m < n; m += ROWS) {
        const int64_t rows = n - m < ROWS ? n - m : ROWS;
        const act_t *given = laid(gate.kind, x + m * width, rows, width, scratch_of(team, gate.kind, rows, width));
        begin(rows);
        for (int64_t j = first; j < last; j += LANES) {
            const int64_t count = last - j < LANES ? last - j : LANES;
            column(given, rows, width, gate, j, outputs, opened);
            column(given, rows, width, up, j, outputs, found);
            for (int64_t i = 0; i < rows; i++) {
                const vector made = MUL(silu(LOAD(opened + i * LANES)), LOAD(found + i * LANES));
                act_t some[LANES], *to = y + (m + i) * outputs + j;
                STORE_INPUT(count < LANES ? some : to, made);
                if (count < LANES) memcpy(to, some, count * sizeof(act_t));
            }
        }
        end();
    }
}
