/* Shared by the guest programs: system calls, text output, the entry point. No C library: a program
 * is 1 to 3 kB, and every byte of an initramfs is copied at boot by a kernel that may be
 * interpreted.
 *
 * Numbers and structures are those of x86-64 Linux (syscalls(2),
 * arch/x86/entry/syscalls/syscall_64.tbl). */
#ifndef GUEST_H
#define GUEST_H

enum {
	SYS_read = 0, SYS_write = 1, SYS_open = 2, SYS_close = 3, SYS_stat = 4, SYS_mmap = 9, SYS_mprotect = 10, SYS_ioctl = 16, SYS_readv = 19,
	SYS_nanosleep = 35,
	SYS_fork = 57, SYS_execve = 59, SYS_exit = 60, SYS_wait4 = 61, SYS_rename = 82, SYS_mkdir = 83, SYS_unlink = 87,
	SYS_symlink = 88, SYS_getdents64 = 217, SYS_sched_yield = 24, SYS_sched_setattr = 314,
	SYS_getppid = 110, SYS_setsid = 112, SYS_sync = 162, SYS_mount = 165, SYS_reboot = 169, SYS_dup2 = 33,
	SYS_finit_module = 313, SYS_clock_gettime = 228,
};

enum { O_RDONLY = 0, O_RDWR = 2, O_CREAT_TRUNC_WRONLY = 0x241, O_CREAT_TRUNC_RDWR = 0x242 };

/* A probe by function name should find the function, and a stack walk its caller. */
#define TRACEABLE __attribute__((noinline, noclone))

static inline long syscall5(long number, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
			 : "rcx", "r11", "memory");
	return result;
}

#define syscall0(n) syscall5((n), 0, 0, 0, 0, 0)
#define syscall1(n, a) syscall5((n), (long)(a), 0, 0, 0, 0)
#define syscall2(n, a, b) syscall5((n), (long)(a), (long)(b), 0, 0, 0)
#define syscall3(n, a, b, c) syscall5((n), (long)(a), (long)(b), (long)(c), 0, 0)

/* mmap(2) with MAP_SHARED, anywhere; 0 if it fails. */
static inline void *map_shared(long fd, unsigned long offset, unsigned long bytes, long access)
{
	register long flags __asm__("r10") = 1;
	register long r8 __asm__("r8") = fd;
	register unsigned long r9 __asm__("r9") = offset;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(SYS_mmap), "D"(0), "S"(bytes), "d"(access), "r"(flags), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result < 0 && result > -4096 ? 0 : (void *)result;
}

static inline unsigned long length(const char *text)
{
	unsigned long n = 0;

	while (text[n])
		n++;
	return n;
}

/* Room for the digits of any number, its sign and a NUL. */
enum { DIGITS = 24 };

/* The decimal digits of value at the end of buffer, NUL-terminated. */
static inline char *decimal(long value, char buffer[DIGITS])
{
	unsigned long rest = value < 0 ? -(unsigned long)value : (unsigned long)value;
	char *at = buffer + DIGITS - 1;

	*at = 0;
	do {
		*--at = '0' + rest % 10;
		rest /= 10;
	} while (rest);
	if (value < 0)
		*--at = '-';
	return at;
}

/* The leading decimal digits of text, or missing if there is no text. */
static inline long number(const char *text, long missing)
{
	long value = 0;

	if (!text)
		return missing;
	while (*text >= '0' && *text <= '9')
		value = value * 10 + (*text++ - '0');
	return value;
}

static inline void sleep_ms(long ms)
{
	long time[2] = { ms / 1000, ms % 1000 * 1000000 };

	syscall2(SYS_nanosleep, time, 0);
}

static inline __attribute__((noreturn)) void quit(long status)
{
	for (;;)
		syscall1(SYS_exit, status);
}

/* gcc calls these by itself, also without a library. */
void *memcpy(void *to, const void *from, unsigned long n)
{
	void *start = to;

	__asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
	return start;
}

void *memset(void *to, int byte, unsigned long n)
{
	void *start = to;

	__asm__ volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(byte) : "memory");
	return start;
}

/* Prints the texts, up to a NULL, in one write, cut at 512 bytes: concurrent output of two programs
 * is not mixed within a line. */
static inline void print_parts(const char *const *parts)
{
	char line[512];
	unsigned long used = 0;

	for (; *parts; parts++) {
		unsigned long n = length(*parts);

		if (n > sizeof(line) - used)
			n = sizeof(line) - used;
		memcpy(line + used, *parts, n);
		used += n;
	}
	syscall3(SYS_write, 1, line, used);
}

/* print("forks: ", decimal(n, digits), "\n"): one line. */
#define print(...) print_parts((const char *const[]){ __VA_ARGS__, 0 })

int program(int argc, char **argv, char **envp);

/* The kernel starts a program with argc, argv and envp on the stack, and no return address. */
__asm__(".globl _start\n"
	".type _start, @function\n"
	"_start:\n"
	"	xor %ebp, %ebp\n"
	"	mov (%rsp), %edi\n"
	"	lea 8(%rsp), %rsi\n"
	"	lea 16(%rsp,%rdi,8), %rdx\n"
	"	and $-16, %rsp\n"
	"	call program\n"
	"	mov %eax, %edi\n"
	"	mov $60, %eax\n"
	"	syscall\n"
	".size _start, . - _start\n");

#endif
