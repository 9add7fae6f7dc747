/* offline FILE OFFSET [held]: asks the kernel to move the page with that byte of the file to another place in memory
 * (MADV_SOFT_OFFLINE, madvise(2)), which a pipe with a reference to the page prevents if `held`. Prints `offline: ` and
 * `moved` or the error. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MADV_SOFT_OFFLINE
#define MADV_SOFT_OFFLINE 101
#endif

enum { PAGE = 4096 };

int main(int argc, char **argv)
{
	struct iovec whole = { .iov_len = PAGE };
	int file, ends[2];

	if (argc < 3)
		return 2;
	file = open(argv[1], O_RDONLY);
	whole.iov_base = mmap(0, PAGE, PROT_READ, MAP_SHARED, file, strtol(argv[2], 0, 0) & -PAGE);
	if (whole.iov_base == MAP_FAILED) {
		perror("offline");
		return 1;
	}
	if (argc > 3 && (pipe(ends) || vmsplice(ends[1], &whole, 1, 0) != PAGE)) {
		perror("offline");
		return 1;
	}
	/* The page must be there. */
	(void)*(volatile char *)whole.iov_base;
	printf("offline: %s\n", madvise(whole.iov_base, PAGE, MADV_SOFT_OFFLINE) ? strerror(errno) : "moved");
	return 0;
}
