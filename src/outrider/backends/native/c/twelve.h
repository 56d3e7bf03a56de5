/* bfloat16 numbers in twelve bits, to the last bit: how they are written, and what reads them. Most upper bytes, a sign and
   seven bits of the exponent, are one of sixteen: among normally distributed numbers one in some 10,000 is another. */

/* Sixteen upper bytes of the numbers of one block alone. */
typedef struct {
    int64_t block; /* of the four rows; -1: there are no more */
    uint8_t upper[16], unused[8];
} Other;

/* Of four rows in blocks of twelve bits. */
typedef struct {
    uint8_t upper[16];
    const Other *others; /* or NULL */
    uint8_t unused[40];
} Uppers;

INLINE Uppers *uppers(const char *four, int64_t width) {
    return (Uppers *)(four + width / BLOCK_WEIGHTS * KEPT(BF12));
}

INLINE __m256i twice(const uint8_t bytes[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
}

/* What the blocks of four rows are read with, one after the other. */
typedef struct {
    __m256i usual;
    const char *from, *next; /* the first block; the next one that has upper bytes of its own, or NULL */
    const Other *other;
} Reader;

INLINE Reader reader_of(const char *four, const int kind, int64_t width) {
    Reader reader = {_mm256_setzero_si256(), four, NULL, NULL};
    if (kind == BF12) {
        const Uppers *all = uppers(four, width);
        reader.usual = twice(all->upper);
        reader.other = all->others;
        if (all->others) reader.next = four + all->others->block * KEPT(BF12);
    }
    return reader;
}

/* The upper bytes for the block at `four`. */
INLINE __m256i table_at(Reader *reader, const char *four, const int kind) {
    if (kind != BF12 || four != reader->next) return reader->usual;
    const __m256i own = twice(reader->other->upper);
    reader->other++;
    reader->next = reader->other->block < 0 ? NULL : reader->from + reader->other->block * KEPT(BF12);
    return own;
}

/* The most frequent bytes, at most sixteen, most frequent first. Returns how many there are at all. */
static int most_frequent(const int64_t often[256], uint8_t upper[16]) {
    uint8_t kind[256];
    int kinds = 0;
    for (int i = 0; i < 256; i++)
        if (often[i]) kind[kinds++] = (uint8_t)i;
    for (int i = 0; i < 16 && i < kinds; i++)
        for (int j = i + 1; j < kinds; j++)
            if (often[kind[j]] > often[kind[i]]) {
                const uint8_t one = kind[i];
                kind[i] = kind[j];
                kind[j] = one;
            }
    for (int i = 0; i < 16; i++) upper[i] = kind[i < kinds ? i : 0];
    return kinds;
}

/* The upper bytes of the 128 numbers of a block, counted. */
static void count_block(const weight_t *four, int64_t width, int64_t often[256]) {
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < BLOCK_WEIGHTS; i++) often[four[r * width + i] >> 8]++;
}

/* One block, with these upper bytes. Returns 0 where a number has another one. */
static int write_block(const weight_t *four, int64_t width, const uint8_t upper[16], char *to) {
    const __m128i low = _mm_set1_epi16(255);
    __m256i all = _mm256_set1_epi8(-1), which[4];
    for (int r = 0; r < 4; r++, four += width) {
        __m128i lower[2], higher[2]; /* of sixteen numbers each: bytes 2 i of numbers i, bytes 2 i + 1 of numbers 8 + i */
        for (int b = 0; b < 2; b++) {
            const __m128i one = _mm_loadu_si128((const __m128i *)(four + 16 * b));
            const __m128i two = _mm_loadu_si128((const __m128i *)(four + 16 * b + 8));
            lower[b] = _mm_or_si128(_mm_and_si128(one, low), _mm_slli_epi16(two, 8));
            higher[b] = _mm_or_si128(_mm_srli_epi16(one, 8), _mm_andnot_si128(low, two));
        }
#define ORDERED(x) _mm256_set_m128i(_mm_unpackhi_epi64(x[0], x[1]), _mm_unpacklo_epi64(x[0], x[1]))
        const __m256i high = ORDERED(higher);
        _mm256_storeu_si256((__m256i *)(to + 32 * r), ORDERED(lower));
#undef ORDERED
        __m256i any = which[r] = _mm256_setzero_si256();
        for (int i = 0; i < 16; i++) {
            const __m256i same = _mm256_cmpeq_epi8(high, _mm256_set1_epi8((char)upper[i]));
            which[r] = _mm256_max_epu8(which[r], _mm256_and_si256(same, _mm256_set1_epi8((char)i)));
            any = _mm256_or_si256(any, same);
        }
        all = _mm256_and_si256(all, any);
    }
    for (int r = 0; r < 4; r += 2) {
        const __m256i both = _mm256_or_si256(which[r], _mm256_slli_epi16(which[r + 1], 4));
        _mm256_storeu_si256((__m256i *)(to + 4 * 32 + r / 2 * 32), both);
    }
    return _mm256_movemask_epi8(all) == -1;
}

/* Four rows of bfloat16 numbers in blocks of twelve bits. `others`: room for upper bytes of single blocks, of which `used`
   are taken. Returns 0 where that is too little, or where a block has more than sixteen. */
static int tighten(const weight_t *four, int64_t width, char *to, Other *others, int64_t room, int64_t *used) {
    int64_t often[256] = {0}, count = 0;
    Uppers *all = uppers(to, width);
    Other own[width / BLOCK_WEIGHTS + 1];
    memset(all, 0, sizeof *all);
    memset(own, 0, sizeof own);
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) count_block(four + k, width, often);
    most_frequent(often, all->upper);
    for (int64_t k = 0; k < width; k += BLOCK_WEIGHTS) {
        char *block = to + k / BLOCK_WEIGHTS * KEPT(BF12);
        if (write_block(four + k, width, all->upper, block)) continue;
        int64_t here[256] = {0};
        count_block(four + k, width, here);
        if (most_frequent(here, own[count].upper) > 16) return 0;
        write_block(four + k, width, own[count].upper, block);
        own[count++].block = k / BLOCK_WEIGHTS;
    }
    if (!count) return 1;
    own[count++].block = -1;
    const int64_t first = __atomic_fetch_add(used, count, __ATOMIC_RELAXED);
    if (first + count > room) return 0;
    memcpy(others + first, own, count * sizeof *own);
    all->others = others + first;
    return 1;
}

typedef struct {
    const weight_t *from;
    int64_t outputs, width;
    char *to;
    Other *others;
    int64_t capacity, *used, *done;
} Tightening;

static void tighten_task(const Team *team, const void *call) {
    const Tightening *of = call;
    const int64_t width = of->width, fours = of->outputs / 4;
    for (int64_t i = 4 * own_first(team, fours); i < 4 * own_last(team, fours); i += 4)
        if (!tighten(of->from + i * width, width, of->to + i * bytes(BF12, width), of->others, of->capacity, of->used)) {
            __atomic_store_n(of->done, 0, __ATOMIC_RELAXED);
            return;
        }
}

/* All rows of a matrix, [outputs, width], of which there are four times some. Returns 0 where they cannot be written so. */
int64_t pack_bf12(
    const weight_t *from, int64_t outputs, int64_t width, char *to, void *others, int64_t capacity, int64_t threads
) {
    int64_t done = 1, used = 0;
    run(threads, NULL, 0, tighten_task, &(Tightening){from, outputs, width, to, others, capacity, &used, &done});
    return done;
}
