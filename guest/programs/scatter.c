/* scatter FILE: reads a file by readv(2) into pieces of uneven lengths, until its end. Prints
 * `scatter: BYTES SUM`; the sum depends on each byte and its position. */
#include "guest.h"

enum { PIECES = 5 };

static const unsigned short lengths[PIECES] = { 1, 4095, 7, 3001, 2222 };
static unsigned char data[1 + 4095 + 7 + 3001 + 2222];

int program(int argc, char **argv, char **envp)
{
	struct {
		unsigned char *base;
		unsigned long length;
	} pieces[PIECES];
	unsigned char *at = data;
	unsigned long sum = 0;
	long bytes = 0, got;
	char digits[2][DIGITS];
	long fd = syscall2(SYS_open, argc > 1 ? argv[1] : "", O_RDONLY);

	(void)envp;
	for (int i = 0; i < PIECES; i++) {
		pieces[i].base = at;
		pieces[i].length = lengths[i];
		at += lengths[i];
	}
	while ((got = syscall3(SYS_readv, fd, pieces, PIECES)) > 0) {
		for (long i = 0; i < got; i++)
			sum = sum * 31 + data[i];
		bytes += got;
	}
	if (got) {
		print("scatter: cannot read ", argc > 1 ? argv[1] : "", "\n");
		return 1;
	}
	print("scatter: ", decimal(bytes, digits[0]), " ", decimal(sum >> 1, digits[1]), "\n");
	return 0;
}
