/* insmod FILE: loads a kernel module. */
#include "guest.h"

int program(int argc, char **argv, char **envp)
{
	long fd = argc > 1 ? syscall2(SYS_open, argv[1], O_RDONLY) : -2;
	long result = fd < 0 ? fd : syscall3(SYS_finit_module, fd, "", 0);
	char digits[DIGITS];

	(void)envp;
	if (result)
		print("insmod: error ", decimal(-result, digits), "\n");
	return result != 0;
}
