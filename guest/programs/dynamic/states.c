/* states [ROUNDS [MILLISECONDS]]: ROUNDS (1) times calls functions in states of the CPU that few
 * programs use: single-stepped by itself (RFLAGS.TF), with SSE exceptions unmasked, and with a
 * shift count whose result no manual defines. Then waits MILLISECONDS (0), and prints its results.
 *
 * Each function begins with an instruction to which the state matters. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <ucontext.h>
#include <xmmintrin.h>

void stepped(void);
double sums(double, double);
double divides(double, double);
long shifts(long, long, long, long);

__asm__(".text\n"
	".globl stepped, sums, divides, shifts\n"
	".type stepped, @function\n.type sums, @function\n"
	".type divides, @function\n.type shifts, @function\n"
	"stepped: push %rbp; pop %rbp; ret\n.size stepped, .-stepped\n"
	"sums: addsd %xmm1, %xmm0; ret\n.size sums, .-sums\n"
	"divides: divsd %xmm1, %xmm0; ret\n.size divides, .-divides\n"
	"shifts: shld %cl, %di, %si; mov %esi, %eax; ret\n.size shifts, .-shifts\n");

static volatile sig_atomic_t inside, raised, code;

/* One trap after each instruction: two of those of `stepped` are within it. */
static void trapped(int number, siginfo_t *info, void *context)
{
	unsigned long at = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] - (unsigned long)stepped;

	(void)number;
	(void)info;
	inside += at == 1 || at == 2;
}

/* Masks all exceptions for the interrupted instruction, which begins again. */
static void excepted(int number, siginfo_t *info, void *context)
{
	(void)number;
	raised += info->si_addr == (void *)divides;
	code = info->si_code;
	((ucontext_t *)context)->uc_mcontext.fpregs->mxcsr |= 0x1f80;
}

static void call_stepped(void)
{
	__asm__ volatile("sub $128, %%rsp\n\t"
			 "pushfq\n\torq $0x100, (%%rsp)\n\tpopfq\n\t"
			 "call stepped\n\t"
			 "pushfq\n\tandq $~0x100, (%%rsp)\n\tpopfq\n\t"
			 "add $128, %%rsp" ::: "memory", "cc");
}

int main(int argc, char **argv)
{
	long rounds = argc > 1 ? atol(argv[1]) : 1;
	long wait = argc > 2 ? atol(argv[2]) : 0;
	struct timespec pause = { wait / 1000, wait % 1000 * 1000000 };
	struct sigaction trap = { .sa_sigaction = trapped, .sa_flags = SA_SIGINFO };
	struct sigaction exception = { .sa_sigaction = excepted, .sa_flags = SA_SIGINFO };
	volatile double sum = 0, quotient = 0;

	sigaction(SIGTRAP, &trap, NULL);
	sigaction(SIGFPE, &exception, NULL);
	for (long round = 0; round < rounds; round++) {
		call_stepped();
		_mm_setcsr(0x1f80 & ~(_MM_MASK_INVALID | _MM_MASK_DIV_ZERO | _MM_MASK_OVERFLOW));
		sum = sums(sum, 1.25);
		quotient = divides(1, 0);
		_mm_setcsr(0x1f80);
		shifts(1, 2, 3, 17);
	}
	nanosleep(&pause, NULL);
	printf("states: %d traps, sum %.2f, %d exceptions with code %d, quotient %f\n", inside, sum, raised, code, quotient);
	return 0;
}
