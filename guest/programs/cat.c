/* cat FILE...: prints the files, one after the other. For reading /proc where there is no other
 * tool. */
#include "guest.h"

int program(int argc, char **argv, char **envp)
{
	static char buffer[4096];
	int status = 0;

	(void)envp;
	for (int i = 1; i < argc; i++) {
		long fd = syscall2(SYS_open, argv[i], O_RDONLY);
		long n = fd;

		while (fd >= 0 && (n = syscall3(SYS_read, fd, buffer, sizeof(buffer))) > 0)
			syscall3(SYS_write, 1, buffer, n);
		if (n < 0) {
			print("cat: cannot read ", argv[i], "\n");
			status = 1;
		}
		if (fd >= 0)
			syscall1(SYS_close, fd);
	}
	return status;
}
