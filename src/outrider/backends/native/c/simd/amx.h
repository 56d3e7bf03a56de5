/* Tiles (AMX): eight registers of sixteen rows of 64 bytes. `tile_dot` adds sixteen by sixteen sums of 32 products of
   bfloat16 numbers, `tile_dot_int8` those of 64 products of int8 and uint8, in int32. Registers are numbered by
   constants. */

#ifndef OUTRIDER_AMX_H
#define OUTRIDER_AMX_H

#include "vector.h"

typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} TileShapes;

#ifdef EMULATED_AMX
#include "amx_emulated.h"
#else

INLINE void tile_configure(const TileShapes *shapes) {
    __asm__ volatile("" : : "m"(*shapes)); /* all of it is written */
    _tile_loadconfig(shapes);
}
INLINE void tile_release(void) {
    _tile_release();
}

/* What was stored before is read by tiles: gcc does not know that they read memory. */
INLINE void tile_fence(void) {
    __asm__ volatile("" ::: "memory");
}

#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride) _tile_loadd(tile, from, stride) /* `stride`: bytes from row to row */
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_dot(sum, a, b) _tile_dpbf16ps(sum, a, b) /* a: rows of pairs; b: pairs of columns */
#define tile_dot_int8(sum, a, b) _tile_dpbsud(sum, a, b) /* a: rows of four int8; b: four uint8 of columns */

#endif

#endif
