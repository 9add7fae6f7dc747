/* sh: reads lines `PROGRAM [ARGUMENT]... [&]` and runs /bin/PROGRAM; `exit` ends it. No quoting, no
 * variables, no pipes: it is for guests too small for a real shell. */
#include "guest.h"

enum { LINE = 256, WORDS = 16 };

/* Reads one line without its newline; -1 at the end of the input. A line longer than the buffer is
 * cut. */
static int read_line(char *line)
{
	int n = 0;
	char c;

	for (;;) {
		if (syscall3(SYS_read, 0, &c, 1) != 1) {
			if (!n)
				return -1;
			break;
		}
		if (c == '\n')
			break;
		if (n < LINE - 1)
			line[n++] = c;
	}
	line[n] = 0;
	return n;
}

static int split(char *line, char **words)
{
	int n = 0;

	while (n < WORDS - 1) {
		while (*line == ' ')
			line++;
		if (!*line)
			break;
		words[n++] = line;
		while (*line && *line != ' ')
			line++;
		if (*line)
			*line++ = 0;
	}
	words[n] = 0;
	return n;
}

static int same(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}

TRACEABLE static void run(char **words, char **envp, int wait)
{
	static const char directory[] = "/bin/";
	long child = syscall0(SYS_fork);
	int status;

	if (child == 0) {
		char path[LINE + sizeof(directory)];

		memcpy(path, directory, sizeof(directory) - 1);
		memcpy(path + sizeof(directory) - 1, words[0], length(words[0]) + 1);
		syscall3(SYS_execve, path, words, envp);
		print(words[0], ": not found\n");
		quit(127);
	}
	if (wait)
		syscall5(SYS_wait4, child, (long)&status, 0, 0, 0);
}

int program(int argc, char **argv, char **envp)
{
	static char line[LINE];
	char *words[WORDS];

	(void)argc, (void)argv;
	for (;;) {
		int n, wait;

		print("$ ");
		if (read_line(line) < 0)
			return 0;
		n = split(line, words);
		if (!n)
			continue;
		if (same(words[0], "exit"))
			return 0;
		wait = !same(words[n - 1], "&");
		if (!wait)
			words[n - 1] = 0;
		if (words[0])
			run(words, envp, wait);
		/* Background processes that have ended. */
		while (syscall5(SYS_wait4, -1, 0, 1, 0, 0) > 0)
			;
	}
}
