/* crashload KERNEL INITRD OPTIONS: loads the kernel that starts when this one has crashed. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* KEXEC_FILE_ON_CRASH of linux/kexec.h. */
#define ON_CRASH 2UL

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	int kernel = open(argv[1], O_RDONLY), initrd = open(argv[2], O_RDONLY);
	if (syscall(SYS_kexec_file_load, kernel, initrd, strlen(argv[3]) + 1, argv[3], ON_CRASH)) {
		perror("kexec_file_load");
		return 1;
	}
	return 0;
}
