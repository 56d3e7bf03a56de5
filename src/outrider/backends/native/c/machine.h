/* What suits the processor that the code runs on: how far ahead weights are prefetched, and into which cache. */

#ifndef OUTRIDER_MACHINE_H
#define OUTRIDER_MACHINE_H

#include "simd/vector.h"

static struct {
    int64_t first_cache; /* bytes of the first-level cache */
    int64_t second;      /* 1: weights are prefetched into the second-level cache, else into the first */
    int64_t ahead;       /* columns of weights from the one that is multiplied to the one that is prefetched */
} machine = {32768, 0, 1};

void tune(int64_t first_cache, int64_t second, int64_t ahead) {
    machine.first_cache = first_cache;
    machine.second = second;
    machine.ahead = ahead;
}

INLINE void prefetch(const void *line) {
    if (machine.second)
        prefetch_far(line);
    else
        prefetch_near(line);
}

#endif
