/* allocs [ROUNDS [MILLISECONDS]]: allocates a block of 1, 2, 3 ... 100 bytes by malloc() and frees
 * it, ROUNDS times (0: without end), and waits MILLISECONDS (10) after each. Prints `allocs: PID`
 * at first and `allocs: N rounds` at the end.
 *
 * Linked with the C library, as users' programs are: its calls of malloc go through its procedure
 * linkage table to another file's text. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Volatile, so that the compiler does not omit the pair. */
static void *volatile block;

__attribute__((noinline)) static int one_round(long size)
{
	block = malloc(size);
	if (!block)
		return -1;
	free(block);
	return 0;
}

int main(int argc, char **argv)
{
	long rounds = argc > 1 ? atol(argv[1]) : 0;
	long wait = argc > 2 ? atol(argv[2]) : 10;
	struct timespec pause = { wait / 1000, wait % 1000 * 1000000 };
	long done = 0;

	setvbuf(stdout, NULL, _IONBF, 0);
	printf("allocs: %d\n", getpid());
	while (!rounds || done < rounds) {
		if (one_round(done % 100 + 1))
			return 1;
		done++;
		if (wait)
			nanosleep(&pause, NULL);
	}
	printf("allocs: %ld rounds\n", done);
	return 0;
}
