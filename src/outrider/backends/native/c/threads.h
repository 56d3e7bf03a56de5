/* A thread pool that is kept from call to call. A call runs a task on the calling thread, which has index 0, and on
   threads of the pool; they wait for each other at barriers, eight times in a layer.

   A thread that waits at a barrier spins for as long as is usual on a quiet machine, and then yields, so that another
   program gets the processor if it needs it. An idle thread spins a little longer than most gaps between calls, and
   then sleeps. Where more time is lost in waiting than one thread is worth, the calls that follow use one thread less,
   for a while.

   The pool serves one call at a time. A concurrent call runs on its own thread alone; results do not depend on the
   number of threads. After a fork the child makes a pool of its own.

   Where the process has loaded GCC's OpenMP runtime, as torch does, its threads are used instead. They spin for
   milliseconds after each of torch's operations, so a second pool would not get a processor: passes that alternate with
   torch's GEMMs took 1.5 times as long. */

#ifndef OUTRIDER_THREADS_H
#define OUTRIDER_THREADS_H

#ifndef _WIN32
#include <dlfcn.h>
#endif
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "types.h"

#define MILLISECONDS 1000000 /* in nanoseconds */
#define SPINS 2000           /* iterations, at most some 0.1 ms, before a waiting thread yields */
#define IDLE_SPIN (4 * MILLISECONDS) /* for which an idle thread spins before it sleeps */
#define STACK_BYTES (4 << 20)        /* of each thread of the pool */
#define MAX_THREADS 256
#define WINDOW (50 * MILLISECONDS) /* of passes, over which lost time is counted */
#define FIRST_BACKOFF (200 * MILLISECONDS) /* of passes, before a thread is tried again; doubled when that fails */
#define MAX_BACKOFF (3200 * (int64_t)MILLISECONDS)

typedef struct Thread Thread;
typedef void Task(const Thread *thread, const void *call);

/* What the threads of a call share. */
typedef struct {
    Task *task;
    const void *call;      /* its arguments */
    int64_t threads;       /* that run it: at most as many as requested */
    char *scratch;         /* of all threads, `bytes` each */
    int64_t bytes;
    int64_t arrived, generation; /* threads at the barrier; how many barriers all threads have passed */
    int64_t next_item;     /* of a loop whose items threads take in any order */
    int64_t waited;        /* nanoseconds that threads waited at barriers beyond the spins */
} Region;

/* A thread of a call. */
struct Thread {
    int64_t index, count; /* `count`: the threads of the call */
    Region *region;
    char *scratch; /* of this thread; a GEMM may overwrite it */
};

/* A thread of the pool. */
typedef struct {
    int64_t job; /* the address of the region that it runs; 0: idle */
    int64_t index, count, asleep;
    pthread_mutex_t lock;
    pthread_cond_t woken;
} __attribute__((aligned(64))) Worker;

static struct {
    Worker worker[MAX_THREADS];
    int64_t size;
    int64_t busy; /* 1 while a call uses it */
} pool;

#ifdef __SANITIZE_THREAD__
int64_t own_pool = 1; /* ThreadSanitizer does not see how OpenMP's runtime synchronises */
#else
int64_t own_pool; /* 1: OpenMP's threads are never used */
#endif

typedef void Parallel(void (*task)(void *), void *data, unsigned threads, unsigned flags);

static struct {
    Parallel *parallel; /* GOMP_parallel; NULL: the runtime is not loaded */
    int (*thread)(void), (*threads)(void);
} openmp;

/* How many threads the calling thread leaves unused because other programs need the processor. In nanoseconds. */
static _Thread_local struct {
    int64_t unused;             /* threads */
    int64_t passes, lost;       /* in this window: time in passes, and of it time lost in waiting */
    int64_t backoff, remaining; /* before another thread is tried: in all, and still to go */
} contention;

INLINE int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1000 * MILLISECONDS * (int64_t)time.tv_sec + time.tv_nsec;
}

/* Threads for the next call, of at most `threads`. (Exported, like `adapt_threads`, for tests.) */
int64_t usable_threads(int64_t threads) {
#ifdef __SANITIZE_THREAD__
    return threads; /* races are searched for between all of them, however long each takes */
#endif
    return threads > contention.unused ? threads - contention.unused : 1;
}

/* Record a pass on `threads` of the `allowed` threads: its duration, and how long its threads waited beyond the spins,
   summed over threads; both in nanoseconds. At the end of a window, change how many threads are used. */
void adapt_threads(int64_t allowed, int64_t threads, int64_t duration, int64_t waited) {
    if (contention.unused >= allowed) contention.unused = allowed - 1;
    contention.passes += duration;
    if (threads > 1) contention.lost += waited / (threads - 1);
    if (contention.passes < WINDOW) return;
    if (contention.lost * (threads - 1) > contention.passes - contention.lost) { /* one less is no slower */
        const int64_t doubled = 2 * contention.backoff;
        contention.unused++;
        contention.backoff = !doubled ? FIRST_BACKOFF : doubled < MAX_BACKOFF ? doubled : MAX_BACKOFF;
        contention.remaining = contention.backoff;
    } else if (!contention.unused) {
        contention.backoff = 0;
    } else if ((contention.remaining -= contention.passes) <= 0) {
        contention.unused--;
        contention.remaining = contention.backoff;
    }
    contention.passes = contention.lost = 0;
}

INLINE void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* Spin until *value differs from `old`, for at most so many iterations. Returns whether it differs. */
INLINE int spin(const int64_t *value, int64_t old, int64_t iterations) {
    for (int64_t i = 0; i < iterations; i++) {
        if (__atomic_load_n(value, __ATOMIC_ACQUIRE) != old) return 1;
        pause_briefly();
    }
    return 0;
}

/* Wait until *value differs from `old`. Returns the nanoseconds beyond the spins. */
static int64_t wait_while(const int64_t *value, int64_t old) {
    if (spin(value, old, SPINS)) return 0;
    const int64_t since = now();
    while (__atomic_load_n(value, __ATOMIC_ACQUIRE) == old) sched_yield();
    return now() - since;
}

/* Run a region's task on the thread `index` of `count`. */
static void run_task(Region *region, int64_t index, int64_t count) {
    const Thread thread = {index, count, region, region->scratch + index * region->bytes};
    if (!index) region->threads = count;
    region->task(&thread, region->call);
}

/* What a thread of the pool runs. */
static void *worker_loop(void *argument) {
    Worker *worker = argument;
    for (;;) {
        const int64_t since = now();
        while (!spin(&worker->job, 0, 100) && now() - since < IDLE_SPIN) {}
        if (!__atomic_load_n(&worker->job, __ATOMIC_ACQUIRE)) {
            pthread_mutex_lock(&worker->lock);
            __atomic_store_n(&worker->asleep, 1, __ATOMIC_SEQ_CST);
            while (!__atomic_load_n(&worker->job, __ATOMIC_SEQ_CST)) pthread_cond_wait(&worker->woken, &worker->lock);
            __atomic_store_n(&worker->asleep, 0, __ATOMIC_RELAXED);
            pthread_mutex_unlock(&worker->lock);
        }
        run_task((Region *)worker->job, worker->index, worker->count);
        __atomic_store_n(&worker->job, 0, __ATOMIC_RELEASE); /* from here on the region may be freed */
    }
    return NULL;
}

static void start_worker(Worker *worker, Region *region, int64_t count) {
    worker->count = count;
    __atomic_store_n(&worker->job, (int64_t)region, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&worker->asleep, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&worker->lock);
    pthread_cond_signal(&worker->woken);
    pthread_mutex_unlock(&worker->lock);
}

/* Grow the pool to `wanted` threads. Returns how many a call may use: fewer where the system gives no more. */
static int64_t grow_pool(int64_t wanted) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.size < wanted && pool.size < MAX_THREADS) {
        Worker *worker = pool.worker + pool.size;
        pthread_t id;
        *worker = (Worker){.index = pool.size + 1};
        pthread_mutex_init(&worker->lock, NULL);
        pthread_cond_init(&worker->woken, NULL);
        if (pthread_create(&id, &attributes, worker_loop, worker)) break;
        pool.size++;
    }
    pthread_attr_destroy(&attributes);
    return pool.size < wanted ? pool.size : wanted;
}

static void run_on_pool(Region *region, int64_t wanted) {
    const int acquired = !__atomic_exchange_n(&pool.busy, 1, __ATOMIC_ACQUIRE);
    const int64_t count = acquired ? 1 + grow_pool(wanted - 1) : 1;
    for (int64_t i = 0; i < count - 1; i++) start_worker(pool.worker + i, region, count);
    run_task(region, 0, count);
    for (int64_t i = 0; i < count - 1; i++) wait_while(&pool.worker[i].job, (int64_t)region);
    if (acquired) __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
}

static void run_openmp_thread(void *region) {
    run_task(region, openmp.thread(), openmp.threads());
}

/* Look for OpenMP's runtime in the process: at first, and whenever the pool has slept. */
static void find_openmp(void) {
#ifndef _WIN32
    if (own_pool || openmp.parallel || (pool.size && !__atomic_load_n(&pool.worker->asleep, __ATOMIC_RELAXED))) return;
    void *loaded = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!loaded) return;
    openmp.thread = (int (*)(void))dlsym(loaded, "omp_get_thread_num");
    openmp.threads = (int (*)(void))dlsym(loaded, "omp_get_num_threads");
    __atomic_store_n(&openmp.parallel, (Parallel *)dlsym(loaded, "GOMP_parallel"), __ATOMIC_RELEASE);
#endif
}

/* Run a task on at most `threads` threads, each with `bytes` of scratch, and wait until all have finished. */
static Region run(int64_t threads, char *scratch, int64_t bytes, Task *task, const void *call) {
    Region region = {.scratch = scratch, .bytes = bytes, .task = task, .call = call};
    if (threads < 2) {
        run_task(&region, 0, 1);
        return region;
    }
    find_openmp();
    Parallel *parallel = own_pool ? NULL : __atomic_load_n(&openmp.parallel, __ATOMIC_ACQUIRE);
    if (parallel)
        parallel(run_openmp_thread, &region, (unsigned)threads, 0);
    else
        run_on_pool(&region, threads);
    return region;
}

#ifndef _WIN32

/* A fork copies no threads, neither the pool's nor OpenMP's, whose runtime does not notice. */
static void forget_pool(void) {
    pool.size = pool.busy = 0;
    own_pool = 1;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_pool);
}

#endif

/* This thread's share of `count` items: share_begin .. share_end - 1. */
INLINE int64_t share_begin(const Thread *thread, int64_t count) {
    return count * thread->index / thread->count;
}

INLINE int64_t share_end(const Thread *thread, int64_t count) {
    return count * (thread->index + 1) / thread->count;
}

/* The next item of a loop whose items threads take in any order. The loop ends with a barrier, which resets it. */
INLINE int64_t next_item(const Thread *thread) {
    return __atomic_fetch_add(&thread->region->next_item, 1, __ATOMIC_RELAXED);
}

/* Wait until all threads of the call are here. */
static void barrier(const Thread *thread) {
    Region *region = thread->region;
    const int64_t generation = __atomic_load_n(&region->generation, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&region->arrived, 1, __ATOMIC_ACQ_REL) == thread->count) {
        __atomic_store_n(&region->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&region->next_item, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&region->generation, generation + 1, __ATOMIC_RELEASE);
        return;
    }
    const int64_t waited = wait_while(&region->generation, generation);
    if (waited) __atomic_add_fetch(&region->waited, waited, __ATOMIC_RELAXED);
}

#endif
