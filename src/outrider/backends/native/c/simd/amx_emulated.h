/* Tiles in plain C, for builds that check the code with tiles on processors without them (EMULATED_AMX). Results are those
   of the instructions: even and odd products are added up apart, each fused, and subnormal numbers count as zero. */

#include <math.h>

static _Thread_local struct {
    TileShapes shapes;
    _Alignas(64) uint8_t data[8][16][64];
} tiles;

static void tile_configure(const TileShapes *shapes) {
    tiles.shapes = *shapes;
    memset(tiles.data, 0, sizeof tiles.data);
}

static void tile_release(void) {
    tiles.shapes.palette = 0;
}
INLINE void tile_fence(void) {}

static void tile_zero(int tile) {
    EXPECT(tiles.shapes.palette == 1);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

static void tile_load(int tile, const void *from, int64_t stride) {
    EXPECT(tiles.shapes.palette == 1);
    for (int r = 0; r < tiles.shapes.rows[tile]; r++)
        memcpy(tiles.data[tile][r], (const char *)from + r * stride, tiles.shapes.bytes[tile]);
}

static void tile_store(int tile, void *to, int64_t stride) {
    EXPECT(tiles.shapes.palette == 1);
    for (int r = 0; r < tiles.shapes.rows[tile]; r++)
        memcpy((char *)to + r * stride, tiles.data[tile][r], tiles.shapes.bytes[tile]);
}

static float without_subnormals(float x) {
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

static float tile_element(int tile, int row, int at) {
    uint16_t bits;
    memcpy(&bits, tiles.data[tile][row] + 2 * at, 2);
    return without_subnormals(from_bf16(bits));
}

static void tile_dot(int sum, int a, int b) {
    const int rows = tiles.shapes.rows[a], pairs = tiles.shapes.bytes[a] / 4, columns = tiles.shapes.bytes[b] / 4;
    EXPECT(tiles.shapes.palette == 1 && tiles.shapes.rows[sum] == rows && tiles.shapes.rows[b] == pairs);
    EXPECT(tiles.shapes.bytes[sum] == 4 * columns);
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < columns; n++) {
            float even = 0, odd = 0, before;
            for (int k = 0; k < pairs; k++) {
                even = without_subnormals(fmaf(tile_element(a, m, 2 * k), tile_element(b, k, 2 * n), even));
                odd = without_subnormals(fmaf(tile_element(a, m, 2 * k + 1), tile_element(b, k, 2 * n + 1), odd));
            }
            memcpy(&before, tiles.data[sum][m] + 4 * n, 4);
            const float after = without_subnormals(without_subnormals(before) + without_subnormals(even + odd));
            memcpy(tiles.data[sum][m] + 4 * n, &after, 4);
        }
}
