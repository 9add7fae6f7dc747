/* workers [THREADS [DEPTH]]: threads (4) that wait, each DEPTH (20) calls deep and named worker-N:
 * by turns in a sleep, at an empty pipe, at a condition variable, and busy in user mode. Prints
 * `workers: PID` once all wait, and never ends.
 *
 * Linked with the C library and without frame pointers, as distributions do it: stack walks need
 * unwind tables. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST = 64 };

static pthread_barrier_t standing;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
static int empty_pipe[2];

__attribute__((noinline)) static void wait_forever(long how)
{
	char byte;

	for (;;) {
		switch (how % 4) {
		case 0:
			sleep(1000);
			break;
		case 1:
			if (read(empty_pipe[0], &byte, 1) < 0)
				return;
			break;
		case 2:
			pthread_mutex_lock(&mutex);
			pthread_cond_wait(&never, &mutex);
			pthread_mutex_unlock(&mutex);
			break;
		default:
			for (volatile long i = 0; i < 1000; i++)
				;
			usleep(50000);
		}
	}
}

/* The sum after the call keeps the compiler from making it a jump. */
__attribute__((noinline)) static long descend(long depth, long how)
{
	long below;

	if (depth > 1) {
		below = descend(depth - 1, how);
	} else {
		pthread_barrier_wait(&standing);
		wait_forever(how);
		below = how;
	}
	__asm__ volatile("" : "+r"(below));
	return below + depth;
}

static long depth = 20;

static void *worker(void *number)
{
	char name[16];

	snprintf(name, sizeof(name), "worker-%ld", (long)number);
	pthread_setname_np(pthread_self(), name);
	return (void *)descend(depth, (long)number);
}

int main(int argc, char **argv)
{
	long threads = argc > 1 ? atol(argv[1]) : 4;
	pthread_t thread;

	if (argc > 2)
		depth = atol(argv[2]);
	if (threads < 1 || threads > MOST || depth < 1 || pipe(empty_pipe))
		return 1;
	pthread_barrier_init(&standing, NULL, threads + 1);
	for (long i = 0; i < threads; i++)
		if (pthread_create(&thread, NULL, worker, (void *)i))
			return 1;
	pthread_barrier_wait(&standing);
	printf("workers: %d\n", getpid());
	fflush(stdout);
	pthread_join(thread, NULL);
	return 0;
}
