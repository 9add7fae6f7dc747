/* forks [N]: makes N children one after the other (10), child i ending with status i modulo 100.
 * Prints the number that did so. */
#include "guest.h"

TRACEABLE static int one_child(long i)
{
	int status = -1;
	long child = syscall0(SYS_fork);

	if (child == 0)
		quit(i % 100);
	return syscall5(SYS_wait4, child, (long)&status, 0, 0, 0) == child && status == i % 100 << 8;
}

int program(int argc, char **argv, char **envp)
{
	long count = number(argc > 1 ? argv[1] : 0, 10);
	long good = 0;
	char digits[DIGITS];

	(void)envp;
	for (long i = 0; i < count; i++)
		good += one_child(i);
	print("forks: ", decimal(good, digits), "\n");
	return good != count;
}
