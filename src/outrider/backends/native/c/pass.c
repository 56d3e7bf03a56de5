/* The compiled code of the native backend, in one unit: passes of Llama-shaped models over tree nodes and prompts,
   drafters that grow their trees in one call, the coupled rule, and what opens and packs weights. `abi.h` describes
   it. */

#include "block.h"
#include "formats/int8.h"
#include "forward.h"
#include "growth.h"
#include "hydra.h"
#include "mamba.h"
#include "medusa.h"
#include "walk.h"
#ifdef OPENS_BLOCKS
#include "formats/repack.h"
#endif

int64_t scratch_bytes(int64_t rows, int64_t width) {
    const int64_t n = rows < CHUNK_ROWS ? rows : CHUNK_ROWS;
    const int64_t product = SCALES_BYTES(width) + WEIGHTS_BYTES(width) + ALIGNED(ACTS_BYTES(n, width));
    const int64_t attention = ALIGNED((int64_t)sizeof(AttentionWork));
    return 64 + (product > attention ? product : attention); /* 64: the address is rounded up (`thread_scratch`) */
}

#ifdef OPENS_BLOCKS
const int64_t block_lanes = LANES;
#else
const int64_t block_lanes = 0;
#endif
#ifdef BF16_WEIGHTS
const int64_t bf16_weights = 1;
#else
const int64_t bf16_weights = 0;
#endif
