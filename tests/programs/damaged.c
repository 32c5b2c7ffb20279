// Crashes by a null pointer where there is a file `bad`, and waits in its crash handler for a file `go`: whoever takes a
// checkpoint there has a program that can only crash. Otherwise it waits for a file `end`, and says what it came to.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void wait_for(const char *name) {
    while (access(name, F_OK) != 0) usleep(2000);
}

static void say(const char *name) {
    FILE *file = fopen(name, "w");
    if (file == NULL) abort();
    fclose(file);
}

static void crash(int number) {
    say("crashing");
    wait_for("go");
    signal(number, SIG_DFL);
    raise(number);
}

int main(void) {
    volatile long sum = 0;
    signal(SIGSEGV, crash);
    say("ready");
    wait_for("begin");
    for (long i = 0; i < 1000; i++) sum += i;
    if (access("bad", F_OK) == 0) *(volatile int *)NULL = 1;
    say("waiting");
    wait_for("end");
    printf("%ld\n", sum);
    return 7;
}
