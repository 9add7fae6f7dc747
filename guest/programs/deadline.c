/* deadline [ROUNDS]: a task under deadline scheduling (SCHED_DEADLINE), 20 ms of each 100 ms. Each
 * round (3) computes for longer than that, so that it uses up the slice and waits for the next
 * period. Then it yields the rest of one period. In the end it is an ordinary task again. */
#include "guest.h"

enum {
	SCHED_NORMAL = 0,
	SCHED_DEADLINE = 6,
	MILLISECOND = 1000000,
	LOOPS = 100000,
	CPU_TIME = 3, /* CLOCK_THREAD_CPUTIME_ID */
	SLICE = 20 * MILLISECOND,
};

/* struct sched_attr (sched_setattr(2)) */
struct attributes {
	unsigned size, policy;
	unsigned long flags;
	int nice;
	unsigned priority;
	unsigned long runtime, deadline, period;
};

static long set(unsigned policy)
{
	struct attributes attributes = { .size = sizeof(attributes), .policy = policy };

	if (policy == SCHED_DEADLINE) {
		attributes.runtime = SLICE;
		attributes.deadline = attributes.period = 100 * MILLISECOND;
	}
	return syscall3(SYS_sched_setattr, 0, &attributes, 0);
}

/* The nanoseconds for which this thread has had a CPU. */
static long used(void)
{
	struct { long seconds, nanoseconds; } time = { 0, 0 };

	syscall2(SYS_clock_gettime, CPU_TIME, &time);
	return time.seconds * 1000 * MILLISECOND + time.nanoseconds;
}

/* Computes for two slices of its own time, however fast the CPU is. */
TRACEABLE static void compute(void)
{
	long start = used();

	while (used() - start < 2 * SLICE)
		for (volatile long i = 0; i < LOOPS; i++)
			;
}

int program(int argc, char **argv, char **envp)
{
	long rounds = number(argc > 1 ? argv[1] : 0, 3);

	(void)envp;
	if (set(SCHED_DEADLINE)) {
		print("deadline: refused\n");
		return 1;
	}
	for (long i = 0; i < rounds; i++) {
		compute();
		syscall0(SYS_sched_yield);
	}
	if (set(SCHED_NORMAL))
		return 1;
	print("deadline: done\n");
	return 0;
}
