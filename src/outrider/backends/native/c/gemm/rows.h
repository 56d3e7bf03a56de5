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

/* The thread's scratch, from a multiple of 64 bytes on. */
INLINE char *thread_scratch(const Team *team) {
    return (char *)(((uintptr_t)team->scratch + 63) / 64 * 64);
}

INLINE Scratch scratch_of(const Team *team, int64_t width) {
    char *scratch = thread_scratch(team);
    return (Scratch){
        (float *)scratch, scratch + SCALES_BYTES(width), (act_t *)(scratch + SCALES_BYTES(width) + WEIGHTS_BYTES(width))
    };
}

#endif
