/* alarms [N]: calls `counted` N times (1000) while SIGALRM comes within two milliseconds of every
 * eighth call, at any instruction. Prints `alarms: N`; ends with status 1 if a call was lost or
 * made twice. */
#include "guest.h"

enum { SYS_rt_sigaction = 13, SYS_setitimer = 38, SIGALRM = 14, EACH = 8, LONGEST = 2000, RESTORER = 0x04000000, MASK_SIZE = 8 };

static volatile long calls, alarms;

void restorer(void);
__asm__("restorer:\n"
	"	mov $15, %eax\n" /* rt_sigreturn(2) */
	"	syscall\n");

TRACEABLE static long counted(long value)
{
	__asm__ volatile("incq %0" : "+m"(calls));
	return value + 1;
}

TRACEABLE static void handled(int signal)
{
	(void)signal;
	__asm__ volatile("incq %0" : "+m"(alarms));
}

int program(int argc, char **argv, char **envp)
{
	struct {
		void (*handler)(int);
		unsigned long flags;
		void (*restorer)(void);
		unsigned long mask;
	} action = { handled, RESTORER, restorer, 0 };
	/* Seconds and microseconds: the interval, and the first. No more signals than calls: their kernel
	 * may be slow. */
	long timer[4] = { 0 };
	long count = number(argc > 1 ? argv[1] : 0, 1000), value = 0;
	char digits[2][DIGITS];

	(void)envp;
	if (syscall5(SYS_rt_sigaction, SIGALRM, (long)&action, 0, MASK_SIZE, 0))
		return 2;
	for (long i = 0; i < count; i++) {
		timer[3] = 1 + i * 37 % LONGEST;
		if (i % EACH == 0 && syscall3(SYS_setitimer, 0, timer, 0))
			return 2;
		value = counted(value);
	}
	timer[3] = 0;
	syscall3(SYS_setitimer, 0, timer, 0);
	if (value != count || calls != count) {
		print("alarms: ", decimal(calls, digits[0]), " calls, not ", decimal(count, digits[1]), "\n");
		return 1;
	}
	print("alarms: ", decimal(count, digits[0]), "\n");
	return 0;
}
