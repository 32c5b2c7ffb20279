/* Copies lines from descriptor 6 to descriptor 7: line N when the file turn.N is there, from 0 on. What became of each is told in
   done.N: the line or how it could not be read, and how it was written. With an argument, descriptor 6 is also watched by an epoll. */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

static const char *read_line(char *line, size_t room)
{
	size_t length = 0;
	while (length + 1 < room) {
		ssize_t n = read(6, line + length, 1);
		if (n < 0)
			return strerror(errno);
		if (n == 0)
			return "end";
		if (line[length] == '\n')
			break;
		length++;
	}
	line[length] = 0;
	return line;
}

int main(int argc, char **argv)
{
	(void)argv;
	struct epoll_event event = { .events = EPOLLIN };
	if (argc > 1 && epoll_ctl(epoll_create1(0), EPOLL_CTL_ADD, 6, &event) != 0)
		return 1;
	signal(SIGPIPE, SIG_IGN);
	for (unsigned turn = 0;; turn++) {
		char name[32], line[5000], text[5100];
		snprintf(name, sizeof name, "turn.%u", turn);
		while (access(name, F_OK) != 0)
			usleep(2000);
		const char *got = read_line(line, sizeof line);
		int length = snprintf(text, sizeof text, "%u: %s\n", turn, got);
		const char *how = write(7, text, length) == length ? "written" : strerror(errno);
		snprintf(name, sizeof name, "done.%u", turn);
		FILE *done = fopen("done", "w");
		if (!done || fprintf(done, "%s, %s", got, how) < 0 || fclose(done) != 0 || rename("done", name) != 0)
			return 1;
	}
}
