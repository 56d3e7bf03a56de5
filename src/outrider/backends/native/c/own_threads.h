/* The little of OpenMP's runtime that this code needs, on threads that ThreadSanitizer sees. Its own runtime (libgomp) is
   not instrumented: the sanitizer does not see what it orders, and reports races where there are none. Here regions are
   ordered by creating and joining threads, and shares of a loop are claimed by relaxed counts, which order nothing: what
   the code relies on beyond that it must order itself. For the sanitized build alone (`make sanitize`). */

#include <pthread.h>

#define LOOPS 4096 /* of one region */

typedef struct {
    void (*work)(void *);
    void *data;
    unsigned threads;
    pthread_barrier_t barrier;
    int64_t taken[LOOPS]; /* of each loop, the shares that were claimed */
} Region;

static _Thread_local struct {
    Region *region;
    int thread, loop;                /* this one's number; loops that it has begun */
    long first, beyond, step, chunk; /* of the last one */
} own = {.loop = -1};

typedef struct {
    Region *region;
    int thread;
    pthread_t id;
} Worker;

static void *worked(void *given) {
    const Worker *worker = given;
    own.region = worker->region;
    own.thread = worker->thread;
    own.loop = -1;
    worker->region->work(worker->region->data);
    return NULL;
}

int omp_get_thread_num(void) { return own.region ? own.thread : 0; }
int omp_get_num_threads(void) { return own.region ? (int)own.region->threads : 1; }

void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
    Region *region = calloc(1, sizeof *region);
    Worker *workers = calloc(threads, sizeof *workers);
    EXPECT(region && workers && !own.region);
    *region = (Region){.work = work, .data = data, .threads = threads};
    pthread_barrier_init(&region->barrier, NULL, threads);
    for (unsigned i = 0; i < threads; i++) workers[i] = (Worker){.region = region, .thread = (int)i};
    for (unsigned i = 1; i < threads; i++) EXPECT(!pthread_create(&workers[i].id, NULL, worked, workers + i));
    worked(workers);
    for (unsigned i = 1; i < threads; i++) pthread_join(workers[i].id, NULL);
    own.region = NULL;
    pthread_barrier_destroy(&region->barrier);
    free(workers);
    free(region);
}

_Bool GOMP_loop_nonmonotonic_dynamic_next(long *from, long *to) {
    const long share = __atomic_fetch_add(&own.region->taken[own.loop], 1, __ATOMIC_RELAXED);
    const long begin = own.first + share * own.chunk * own.step, end = begin + own.chunk * own.step;
    *from = begin;
    *to = end < own.beyond ? end : own.beyond;
    return begin < own.beyond;
}

_Bool GOMP_loop_nonmonotonic_dynamic_start(long first, long beyond, long step, long chunk, long *from, long *to) {
    own.loop++;
    EXPECT(own.loop < LOOPS && step > 0);
    own.first = first;
    own.beyond = beyond;
    own.step = step;
    own.chunk = chunk;
    return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

void GOMP_loop_end(void) { pthread_barrier_wait(&own.region->barrier); }
void GOMP_loop_end_nowait(void) {}
