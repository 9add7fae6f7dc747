/* fsload [COUNT [PAUSE_MS]]: file work to watch. Each round creates, writes, reads, stats, renames and removes one file in /tmp;
 * COUNT rounds, or forever for 0 (the default), with a pause between (10 ms). Prints the number of rounds at the end. */
#include "guest.h"

static char data[512];

/* `/tmp/fsload.N` with N the round, so that names differ in a trace. */
static void name_of(long round, char *path, const char *prefix)
{
	char buffer[DIGITS];
	const char *digits = decimal(round, buffer);
	unsigned long n = length(prefix);

	memcpy(path, prefix, n);
	memcpy(path + n, digits, length(digits) + 1);
}

TRACEABLE static int create_file(const char *path)
{
	return syscall3(SYS_open, path, O_CREAT_TRUNC_WRONLY, 0644);
}

TRACEABLE static int write_file(int fd, long bytes)
{
	return syscall3(SYS_write, fd, data, bytes) != bytes;
}

TRACEABLE static int read_file(const char *path, long bytes)
{
	long fd = syscall2(SYS_open, path, O_RDONLY);
	long got;

	if (fd < 0)
		return 1;
	got = syscall3(SYS_read, fd, data, sizeof(data));
	syscall1(SYS_close, fd);
	return got != bytes;
}

TRACEABLE static int stat_file(const char *path)
{
	/* larger than struct stat */
	char result[256];

	return syscall2(SYS_stat, path, result) != 0;
}

TRACEABLE static int one_round(long round)
{
	char path[64], other[64];
	/* sizes from 1 to 512, all different for a while */
	long bytes = round * 37 % (long)sizeof(data) + 1;
	int fd, bad;

	name_of(round, path, "/tmp/fsload.");
	name_of(round, other, "/tmp/renamed.");
	fd = create_file(path);
	if (fd < 0)
		return 1;
	bad = write_file(fd, bytes);
	syscall1(SYS_close, fd);
	bad |= read_file(path, bytes) | stat_file(path);
	bad |= syscall2(SYS_rename, path, other) != 0;
	bad |= syscall1(SYS_unlink, other) != 0;
	return bad;
}

int program(int argc, char **argv, char **envp)
{
	long count = number(argc > 1 ? argv[1] : 0, 0);
	long pause = number(argc > 2 ? argv[2] : 0, 10);
	long round;
	char digits[DIGITS];

	(void)envp;
	memset(data, 'x', sizeof(data));
	for (round = 0; !count || round < count; round++) {
		if (one_round(round)) {
			print("fsload: failed in round ", decimal(round, digits), "\n");
			return 1;
		}
		if (pause)
			sleep_ms(pause);
	}
	print("fsload: ", decimal(round, digits), " rounds\n");
	return 0;
}
