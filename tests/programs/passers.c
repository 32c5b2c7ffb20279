/* Has a child most of the time, which ends soon: by turns one of fork(2), and one that executes another program. */

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void wait_for(pid_t child)
{
	int status;
	if (waitpid(child, &status, 0) != child || status != 0) {
		puts("wrong");
		exit(1);
	}
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (unsigned turn = 0;; turn++) {
		pid_t child = fork();
		if (child == 0) {
			usleep(turn * 137 % 1500);
			_exit(0);
		}
		wait_for(child);
		if (turn % 4 == 0) {
			char *const nothing[] = { "true", NULL };
			if (posix_spawnp(&child, "true", NULL, NULL, nothing, environ) != 0)
				return 1;
			wait_for(child);
		}
		usleep(300);
		printf("turn %u\n", turn);
	}
}
