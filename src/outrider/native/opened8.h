/* Blocks opened in eight lanes: to floats, whose upper halves are the bfloat16 numbers that the weights are. */

/* x to eight significant bits, to the nearest, ties to even: what rounding leaves of 2^16 times x less x is taken from 2^16
   times x (Veltkamp's splitting; all 2^23 fractions were tried). */
INLINE vector shortened(vector x) {
    return _mm256_fmsub_ps(x, ALL(65536.0f), MUL(x, ALL(65535.0f)));
}

/* The numbers of one of four rows in the block at `four`; `known`: the scales of the four, or scales and minima. */
INLINE void spread(const char *four, const int kind, const int row, const float *known, vector to[4]) {
    if (kind == FOUR) { /* all sixteen numbers are made, and their bytes looked up */
        const vector scale = ALL(known[2 * row]), least = ALL(known[2 * row + 1]);
        const vector even = FMA(_mm256_setr_ps(0, 2, 4, 6, 8, 10, 12, 14), scale, least); /* no product is rounded */
        const vector odd = FMA(_mm256_setr_ps(1, 3, 5, 7, 9, 11, 13, 15), scale, least);
        const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(shortened(even)), 16);
        const __m256i words = _mm256_blend_epi16(low, _mm256_castps_si256(shortened(odd)), 0xaa);
        const __m256i parts = _mm256_shuffle_epi8( /* the lower bytes of eight numbers, and the upper ones */
            words, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15))
        );
        const __m256i lower = _mm256_permute4x64_epi64(parts, 0x88), upper = _mm256_permute4x64_epi64(parts, 0xdd);
        const __m256i two = _mm256_loadu_si256((const __m256i *)(four + row / 2 * 32));
        const __m256i which = _mm256_and_si256(row % 2 ? _mm256_srli_epi16(two, 4) : two, _mm256_set1_epi8(15));
        const __m256i a = _mm256_shuffle_epi8(lower, which), b = _mm256_shuffle_epi8(upper, which);
        const __m256i first = _mm256_unpacklo_epi8(a, b), second = _mm256_unpackhi_epi8(a, b);
        const __m256i none = _mm256_setzero_si256();
        to[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, first));
        to[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, first));
        to[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, second));
        to[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, second));
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *)(four + 32 * row + 8 * i));
            to[i] = shortened(MUL(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), ALL(known[row])));
        }
    }
}

/* Memory is asked for a block, `ahead` bytes further. */
INLINE void fetch(const char *four, const int kind, integer ahead) {
    _mm_prefetch(four + ahead, SOON);
    if (kind == EIGHT) _mm_prefetch(four + ahead + 64, SOON);
}

/* Four rows of `width` numbers, as floats. */
INLINE void open_four(const char *four, const int kind, integer width, const float *known, integer ahead, float *to) {
    for (integer k = 0; k < width; k += GROUP, four += KEPT(kind), known += KNOWN(kind)) {
        fetch(four, kind, ahead);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            vector found[4];
            spread(four, kind, r, known, found);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) STORE(to + r * width + k + LANES * i, found[i]);
        }
    }
}

/* The same as the model keeps them. */
static void unpack(const char *four, integer kind, integer width, integer ahead, number *to) {
    float known[8 * (width / GROUP)], opened[4 * width];
    know(four, kind, width, ahead, known);
    if (kind == FOUR)
        open_four(four, FOUR, width, known, ahead, opened);
    else
        open_four(four, EIGHT, width, known, ahead, opened);
    for (integer k = 0; k < 4 * width; k++) to[k] = rounded(opened[k]);
}
