/* The threads of a call, and where they wait for each other: eight times in a layer.

   OpenMP's own barriers spin for milliseconds before they sleep. On a quiet machine that is right. But where another
   program needs a processor too, a thread that waits then holds one that the thread it waits for could have, and a pass
   takes many times as long. So here a thread spins for as long as is usual on a quiet machine, and then lets others run. And
   where more time is lost in waiting than one thread is worth, the calls that follow do with one thread less, for a while. */

#include <omp.h>
#include <sched.h>
#include <time.h>

#define MILLISECONDS 1000000 /* in nanoseconds */
#define SPINS 2000           /* looks, at most some 0.1 ms, before the processor is given away */
#define JUDGED (50 * MILLISECONDS) /* of passes, after which their threads are judged */
#define FIRST_REST (200 * MILLISECONDS) /* of passes, before one thread more is tried; twice as long when it fails */
#define LONGEST_REST (3200 * (int64_t)MILLISECONDS)

typedef struct {
    int64_t here, turn, late; /* threads that have come; how often all have met; nanoseconds of waiting behind the spins */
    char *scratch;            /* of all threads, `bytes` each */
    int64_t bytes;
} Gate;

typedef struct {
    int64_t thread, threads; /* this one's number, of so many */
    Gate *gate;
    char *scratch; /* this one's own, which a product may write over */
} Team;

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
#ifdef OWN_THREADS
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

/* This thread's team, at the beginning of a parallel region; the gate stands before it. */
INLINE Team team_at(Gate *gate) {
    const int64_t thread = omp_get_thread_num();
    return (Team){thread, omp_get_num_threads(), gate, gate->scratch + thread * gate->bytes};
}

/* This thread's share of `count` things: from the first to before the last. */
INLINE int64_t own_first(const Team *team, int64_t count) {
    return count * team->thread / team->threads;
}

INLINE int64_t own_last(const Team *team, int64_t count) {
    return count * (team->thread + 1) / team->threads;
}

/* Go on when all threads are here. */
static void meet(const Team *team) {
    Gate *gate = team->gate;
    const int64_t turn = __atomic_load_n(&gate->turn, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&gate->here, 1, __ATOMIC_ACQ_REL) == team->threads) {
        __atomic_store_n(&gate->here, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&gate->turn, turn + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int64_t looks = 0; looks < SPINS; looks++) {
        if (__atomic_load_n(&gate->turn, __ATOMIC_ACQUIRE) != turn) return;
        __builtin_ia32_pause();
    }
    const int64_t since = now();
    while (__atomic_load_n(&gate->turn, __ATOMIC_ACQUIRE) == turn) sched_yield();
    __atomic_add_fetch(&gate->late, now() - since, __ATOMIC_RELAXED);
}
