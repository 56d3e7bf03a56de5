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
const integer whole_products = 1;
#define ROOM(kind, n, width) (WHOLE(kind) ? (n) * (width) / GROUP * (integer)(sizeof(Activations) / sizeof(input)) : 1)
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
INLINE void share(integer outputs, const Team *team, integer *first, integer *last) {
    const integer columns = (outputs + LANES - 1) / LANES;
    *first = own_first(team, columns) * LANES;
    *last = own_last(team, columns) * LANES;
    if (*last > outputs) *last = outputs;
}

INLINE vector silu(vector x) {
    return DIV(x, ADD(ALL(1.0f), exponential(SUB(ZERO, MAX(ALL(-87.0f), x)))));
}

integer scratch_bytes(integer rows, integer width) {
    const integer n = rows < ROWS ? rows : ROWS, most = ROOM(W8A8, n, width);
    return LINED(most * (integer)sizeof(input));
}

/* The same of rows for a kind of weights: where `laid` writes them. */
INLINE input *scratch_of(const Team *team, integer kind, integer rows, integer width) {
    EXPECT(ROOM(kind, rows, width) * (integer)sizeof(input) <= team->gate->bytes || ROOM(kind, rows, width) == 1);
    return (input *)team->scratch;
}

#ifdef TILES
#include "many.h"
#endif

/* y[:, own outputs] = x W^T + bias, or added to what is there. `to`: the row of y for each of x; NULL: the same. */
static void product(
    const input *x, integer n, integer width, Matrix w, const float *bias, integer outputs, float *y,
    const integer *to, integer stride, int add, const Team *team
) {
    integer first, last;
    float found[ROWS * LANES];
    share(outputs, team, &first, &last);
#ifdef TILES
    if (n > FEWER) return product_of_many(x, n, width, w, bias, outputs, first, last, y, to, stride, add, team);
#endif
    for (integer m = 0; m < n; m += ROWS) {
        const integer rows = n - m < ROWS ? n - m : ROWS;
        const input *given = laid(w.kind, x + m * width, rows, width, scratch_of(team, w.kind, rows, width));
        begin(rows);
        for (integer j = first; j < last; j += LANES) {
            const integer count = last - j < LANES ? last - j : LANES;
            column(given, rows, width, w, j, outputs, found);
            for (integer i = 0; i < rows; i++) {
                float *own = y + (to ? to[m + i] : m + i) * stride + j;
                const float *from = found + i * LANES;
                if (count == LANES) {
                    const vector value = bias ? ADD(LOAD(from), LOAD(bias + j)) : LOAD(from);
                    STORE(own, add ? ADD(LOAD(own), value) : value);
                    continue;
                }
                for (integer k = 0; k < count; k++) {
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
    const input *x, integer n, integer width, Matrix gate, Matrix up, integer outputs, input *y, const Team *team
) {
    integer first, last;
    float opened[ROWS * LANES], found[ROWS * LANES];
    share(outputs, team, &first, &last);
#ifdef TILES
    if (n > FEWER) return gated_of_many(x, n, width, gate, up, outputs, first, last, y, team);
#endif
    for (integer m = 0; m < n; m += ROWS) {
        const integer rows = n - m < ROWS ? n - m : ROWS;
        const input *given = laid(gate.kind, x + m * width, rows, width, scratch_of(team, gate.kind, rows, width));
        begin(rows);
        for (integer j = first; j < last; j += LANES) {
            const integer count = last - j < LANES ? last - j : LANES;
            column(given, rows, width, gate, j, outputs, opened);
            column(given, rows, width, up, j, outputs, found);
            for (integer i = 0; i < rows; i++) {
                const vector made = MUL(silu(LOAD(opened + i * LANES)), LOAD(found + i * LANES));
                input some[LANES], *to = y + (m + i) * outputs + j;
                STORE_INPUT(count < LANES ? some : to, made);
                if (count < LANES) memcpy(to, some, count * sizeof(input));
            }
        }
        end();
    }
}
