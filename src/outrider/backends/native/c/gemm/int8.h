/* Integer products: a file's quants (`formats/int8.h`) with activations rounded to int8.

   32 activations of a row share a scale: x ~ scale * quant, scale = max |x| / 127, rounded to nearest even. The
   products of a block of 32 weights (or of sixteen, where these have a scale of their own) with quants are summed in
   int32, without rounding. Then in float32, block by block, in one order:

       kinds with a scale for each block     sum = fma(scale * dot, d, sum), sum = fma(scale * quants, -dmin, sum)
       with superblocks, of each block       part = fma(dot, scale, part),  least = fma(minimum, scale * quants, least)
           after 256 weights                sum = fma(d, part, sum),       sum = fma(-dmin, least, sum)

   where `dot` is the integer sum times the block's integer scale (of both halves together), which float32 holds
   exactly, and `quants` the sum of the quants that a minimum counts for. A result depends on its row of x and its row
   of W alone, and all instruction sets give the same bits. */

#ifndef OUTRIDER_INT8_H
#define OUTRIDER_INT8_H

#include "rows.h"
#if LANES == 8
#include "int8_lanes8.h"
#else
#include "int8_lanes16.h"
#endif

/* The results of `n` quantised rows of x for the LANES outputs from `first` on, as rows of LANES numbers. */
static void multiply_int8(const Activations *x, int64_t n, int64_t width, Matrix w, int64_t first, float *y) {
    const int64_t bytes = panel_bytes(w.kind, width), lane = first % PANEL_ROWS;
    const char *own = (const char *)w.data + first / PANEL_ROWS * bytes;
    const Panel panel = {
        width, lane, own + 4 * lane, own + width / BLOCK_WEIGHTS * block_bytes(integer_format(w.kind)),
        lane ? 0 : (machine.ahead * LANES + PANEL_ROWS - 1) / PANEL_ROWS * bytes
    };
#define MULTIPLY(kind) return multiply_int8_of(kind, x, n, panel, y);
    EACH_INTEGER_KIND(w.kind, MULTIPLY)
#undef MULTIPLY
}

#endif
