/* syscount [N]: calls getppid(2) N times (1000), a system call with nearly no work. Prints N. */
#include "guest.h"

TRACEABLE static long one_call(void)
{
	return syscall0(SYS_getppid);
}

int program(int argc, char **argv, char **envp)
{
	long count = number(argc > 1 ? argv[1] : 0, 1000);
	char digits[DIGITS];

	(void)envp;
	for (long i = 0; i < count; i++)
		one_call();
	print("syscount: ", decimal(count, digits), "\n");
	return 0;
}
