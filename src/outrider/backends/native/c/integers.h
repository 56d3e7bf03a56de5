/* Products of whole numbers (W4A8, W8A8): weights of four or eight bits with activations that are rounded to eight bits,
   32 at a time with a scale of their own. 32 products are one sum of whole numbers, which rounds nothing; such sums are
   added up in float, block by block, however many rows there are. So a result depends on its row of x and its row of W
   alone. It is another target than the one whose activations are floats. Eight outputs are computed at a time, with AVX2;
   where the processor has VNNI, one instruction adds four products, and the sums are the same. */

#define TINY 1e-30f /* what is smaller is 0 */
#define WHOLE(kind) ((kind) == W4A8 || (kind) == W8A8)
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define FOURS(sum, w, x) _mm256_dpbusd_epi32(sum, w, x) /* adds four products in each lane */
#elif defined(__AVXVNNI__)
#define FOURS(sum, w, x) _mm256_dpbusd_avx_epi32(sum, w, x)
#endif

/* 32 activations of one row: number * scale; and what they add up to. */
typedef struct {
    int8_t number[BLOCK_WEIGHTS];
    float scale, sum;
} Activations;

INLINE __m256 eight_inputs(const act_t *x) {
#ifdef NARROW
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
#else
    return _mm256_loadu_ps(x);
#endif
}

INLINE void round_block(const act_t *x, Activations *to) {
    const __m256i sign = _mm256_set1_epi32((int)0x80000000);
    __m256i found[4], most = _mm256_setzero_si256(); /* as whole numbers, among which those of no number are the largest */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        most = _mm256_max_epi32(most, _mm256_andnot_si256(sign, _mm256_castps_si256(eight_inputs(x + 8 * i))));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    const float largest = _mm_cvtss_f32(_mm_castsi128_ps(half));
    const __m256 factor = _mm256_set1_ps(largest > TINY ? 127.0f / largest : 0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) found[i] = _mm256_cvtps_epi32(_mm256_mul_ps(eight_inputs(x + 8 * i), factor));
    const __m256i all = _mm256_packs_epi16(_mm256_packs_epi32(found[0], found[1]), _mm256_packs_epi32(found[2], found[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), bias = _mm256_set1_epi8(-128);
    _mm256_storeu_si256((__m256i *)to->number, _mm256_permutevar8x32_epi32(all, order));
    const __m256i quarters = _mm256_sad_epu8(_mm256_xor_si256(all, bias), _mm256_setzero_si256()); /* of number + 128 */
    const __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
    const int sum = _mm_cvtsi128_si32(halves) + _mm_extract_epi32(halves, 2) - 128 * BLOCK_WEIGHTS;
    to->scale = largest <= TINY ? 0.0f : largest * (1.0f / 127.0f);
    to->sum = to->scale * (float)sum;
}

/* `n` rows of x, block by block: all rows' first blocks, then all second ones. */
static const act_t *round_rows(const act_t *x, int64_t n, int64_t width, act_t *room) {
    Activations *to = (Activations *)room;
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS)
        for (int64_t i = 0; i < n; i++) round_block(x + i * width + k, to++);
    return room;
}

/* The eight vectors of a block: four with numbers 8 v .. 8 v + 7 of rows 0, 1, 4 and 5, four with those of 2, 3, 6 and 7. */
INLINE void open_block(const int kind, const char *from, __m256i w[8]) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        const __m256i *place = (const __m256i *)(from + 32 * v), one = _mm256_loadu_si256(place);
        const __m256i low = _mm256_set1_epi8(15);
        w[v] = kind == W4A8 ? _mm256_and_si256(one, low) : one;
        w[v + 4] = kind == W4A8 ? _mm256_and_si256(_mm256_srli_epi16(one, 4), low) : _mm256_loadu_si256(place + 4);
    }
}

/* The sums of 32 products for eight outputs, in order. */
INLINE __m256i meet_block(const int kind, const __m256i w[8], const int8_t *number) {
    __m256i given[4], half[2];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        int64_t eight;
        memcpy(&eight, number + 8 * v, 8);
        given[v] = _mm256_set1_epi64x(eight);
    }
#ifdef FOURS
    const int narrow = 0;
#else
    const int narrow = kind == W4A8; /* are sums of sixteen bits? */
    const __m256i ones = _mm256_set1_epi16(1);
#endif
#define PLUS(a, b) (narrow ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b))
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        half[h] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const __m256i own = w[4 * h + v];
            const __m256i size = kind == W4A8 ? own : _mm256_abs_epi8(own);
            const __m256i with = kind == W4A8 ? given[v] : _mm256_sign_epi8(given[v], own);
#ifdef FOURS
            half[h] = FOURS(half[h], size, with);
#else
            const __m256i twos = _mm256_maddubs_epi16(size, with);
            half[h] = PLUS(half[h], narrow ? twos : _mm256_madd_epi16(twos, ones)); /* two of eight bits fill sixteen */
#endif
        }
    }
    const __m256 a = _mm256_castsi256_ps(half[0]), b = _mm256_castsi256_ps(half[1]);
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
    const __m256i both = PLUS(even, odd); /* of four bits: at most 16 * 15 * 127, which sixteen bits hold */
#undef PLUS
#ifndef FOURS
    if (narrow) return _mm256_madd_epi16(both, ones);
#endif
    return both;
}

/* `n` rows of x with the eight outputs at `w`, as rows of LANES numbers. */
INLINE void eight_outputs(
    const int kind, const int64_t n, const Activations *x, int64_t width, const char *w, int64_t ahead, float *y
) {
    const char *known = w + width / BLOCK_WEIGHTS * 8 * (kind == W4A8 ? 16 : 32);
    __m256 sum[ROWS];
    for (int64_t i = 0; i < n; i++) sum[i] = _mm256_setzero_ps();
    for (int64_t g = 0; g < width / BLOCK_WEIGHTS; g++, x += n) {
        __m256i own[8];
        const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)known));
        const __m256 least = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)known + (kind == W4A8)));
        if (g % (kind == W4A8 ? 2 : 4) == 0) prefetch(known + ahead);
        for (int i = 0; i < 8 * (kind == W4A8 ? 16 : 32); i += LINE) prefetch(w + ahead + i);
        open_block(kind, w, own);
        for (int64_t i = 0; i < n; i++) {
            const __m256 found = _mm256_cvtepi32_ps(meet_block(kind, own, x[i].number));
            sum[i] = _mm256_fmadd_ps(_mm256_mul_ps(found, _mm256_set1_ps(x[i].scale)), scale, sum[i]);
            if (kind == W4A8) sum[i] = _mm256_fmadd_ps(_mm256_set1_ps(x[i].sum), least, sum[i]);
        }
        w += 8 * (kind == W4A8 ? 16 : 32);
        known += kind == W4A8 ? 32 : 16;
    }
    for (int64_t i = 0; i < n; i++) _mm256_storeu_ps(y + i * LANES, sum[i]);
}

/* The same for each kind; one to four rows have code of their own, in which their sums stay in registers. */
INLINE void integers_of(
    const int kind, const Activations *x, int64_t n, int64_t width, const char *w, int64_t ahead, float *y
) {
    if (n == 1) return eight_outputs(kind, 1, x, width, w, ahead, y);
    if (n == 2) return eight_outputs(kind, 2, x, width, w, ahead, y);
    if (n == 3) return eight_outputs(kind, 3, x, width, w, ahead, y);
    if (n == 4) return eight_outputs(kind, 4, x, width, w, ahead, y);
    eight_outputs(kind, n, x, width, w, ahead, y);
}

/* The results of `n` rounded rows of x for LANES outputs from `first` on; those beyond `last` are nobody's. */
static void integers(const act_t *x, int64_t n, int64_t width, Matrix w, int64_t first, int64_t last, float *y) {
    const int64_t size = bytes(w.kind, width), ahead = machine.ahead * LANES * size;
    const Activations *given = (const Activations *)x;
    for (int64_t j = 0; j < LANES && first + j < last; j += 8) {
        const char *from = (const char *)w.data + (first + j) * size;
        if (w.kind == W4A8)
            integers_of(W4A8, given, n, width, from, ahead, y + j);
        else
            integers_of(W8A8, given, n, width, from, ahead, y + j);
    }
}
