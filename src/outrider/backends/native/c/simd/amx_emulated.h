/* Tiles without AMX, for builds that check the code with tiles on processors that have AVX-512 alone (EMULATED_AMX).
   Results are those of the instructions: even and odd products are summed apart, fused, and subnormal numbers count as
   zero. */

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

INLINE vec_t without_subnormals(vec_t x) {
    return v_zero_below(x, v_max(x, v_sub(v_zero(), x)), v_set1(0x1p-126f));
}

/* The even or the odd numbers of a tile's row, widened. */
INLINE vec_t tile_numbers(int tile, int row, int odd) {
    ints_t pairs;
    memcpy(&pairs, tiles.data[tile][row], sizeof pairs);
    return without_subnormals((vec_t)(odd ? pairs & (int32_t)0xffff0000 : pairs << 16));
}

static void tile_dot(int sum, int a, int b) {
    const int rows = tiles.shapes.rows[a], pairs = tiles.shapes.bytes[a] / 4;
    EXPECT(tiles.shapes.palette == 1 && tiles.shapes.rows[sum] == rows && tiles.shapes.rows[b] == pairs);
    EXPECT(tiles.shapes.bytes[sum] == tiles.shapes.bytes[b]);
    for (int m = 0; m < rows; m++) {
        const vec_t left_even = tile_numbers(a, m, 0), left_odd = tile_numbers(a, m, 1);
        vec_t even = v_zero(), odd = v_zero(), before;
        for (int k = 0; k < pairs; k++) {
            even = without_subnormals(v_fma(v_set1(left_even[k]), tile_numbers(b, k, 0), even));
            odd = without_subnormals(v_fma(v_set1(left_odd[k]), tile_numbers(b, k, 1), odd));
        }
        memcpy(&before, tiles.data[sum][m], sizeof before);
        before = without_subnormals(v_add(without_subnormals(before), without_subnormals(v_add(even, odd))));
        memcpy(tiles.data[sum][m], &before, sizeof before);
    }
}

UNUSED static void tile_dot_int8(int sum, int a, int b) {
    const int rows = tiles.shapes.rows[a], fours = tiles.shapes.bytes[a] / 4, columns = tiles.shapes.bytes[b] / 4;
    EXPECT(tiles.shapes.palette == 1 && tiles.shapes.rows[sum] == rows && tiles.shapes.rows[b] == fours);
    EXPECT(tiles.shapes.bytes[sum] == tiles.shapes.bytes[b]);
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < columns; n++) {
            int32_t total;
            memcpy(&total, tiles.data[sum][m] + 4 * n, sizeof total);
            for (int k = 0; k < 4 * fours; k++)
                total += (int8_t)tiles.data[a][m][k] * tiles.data[b][k / 4][4 * n + k % 4];
            memcpy(tiles.data[sum][m] + 4 * n, &total, sizeof total);
        }
}
