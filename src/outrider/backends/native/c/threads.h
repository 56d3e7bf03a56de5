/* A pool of threads, kept from call to call. A call runs a task on its own thread, number 0, and on threads of the pool;
   these wait for each other at barriers, eight times in a layer.

   A thread that waits at a barrier spins for as long as is usual on a quiet machine, and then yields: where another program
   needs the processor, it gets it. A thread without work spins a little longer than most gaps between calls, and then
   sleeps. And where more time is lost in waiting than one thread is worth, the calls that follow do with one thread less,
   for a while.

   The pool serves one call at a time. Another one that comes meanwhile runs on its own thread alone; results do not depend
   on the number of threads. After a fork the child makes a pool of its own.

   Where the process has loaded GCC's OpenMP runtime, as torch does, its threads are used instead. They spin for
   milliseconds after each of torch's operations, so a second pool would find no processor free: passes that alternate with
   torch's products took 1.5 times as long. */

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
#define SPINS 2000           /* looks, at most some 0.1 ms, before the processor is given away */
#define AWAKE (4 * MILLISECONDS) /* for which a thread without work spins, before it sleeps */
#define STACK (4 << 20)          /* bytes, of each thread of the pool */
#define MOST_THREADS 256
#define JUDGED (50 * MILLISECONDS) /* of passes, after which their threads are judged */
#define FIRST_REST (200 * MILLISECONDS) /* of passes, before one thread more is tried; twice as long when it fails */
#define LONGEST_REST (3200 * (int64_t)MILLISECONDS)

typedef struct Team Team;
typedef void Task(const Team *team, const void *call);

/* What the threads of a call share. */
typedef struct {
    Task *task;
    const void *call; /* its arguments */
    int64_t threads;  /* that run it: at most those asked for */
    char *scratch;    /* of all threads, `bytes` each */
    int64_t bytes;
    int64_t here, turn; /* threads that have come to the barrier; how often all have */
    int64_t taken;      /* items of a loop whose items are taken in any order */
    int64_t late;       /* nanoseconds of waiting behind the spins */
} Region;

struct Team {
    int64_t thread, threads; /* this one's number, of so many */
    Region *region;
    char *scratch; /* this one's own, which a product may write over */
};

/* A thread of the pool. */
typedef struct {
    int64_t job; /* the address of the region that it runs; 0: none */
    int64_t thread, threads, asleep;
    pthread_mutex_t lock;
    pthread_cond_t woken;
} __attribute__((aligned(64))) Worker;

static struct {
    Worker worker[MOST_THREADS];
    int64_t count; /* that are there */
    int64_t busy;  /* does a call use them? */
} pool;

#ifdef __SANITIZE_THREAD__
int64_t own_pool = 1; /* the sanitizer does not see what OpenMP's runtime orders */
#else
int64_t own_pool; /* never use OpenMP's threads */
#endif

typedef void Parallel(void (*task)(void *), void *data, unsigned threads, unsigned flags);

static struct {
    Parallel *parallel; /* GOMP_parallel; NULL: there is no such runtime */
    int (*thread)(void), (*threads)(void);
} openmp;

/* How many threads other programs leave to the thread that calls. In nanoseconds. */
static _Thread_local struct {
    int64_t out;          /* threads that are left out */
    int64_t passes, lost; /* since the last judgement: of passes; of these, lost in waiting */
    int64_t rest, left;   /* before one thread more is tried: the whole time; what is left of it */
} crew;

INLINE int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1000 * MILLISECONDS * (int64_t)time.tv_sec + time.tv_nsec;
}

/* Threads for the next region, of so many that are allowed. (This and `judge` can be called from outside for tests.) */
int64_t hands(int64_t threads) {
#ifdef __SANITIZE_THREAD__
    return threads; /* races are looked for between all of them, however long each takes */
#endif
    return threads > crew.out ? threads - crew.out : 1;
}

/* Count a pass of so many threads of those allowed: its nanoseconds, and those for which its threads have waited behind
   their spins, all together. Judge, when there is enough. */
void judge(int64_t allowed, int64_t threads, int64_t took, int64_t late) {
    if (crew.out >= allowed) crew.out = allowed - 1;
    crew.passes += took;
    if (threads > 1) crew.lost += late / (threads - 1);
    if (crew.passes < JUDGED) return;
    if (crew.lost * (threads - 1) > crew.passes - crew.lost) { /* one thread less would take no longer */
        crew.out++;
        crew.rest = !crew.rest ? FIRST_REST : 2 * crew.rest < LONGEST_REST ? 2 * crew.rest : LONGEST_REST;
        crew.left = crew.rest;
    } else if (!crew.out) {
        crew.rest = 0;
    } else if ((crew.left -= crew.passes) <= 0) {
        crew.out--;
        crew.left = crew.rest;
    }
    crew.passes = crew.lost = 0;
}

INLINE void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* Look at a number until it is not `old`, so often at most. Returns whether it is. */
INLINE int spin(const int64_t *number, int64_t old, int64_t looks) {
    for (int64_t i = 0; i < looks; i++) {
        if (__atomic_load_n(number, __ATOMIC_ACQUIRE) != old) return 1;
        pause_briefly();
    }
    return 0;
}

/* Wait until a number is not `old`. Returns the nanoseconds behind the spins. */
static int64_t wait_while(const int64_t *number, int64_t old) {
    if (spin(number, old, SPINS)) return 0;
    const int64_t since = now();
    while (__atomic_load_n(number, __ATOMIC_ACQUIRE) == old) sched_yield();
    return now() - since;
}

/* One thread's part of a region. */
static void take_part(Region *region, int64_t thread, int64_t threads) {
    const Team team = {thread, threads, region, region->scratch + thread * region->bytes};
    if (!thread) region->threads = threads;
    region->task(&team, region->call);
}

static void *work(void *given) {
    Worker *worker = given;
    for (;;) {
        const int64_t since = now();
        while (!spin(&worker->job, 0, 100) && now() - since < AWAKE) {}
        if (!__atomic_load_n(&worker->job, __ATOMIC_ACQUIRE)) {
            pthread_mutex_lock(&worker->lock);
            __atomic_store_n(&worker->asleep, 1, __ATOMIC_SEQ_CST);
            while (!__atomic_load_n(&worker->job, __ATOMIC_SEQ_CST)) pthread_cond_wait(&worker->woken, &worker->lock);
            __atomic_store_n(&worker->asleep, 0, __ATOMIC_RELAXED);
            pthread_mutex_unlock(&worker->lock);
        }
        take_part((Region *)worker->job, worker->thread, worker->threads);
        __atomic_store_n(&worker->job, 0, __ATOMIC_RELEASE); /* the region may be gone from here on */
    }
    return NULL;
}

static void start(Worker *worker, Region *region, int64_t threads) {
    worker->threads = threads;
    __atomic_store_n(&worker->job, (int64_t)region, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&worker->asleep, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&worker->lock);
    pthread_cond_signal(&worker->woken);
    pthread_mutex_unlock(&worker->lock);
}

/* Threads of the pool for a call that wants so many. Returns how many there are: fewer where the system gives no more. */
static int64_t hire(int64_t wanted) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.count < wanted && pool.count < MOST_THREADS) {
        Worker *worker = pool.worker + pool.count;
        pthread_t id;
        *worker = (Worker){.thread = pool.count + 1};
        pthread_mutex_init(&worker->lock, NULL);
        pthread_cond_init(&worker->woken, NULL);
        if (pthread_create(&id, &attributes, work, worker)) break;
        pool.count++;
    }
    pthread_attr_destroy(&attributes);
    return pool.count < wanted ? pool.count : wanted;
}

static void run_on_pool(Region *region, int64_t wanted) {
    const int mine = !__atomic_exchange_n(&pool.busy, 1, __ATOMIC_ACQUIRE);
    const int64_t threads = mine ? 1 + hire(wanted - 1) : 1;
    for (int64_t i = 0; i < threads - 1; i++) start(pool.worker + i, region, threads);
    take_part(region, 0, threads);
    for (int64_t i = 0; i < threads - 1; i++) wait_while(&pool.worker[i].job, (int64_t)region);
    if (mine) __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
}

static void join_region(void *region) {
    take_part(region, openmp.thread(), openmp.threads());
}

/* Look whether the process has OpenMP's threads: first, and whenever ours have slept. */
static void find_openmp(void) {
#ifndef _WIN32
    if (own_pool || openmp.parallel || (pool.count && !__atomic_load_n(&pool.worker->asleep, __ATOMIC_RELAXED))) return;
    void *loaded = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!loaded) return;
    openmp.thread = (int (*)(void))dlsym(loaded, "omp_get_thread_num");
    openmp.threads = (int (*)(void))dlsym(loaded, "omp_get_num_threads");
    __atomic_store_n(&openmp.parallel, (Parallel *)dlsym(loaded, "GOMP_parallel"), __ATOMIC_RELEASE);
#endif
}

/* Run a task on so many threads at most, each with `bytes` of scratch, and wait until all have done their part. */
static Region run(int64_t threads, char *scratch, int64_t bytes, Task *task, const void *call) {
    Region region = {.scratch = scratch, .bytes = bytes, .task = task, .call = call};
    if (threads < 2) {
        take_part(&region, 0, 1);
        return region;
    }
    find_openmp();
    Parallel *parallel = own_pool ? NULL : __atomic_load_n(&openmp.parallel, __ATOMIC_ACQUIRE);
    if (parallel)
        parallel(join_region, &region, (unsigned)threads, 0);
    else
        run_on_pool(&region, threads);
    return region;
}

#ifndef _WIN32

/* The threads of a pool stay in the parent, and OpenMP's runtime does not know. */
static void forget_pool(void) {
    pool.count = pool.busy = 0;
    own_pool = 1;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_pool);
}

#endif

/* This thread's share of `count` things: from the first to before the last. */
INLINE int64_t own_first(const Team *team, int64_t count) {
    return count * team->thread / team->threads;
}

INLINE int64_t own_last(const Team *team, int64_t count) {
    return count * (team->thread + 1) / team->threads;
}

/* The next item of a loop whose items threads take in any order, until there are no more. Behind it they meet. */
INLINE int64_t take(const Team *team) {
    return __atomic_fetch_add(&team->region->taken, 1, __ATOMIC_RELAXED);
}

/* Go on when all threads are here. */
static void meet(const Team *team) {
    Region *region = team->region;
    const int64_t turn = __atomic_load_n(&region->turn, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&region->here, 1, __ATOMIC_ACQ_REL) == team->threads) {
        __atomic_store_n(&region->here, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&region->taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&region->turn, turn + 1, __ATOMIC_RELEASE);
        return;
    }
    const int64_t late = wait_while(&region->turn, turn);
    if (late) __atomic_add_fetch(&region->late, late, __ATOMIC_RELAXED);
}

#endif
