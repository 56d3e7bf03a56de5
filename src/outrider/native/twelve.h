/* bfloat16 numbers in twelve bits, to the last bit: how they are written, and what reads them. Most upper bytes, a sign and
   seven bits of the exponent, are one of sixteen: among normally distributed numbers one in some 10,000 is another. */

/* Sixteen upper bytes of the numbers of one block alone. */
typedef struct {
    integer block; /* of the four rows; -1: there are no more */
    uint8_t upper[16], unused[8];
} Other;

/* Of four rows in blocks of twelve bits. */
typedef struct {
    uint8_t upper[16];
    const Other *others; /* or NULL */
    uint8_t unused[40];
} Uppers;

INLINE Uppers *uppers(const char *four, integer width) {
    return (Uppers *)(four + width / GROUP * KEPT(TWELVE));
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

INLINE Reader reader_of(const char *four, const int kind, integer width) {
    Reader reader = {_mm256_setzero_si256(), four, NULL, NULL};
    if (kind == TWELVE) {
        const Uppers *all = uppers(four, width);
        reader.usual = twice(all->upper);
        reader.other = all->others;
        if (all->others) reader.next = four + all->others->block * KEPT(TWELVE);
    }
    return reader;
}

/* The upper bytes for the block at `four`. */
INLINE __m256i table_at(Reader *reader, const char *four, const int kind) {
    if (kind != TWELVE || four != reader->next) return reader->usual;
    const __m256i own = twice(reader->other->upper);
    reader->other++;
    reader->next = reader->other->block < 0 ? NULL : reader->from + reader->other->block * KEPT(TWELVE);
    return own;
}

/* Which of sixteen bytes each possible byte is; -1: none of them. */
static void places_of(const uint8_t upper[16], int8_t place[256]) {
    memset(place, -1, 256);
    for (int i = 15; i >= 0; i--) place[upper[i]] = (int8_t)i; /* some are there twice */
}

/* The most frequent of a kind, at most sixteen, most frequent first. Returns how many kinds there are. */
static int most_frequent(const integer often[256], uint8_t upper[16]) {
    uint8_t taken[256] = {0};
    int kinds = 0;
    for (int i = 0; i < 256; i++) kinds += often[i] > 0;
    for (int i = 0; i < 16; i++) {
        int best = 0;
        for (int j = 1; j < 256; j++)
            if (taken[best] || (!taken[j] && often[j] > often[best])) best = j;
        taken[best] = 1;
        upper[i] = often[best] ? (uint8_t)best : upper[0];
    }
    return kinds;
}

/* The upper bytes of the 128 numbers of a block, counted. */
static void count_block(const number *four, integer width, integer often[256]) {
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < GROUP; i++) often[four[r * width + i] >> 8]++;
}

/* Returns 0 where a number has another upper byte. */
static int write_block(const number *four, integer width, const int8_t place[256], char *to) {
    int all = 0;
    memset(to + 4 * 32, 0, 2 * 32);
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < GROUP; i++) {
            const number one = four[r * width + i];
            const int at = 16 * (i / 4 % 2) + 8 * (i / 16) + 2 * (i % 4) + i / 8 % 2, upper = place[one >> 8];
            to[32 * r + at] = (char)one;
            to[4 * 32 + r / 2 * 32 + at] |= (char)(upper << r % 2 * 4);
            all |= upper;
        }
    return all >= 0;
}

/* Four rows of bfloat16 numbers in blocks of twelve bits. `others`: room for upper bytes of single blocks, of which `used`
   are taken. Returns 0 where that is too little, or where a block has more than sixteen. */
static int tighten(const number *four, integer width, char *to, Other *others, integer room, integer *used) {
    integer often[256] = {0}, count = 0;
    int8_t place[256];
    Uppers *all = uppers(to, width);
    Other own[width / GROUP + 1];
    memset(all, 0, sizeof *all);
    memset(own, 0, sizeof own);
    for (integer k = 0; k < width; k += GROUP) count_block(four + k, width, often);
    most_frequent(often, all->upper);
    places_of(all->upper, place);
    for (integer k = 0; k < width; k += GROUP) {
        char *block = to + k / GROUP * KEPT(TWELVE);
        if (write_block(four + k, width, place, block)) continue;
        integer here[256] = {0};
        int8_t own_place[256];
        count_block(four + k, width, here);
        if (most_frequent(here, own[count].upper) > 16) return 0;
        places_of(own[count].upper, own_place);
        write_block(four + k, width, own_place, block);
        own[count++].block = k / GROUP;
    }
    if (!count) return 1;
    own[count++].block = -1;
    const integer first = __atomic_fetch_add(used, count, __ATOMIC_RELAXED);
    if (first + count > room) return 0;
    memcpy(others + first, own, count * sizeof *own);
    all->others = others + first;
    return 1;
}

/* All rows of a matrix, [outputs, width], of which there are four times some. Returns 0 where they cannot be written so. */
integer twelve_bits(
    const number *from, integer outputs, integer width, char *to, Other *others, integer room, integer threads
) {
    integer done = 1, used = 0;
#pragma omp parallel for num_threads((int)threads) reduction(&& : done)
    for (integer i = 0; i < outputs; i += 4)
        done = done && tighten(from + i * width, width, to + i * bytes(TWELVE, width), others, room, &used);
    return done;
}
