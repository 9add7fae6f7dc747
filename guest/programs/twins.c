/* twins [N]: maps the text of a copy of its file twice, to be executed and to be written to. N times (100) it changes a byte of `changing`
 * through one mapping and calls it through the other. Prints `twins: N`; ends with status 1 if a call returned the former byte. */
#include "guest.h"

enum { PAGE = 4096, READ_WRITE = 3, READ_EXECUTE = 5 };

extern unsigned char __executable_start[];
int changing(void);
__asm__(".globl changing\n"
	".type changing, @function\n"
	"changing:\n"
	"	mov $0, %eax\n"
	"	ret\n"
	".size changing, . - changing\n");

/* A CPU may have fetched old bytes of text written by another address, until an instruction like
 * this one. */
static void serialize(void)
{
	unsigned int leaf = 0, other = 0;

	__asm__ volatile("cpuid" : "+a"(leaf), "+c"(other) : : "ebx", "edx", "memory");
}

int program(int argc, char **argv, char **envp)
{
	long count = number(argc > 1 ? argv[1] : 0, 100);
	unsigned long place = (unsigned long)changing - (unsigned long)__executable_start;
	long fd = syscall3(SYS_open, "/tmp/twins", O_CREAT_TRUNC_RDWR, 0755);
	long self = syscall2(SYS_open, "/proc/self/exe", O_RDONLY);
	long got;
	char text[PAGE];
	char *written, *executed, digits[DIGITS];
	int (*twin)(void);

	(void)envp;
	/* Of the file, not of memory: there a debugger's or tracer's int3 may stand. */
	got = syscall3(SYS_read, self, text, PAGE);
	if (fd < 0 || got <= (long)place || syscall3(SYS_write, fd, text, got) != got)
		return 2;
	written = map_shared(fd, 0, PAGE, READ_WRITE);
	executed = map_shared(fd, 0, PAGE, READ_EXECUTE);
	if (!written || !executed)
		return 2;
	twin = (int (*)(void))(executed + place);
	for (long i = 0; i < count; i++) {
		int wanted = i & 0x7f;

		/* After the opcode of mov. */
		((volatile char *)written)[place + 1] = wanted;
		serialize();
		if (twin() != wanted) {
			print("twins: an old byte in round ", decimal(i, digits), "\n");
			return 1;
		}
	}
	syscall1(SYS_unlink, "/tmp/twins");
	print("twins: ", decimal(count, digits), "\n");
	return 0;
}
