/* debugged: two threads that call count_one() in rounds, each in its own half of `counted`. A line
 * on standard input makes the main thread write to address 16, some calls deep. Prints
 * `debugged: PID` once both threads run. */
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

long counted[2];

__attribute__((noinline)) long count_one(long thread, long round)
{
	counted[thread] += round % 3;
	return counted[thread];
}

static void *count(void *thread)
{
	for (long round = 0;; round++) {
		count_one((long)thread, round);
		usleep(1000);
	}
	return NULL;
}

__attribute__((noinline)) void fall(volatile long *where, long value)
{
	*where = value;
}

__attribute__((noinline)) long stumble(long depth)
{
	if (depth > 0)
		return stumble(depth - 1) + 1;
	fall((volatile long *)16, 7);
	return counted[0];
}

int main(void)
{
	pthread_t threads[2];

	for (long thread = 0; thread < 2; thread++)
		if (pthread_create(&threads[thread], NULL, count, (void *)thread))
			return 1;
	setvbuf(stdout, NULL, _IONBF, 0);
	printf("debugged: %d\n", getpid());
	getchar();
	return stumble(2) != 0;
}
