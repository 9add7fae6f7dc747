/* spin [MILLIONS]: computes in user mode, without system calls: this many million rounds, or
 * forever for 0 (the default). */
#include "guest.h"

TRACEABLE static unsigned long spin_million(unsigned long value)
{
	for (long i = 0; i < 1000000; i++) {
		value = value * 6364136223846793005UL + 1442695040888963407UL;
		__asm__ volatile("" : "+r"(value));
	}
	return value;
}

int program(int argc, char **argv, char **envp)
{
	long millions = number(argc > 1 ? argv[1] : 0, 0);
	unsigned long value = 1;

	(void)envp;
	for (long i = 0; !millions || i < millions; i++)
		value = spin_million(value);
	print("spin: done\n");
	return 0;
}
