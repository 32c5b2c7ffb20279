// A program that cannot be captured, in many ways at once.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

static void *apart(void *x) {
    prctl(PR_SET_NAME, "apart");
    if (unshare(CLONE_FILES) || unshare(CLONE_FS)) perror("unshare");
    for (;;) pause();
    return x;
}

int main(void) {
    pthread_t t;
    pthread_create(&t, 0, apart, 0);
    if (!fork()) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        prctl(PR_SET_NAME, "a child");
        for (;;) pause();
    }
    int shm = shmget(IPC_PRIVATE, 4096, 0600);
    shmat(shm, 0, 0);
    shmctl(shm, IPC_RMID, 0);
    int secret = syscall(SYS_memfd_secret, 0);
    if (secret >= 0 && !ftruncate(secret, 4096)) {
        mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0);
        printf("secret ");
    }
    char *watched = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int uffd = syscall(SYS_userfaultfd, UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register reg = {{(long)watched, 4096}, UFFDIO_REGISTER_MODE_MISSING, 0};
    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) || ioctl(uffd, UFFDIO_REGISTER, &reg)) perror("userfaultfd");
    int zero = open("/dev/zero", O_RDWR);
    mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, zero, 0);
    int mem = open("/dev/mem", O_RDONLY);
    if (mem >= 0 && mmap(0, 4096, PROT_READ, MAP_SHARED, mem, 0xf0000) != MAP_FAILED) printf("mem ");
    usleep(100000);
    printf("ready\n");
    fflush(stdout);
    for (;;) pause();
}
