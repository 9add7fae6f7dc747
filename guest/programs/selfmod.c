/* selfmod [CALLS]: writes to its own text. Calls `steady` CALLS times (10), makes its text writable
 * and changes a byte of `changing`. Then calls `steady` as often again, twice: before and after it
 * makes its text read-only again. Prints `selfmod: WAS IS SUM`: the results of `changing` before
 * and after, and the sum of all bytes of its page, as the program reads them while it can write. */
#include "guest.h"

enum { PAGE = 4096, READ_EXECUTE = 5, READ_WRITE_EXECUTE = 7 };

int changing(void);
__asm__(".globl changing\n"
	".type changing, @function\n"
	"changing:\n"
	"	mov $41, %eax\n"
	"	ret\n"
	".size changing, . - changing\n");

TRACEABLE static long steady(long value)
{
	__asm__ volatile("" : "+r"(value));
	return value + 1;
}

int program(int argc, char **argv, char **envp)
{
	long calls = number(argc > 1 ? argv[1] : 0, 10);
	unsigned char *page = (unsigned char *)((unsigned long)changing & -(unsigned long)PAGE);
	/* After the opcode of mov. */
	volatile unsigned char *byte = (unsigned char *)changing + 1;
	long was = changing(), value = 0, sum = 0;
	char digits[3][DIGITS];

	(void)envp;
	for (long i = 0; i < calls; i++)
		value = steady(value);
	if (syscall3(SYS_mprotect, page, PAGE, READ_WRITE_EXECUTE)) {
		print("selfmod: its text stays as it is\n");
		return 1;
	}
	++*byte;
	for (long i = 0; i < calls; i++)
		value = steady(value);
	for (long i = 0; i < PAGE; i++)
		sum += page[i] * (i + 1);
	if (syscall3(SYS_mprotect, page, PAGE, READ_EXECUTE))
		return 1;
	for (long i = 0; i < calls; i++)
		value = steady(value);
	print("selfmod: ", decimal(was, digits[0]), " ", decimal(changing(), digits[1]), " ", decimal(sum, digits[2]), "\n");
	return value != 3 * calls;
}
