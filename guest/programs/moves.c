/* moves WAY: has a function in a page of its own, calls it, stops itself (SIGSTOP), calls it again
 * and then acts on that page:
 *   away   moves it to another address, and calls it there
 *   gone   unmaps it
 *   fork   leaves it to a child, which goes on in its place
 *   core   ends by SIGSEGV
 * and stops once more. Ends with status 0 when that is over. */
#include "guest.h"

enum { PAGE = 4096, MAY_MOVE = 1, FIXED = 2, SIGSEGV = 11, SIGSTOP = 19 };
enum { SYS_munmap = 11, SYS_mremap = 25, SYS_getpid = 39, SYS_kill = 62 };

/* An unused address. */
#define ELSEWHERE 0x10000000UL

/* The text before them, and their first two bytes, form strings to search for: "far:PX", "near:PX".
 * `near` is in the rest of the program's text, and has no caller. */
long far(long value);
__asm__(".pushsection .text\n"
	".ascii \"near:\"\n"
	".type near, @function\n"
	"near:\n"
	"	push %rax\n"
	"	pop %rax\n"
	"	ret\n"
	".size near, . - near\n"
	".popsection\n"
	".pushsection .far, \"ax\"\n"
	".balign 4096\n"
	".ascii \"far:\"\n"
	".globl far\n"
	".type far, @function\n"
	"far:\n"
	"	push %rax\n"
	"	pop %rax\n"
	"	lea 1(%rdi), %rax\n"
	"	ret\n"
	".size far, . - far\n"
	".popsection\n");

static void send(long signal)
{
	syscall2(SYS_kill, syscall0(SYS_getpid), signal);
}

int program(int argc, char **argv, char **envp)
{
	unsigned long page = (unsigned long)far & -(unsigned long)PAGE;
	char way = argc > 1 ? argv[1][0] : 0;
	long value = far(0);

	(void)envp;
	/* A stopped program whose process group becomes orphaned would be ended. */
	syscall0(SYS_setsid);
	send(SIGSTOP);
	value = far(value);
	if (way == 'a') {
		long (*moved)(long) = (long (*)(long))((unsigned long)far - page + ELSEWHERE);

		if (syscall5(SYS_mremap, page, PAGE, PAGE, MAY_MOVE | FIXED, ELSEWHERE) != (long)ELSEWHERE)
			return 1;
		value = moved(value);
	} else if (way == 'g') {
		if (syscall2(SYS_munmap, page, PAGE))
			return 1;
	} else if (way == 'f') {
		if (syscall0(SYS_fork))
			return 0;
		value = far(value);
	} else if (way == 'c') {
		send(SIGSEGV);
	}
	send(SIGSTOP);
	return value > 3;
}
