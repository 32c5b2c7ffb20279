// A program with as many attributes of its own as one can have ("rich"), or with as many threads and nothing else
// ("blank"), or with timers that have just expired, whose signals wait ("ringing").
#define _GNU_SOURCE
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/membarrier.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int rich;
static pthread_barrier_t ready;
static pid_t tids[3];

static void check(long r, const char *what) {
    if (r < 0) {
        perror(what);
        exit(1);
    }
}

static void filter(unsigned refused) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, code};
    check(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_LOG, &program), "seccomp");
}

static void *first(void *x) {
    tids[1] = gettid();
    if (rich) {
        static char stack[1 << 16];
        stack_t s = {.ss_sp = stack, .ss_size = sizeof stack};
        check(sigaltstack(&s, 0), "sigaltstack");
        prctl(PR_SET_NAME, ") Z 1 \n(");
        check(setpriority(PRIO_PROCESS, 0, 5), "nice");
        check(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 6), "ioprio");
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        CPU_SET(0, &cpus);
        check(sched_setaffinity(0, sizeof cpus, &cpus), "affinity");
        check(prctl(PR_SET_TIMERSLACK, 12345), "slack");
        check(prctl(PR_SET_TSC, PR_TSC_SIGSEGV), "tsc");
        gid_t groups[] = {5, 7, 70000};
        struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
        struct __user_cap_data_struct caps[2];
        check(syscall(SYS_capget, &head, caps), "capget");
        caps[0].inheritable = 1 << CAP_NET_RAW | 1 << CAP_SYS_BOOT;
        check(syscall(SYS_capset, &head, caps), "capset inheritable");
        check(prctl(PR_CAPBSET_DROP, CAP_SYS_BOOT), "drop");
        check(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP), "securebits");
        check(syscall(SYS_setgroups, 3, groups), "groups");
        check(syscall(SYS_setresgid, 1001, 1002, 1003), "gid");
        check(syscall(SYS_setresuid, 1004, 1005, 1006), "uid");
        syscall(SYS_setfsuid, 1004);
        check(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_RAW, 0, 0), "ambient");
        check(prctl(PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED | SECBIT_NO_CAP_AMBIENT_RAISE), "bits");
        check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
        filter(SYS_getppid);
        filter(SYS_acct);
        caps[0].permitted = 1 << CAP_NET_RAW | 1 << CAP_CHOWN;
        caps[0].effective = 1 << CAP_CHOWN;
        caps[1].permitted = caps[1].effective = 0;
        check(syscall(SYS_capset, &head, caps), "capset");
        check(prctl(PR_SET_PDEATHSIG, SIGUSR2), "pdeathsig");
    }
    pthread_barrier_wait(&ready);
    for (;;) pause();
    return x;
}

static void *second(void *x) {
    tids[2] = gettid();
    if (rich) {
        check(setpriority(PRIO_PROCESS, 0, 3), "nice");
        struct sched_param p = {.sched_priority = 10};
        check(sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &p), "fifo");
    }
    pthread_barrier_wait(&ready);
    for (;;) pause();
    return x;
}

static void handler(int s, siginfo_t *i, void *c) {}

static void timers(void) {
    struct sigevent ev = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1, .sigev_value.sival_int = 99};
    struct itimerspec when = {{7, 8}, {1000, 5}};
    long id, kernel_id;
    for (int i = 0; i < 40; i++) {
        check(syscall(SYS_timer_create, CLOCK_MONOTONIC, &ev, &kernel_id), "timer");
        if (i % 13 != 12) syscall(SYS_timer_delete, (int)kernel_id);
    }
    check(syscall(SYS_timer_settime, 38, 0, &when, 0), "settime");
    ev.sigev_notify = SIGEV_THREAD_ID;
    ev._sigev_un._tid = tids[1];
    check(syscall(SYS_timer_create, CLOCK_BOOTTIME, &ev, &id), "timer");
    check(syscall(SYS_timer_settime, (int)id, 0, &when, 0), "settime");
    clockid_t clock;
    clock_getcpuclockid(getpid(), &clock);
    check(syscall(SYS_timer_create, clock, &ev, &id), "cpu timer");
    check(syscall(SYS_timer_settime, (int)id, 0, &when, 0), "settime");
    ev.sigev_notify = SIGEV_NONE;
    check(syscall(SYS_timer_create, CLOCK_REALTIME, &ev, &id), "timer");
    struct itimerval it = {{5, 6}, {2000, 7}};
    check(setitimer(ITIMER_REAL, &it, 0), "setitimer");
    check(setitimer(ITIMER_PROF, &it, 0), "setitimer");
}

static void enrich(void) {
    setsid();
    umask(027);
    struct sigaction a = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
    sigaddset(&a.sa_mask, SIGTERM);
    check(sigaction(SIGUSR1, &a, 0), "sigaction");
    a = (struct sigaction){.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT};
    check(sigaction(SIGCHLD, &a, 0), "sigaction");
    signal(SIGPIPE, SIG_IGN);
    sigqueue(getpid(), SIGRTMIN + 2, (union sigval){77});
    sigqueue(getpid(), SIGRTMIN + 2, (union sigval){78});
    kill(getpid(), SIGPIPE);
    syscall(SYS_tgkill, getpid(), tids[1], SIGUSR2);
    syscall(SYS_tgkill, getpid(), tids[1], SIGRTMIN + 3);
    timers();
    struct rlimit files = {500, 900};
    check(setrlimit(RLIMIT_NOFILE, &files), "rlimit");
    FILE *f = fopen("/proc/self/oom_score_adj", "w");
    fprintf(f, "100");
    fclose(f);
    f = fopen("/proc/self/coredump_filter", "w");
    fprintf(f, "0x7");
    fclose(f);
    personality(ADDR_NO_RANDOMIZE);
    check(prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper");
    check(syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0), "membarrier");
    check(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), "thp");
    check(prctl(67, 1, 0, 0, 0), "PR_SET_MEMORY_MERGE");
    check(prctl(65, 1, 0, 0, 0), "PR_SET_MDWE");
    check(prctl(PR_SET_DUMPABLE, 0), "dumpable");
}

// One that is once, one that is periodic, and one that tells a thread, beside the alarm clock.
static void ring(void) {
    for (int i = 0; i < 3; i++) {
        struct sigevent e = {.sigev_notify = i == 2 ? 4 /* SIGEV_THREAD_ID */ : SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 1};
        e._sigev_un._tid = tids[1];
        struct itimerspec soon = {.it_value.tv_nsec = 1000000, .it_interval.tv_sec = i == 1 ? 1000 : 0};
        int id;
        check(syscall(SYS_timer_create, CLOCK_MONOTONIC, &e, &id), "timer_create");
        check(syscall(SYS_timer_settime, id, 0, &soon, 0), "timer_settime");
    }
    struct itimerval soon = {.it_value.tv_usec = 1000};
    check(setitimer(ITIMER_REAL, &soon, 0), "setitimer");
}

int main(int argc, char **argv) {
    rich = argc > 1 && !strcmp(argv[1], "rich");
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, 0);
    tids[0] = gettid();
    pthread_barrier_init(&ready, 0, 3);
    pthread_t t;
    pthread_create(&t, 0, first, 0);
    pthread_create(&t, 0, second, 0);
    pthread_barrier_wait(&ready);
    if (rich) enrich();
    if (argc > 1 && !strcmp(argv[1], "ringing")) ring();
    usleep(20000);
    printf("%d %d %d\n", tids[0], tids[1], tids[2]);
    fflush(stdout);
    for (;;) pause();
}
