/* statics [ROUNDS [MILLISECONDS]]: executes its static probes ROUNDS times (0: without end), and
 * waits MILLISECONDS (10) after each. With -1 each round waits for a line on the standard input
 * instead. Prints `statics: PID` at first, after each round with -1 `round N: G guarded by V, Q
 * quiet by W`, and `statics: N rounds, G guarded by V, Q quiet by W` at the end. These are the
 * times that it has seen its counters of listeners above 0, and the counters' values.
 *
 * The notes are written here by hand, in the form of SystemTap's macros (.note.stapsdt) and of this
 * project's (.note.exotrace). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* The base of the addresses in notes, in case the program is moved after linking. */
__asm__(".pushsection .stapsdt.base,\"a\",@progbits\n"
	"statics_base: .byte 0\n"
	".popsection");

/* A NOP, and its note. `arguments` is a string with operands of the assembler in it. */
#define NOP_AND_NOTE(name, semaphore, arguments)                                                   \
	"1: nop\n"                                                                                 \
	".pushsection .note.stapsdt,\"\",@note\n"                                                  \
	".balign 4\n"                                                                              \
	".long 8, 3f - 2f, 3\n"                                                                    \
	".asciz \"stapsdt\"\n"                                                                     \
	"2: .quad 1b, statics_base, " semaphore "\n"                                               \
	".asciz \"statics\", \"" name "\", \"" arguments "\"\n"                                    \
	"3: .balign 4\n"                                                                           \
	".popsection\n"

#define SITE(name, semaphore, arguments, ...)                                                      \
	__asm__ volatile(NOP_AND_NOTE(name, semaphore, arguments)::__VA_ARGS__)

/* The same, and the note with the probe's full name at this address, by which its declaration is
 * found. */
#define DECLARED_SITE(name, dashed, arguments, ...)                                                \
	__asm__ volatile(NOP_AND_NOTE(name, "0", arguments)                                        \
			 ".pushsection .note.exotrace,\"\",@note\n"                               \
			 ".balign 4\n"                                                             \
			 ".long 9, 3f - 2f, 2\n"                                                   \
			 ".asciz \"exotrace\"\n"                                                   \
			 ".balign 4\n"                                                             \
			 "2: .quad 1b, statics_base\n"                                             \
			 ".asciz \"statics\", \"shop\", \"till\", \"" dashed "\"\n"                \
			 "3: .balign 4\n"                                                          \
			 ".popsection\n" ::__VA_ARGS__)

/* The declaration of a probe: its full name, then native and translated type of each argument. */
__asm__(".pushsection .note.exotrace,\"\",@note\n"
	".balign 4\n"
	".long 9, 3f - 2f, 1\n"
	".asciz \"exotrace\"\n"
	".balign 4\n"
	"2: .asciz \"statics\", \"shop\", \"till\", \"item-sold\"\n"
	".asciz \"const char *\", \"\", \"struct price *\", \"priceinfo_t *\", \"int\", \"\"\n"
	"3: .balign 4\n"
	".popsection");

/* Counters of listeners: one among the program's written data, one in a page of its own that is
 * never written. */
__attribute__((used, section(".probes"))) volatile uint16_t statics_guarded;
__attribute__((used, section(".probes"), aligned(4096))) volatile uint16_t statics_quiet[2048];

static long guarded, quiet;
static volatile int32_t global_number;
static volatile uint64_t table[4];
static struct {
	int32_t first, second;
} volatile pair;

__attribute__((noinline)) static void registers(long round)
{
	uint64_t whole = round * 0x100000001;
	int32_t number = -1 - (int32_t)round;
	uint16_t word = 0x8000 + round;
	int16_t negative_word = -round;
	uint8_t byte = 200 + round;
	int8_t negative_byte = -1 - round % 100;

	SITE("in__registers", "0", "8@%[a] -4@%[b] 2@%[c] -2@%[d] 1@%[e] -1@%[f]",
	     [a] "r"(whole), [b] "r"(number), [c] "r"(word), [d] "r"(negative_word), [e] "Q"(byte),
	     [f] "r"(negative_byte));
	/* The second byte of a register, whatever the first is. */
	SITE("second__byte", "0", "1@%%ah -1@%%bh 4@%%ebx", "a"((uint64_t)round << 8 | 0x55),
	     "b"(0xf0f0 - (round << 8)));
}

__attribute__((noinline)) static void memory(long round)
{
	volatile int64_t local = -1000 - round;
	long index = round & 3;

	global_number = -7 * (int32_t)round;
	pair.second = 3 * (int32_t)round;
	table[index] = 1000 + round;
	SITE("in__memory", "0", "-8@%[a] -4@%[b] -4@%[c] 8@(%[d],%[e],8) 4@%[f]", [a] "m"(local),
	     [b] "m"(global_number), [c] "m"(pair.second), [d] "r"(table), [e] "r"(index),
	     [f] "m"(global_number));
	SITE("by__symbol", "0", "-4@%c[a]+4(%%rip) -4@4+%c[a](%%rip) 8@%c[b](%%rip)", [a] "i"(&pair),
	     [b] "i"(&table[0]));
}

__attribute__((noinline)) static void constants(void)
{
	SITE("con__stants", "0", "-4@%[a] 4@%[a] 8@%[b] -1@$255 2@$0x12345", [a] "i"(-5), [b] "i"(1l << 40));
}

__attribute__((noinline)) static void twelve(long round)
{
	SITE("twelve", "0",
	     "8@$1 8@$2 8@$3 8@$4 8@$5 8@$6 8@$7 8@$8 8@$9 8@$10 8@%[a] 8@%[b]", [a] "r"(round),
	     [b] "r"(~round));
}

__attribute__((noinline)) static void two_places(long round)
{
	SITE("twice", "0", "8@%[a] -4@$1", [a] "r"(round));
	SITE("twice", "0", "8@%[a] -4@$2", [a] "m"(round));
}

__attribute__((noinline)) static void with_listeners(long round)
{
	if (statics_guarded) {
		guarded++;
		SITE("guarded", "statics_guarded", "8@%[a]", [a] "r"(round));
	}
	if (statics_quiet[0]) {
		quiet++;
		SITE("quiet", "statics_quiet", "8@%[a]", [a] "r"(round));
	}
}

__attribute__((noinline)) static void one_round(long round)
{
	static const char *const names[] = { "apple", "pear" };
	double real = 1.5 * round;

	SITE("none", "0", "");
	registers(round);
	memory(round);
	constants();
	twelve(round);
	two_places(round);
	with_listeners(round);
	DECLARED_SITE("item__sold", "item-sold", "8@%[a] 8@%[b] -4@%[c]", [a] "r"(names[round & 1]),
		      [b] "r"(&pair), [c] "r"((int32_t)-round));
	/* Only the second of the two is in memory; the third is no operand at all. */
	SITE("not__all", "0", "8f@%[a] 8f@%[b] 8@%%nosuch 8@$4", [a] "x"(real), [b] "m"(real));
}

int main(int argc, char **argv)
{
	long rounds = argc > 1 ? atol(argv[1]) : 0;
	long wait = argc > 2 ? atol(argv[2]) : 10;
	struct timespec pause = { wait / 1000, wait % 1000 * 1000000 };
	char line[64];
	long done = 0;

	setvbuf(stdout, NULL, _IONBF, 0);
	printf("statics: %d\n", getpid());
	while (!rounds || done < rounds) {
		if (wait < 0 && !fgets(line, sizeof line, stdin))
			break;
		one_round(done++);
		if (wait < 0)
			printf("round %ld: %ld guarded by %d, %ld quiet by %d\n", done, guarded, statics_guarded, quiet,
			       statics_quiet[0]);
		if (wait > 0)
			nanosleep(&pause, NULL);
	}
	printf("statics: %ld rounds, %ld guarded by %d, %ld quiet by %d\n", done, guarded, statics_guarded, quiet,
	       statics_quiet[0]);
	return 0;
}
