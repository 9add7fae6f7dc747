/* throws [EXCEPTIONS [MILLISECONDS]]: throws a C++ int of 100, 101, 102 ... EXCEPTIONS times (0:
 * without end). No handler catches it. The C++ library would then end the program, but this one
 * continues. Waits MILLISECONDS (0) between two. Prints `throws: N exceptions` at the end.
 *
 * The library is loaded at run time, so that neither its headers nor a C++ compiler is needed. Its
 * functions are those of the Itanium C++ ABI; each has static probes. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static jmp_buf next;

/* Abandons the exception instead of ending the program. */
static void terminated(void)
{
	longjmp(next, 1);
}

int main(int argc, char **argv)
{
	volatile long exceptions = argc > 1 ? atol(argv[1]) : 0;
	long wait = argc > 2 ? atol(argv[2]) : 0;
	struct timespec pause = { wait / 1000, wait % 1000 * 1000000 };
	void *library = dlopen("libstdc++.so.6", RTLD_NOW);
	volatile long done = 0;
	int *thrown;

	if (!library) {
		printf("throws: %s\n", dlerror());
		return 1;
	}
	void *(*allocate)(size_t) = dlsym(library, "__cxa_allocate_exception");
	void (*throw_it)(void *, void *, void (*)(void *)) = dlsym(library, "__cxa_throw");
	void *(*set_terminate)(void (*)(void)) = dlsym(library, "_ZSt13set_terminatePFvvE");
	/* typeid(int) */
	void *type = dlsym(library, "_ZTIi");

	set_terminate(terminated);
	while (!exceptions || done < exceptions) {
		if (!setjmp(next)) {
			thrown = allocate(sizeof *thrown);
			*thrown = 100 + done;
			throw_it(thrown, type, NULL);
		}
		done++;
		if (wait)
			nanosleep(&pause, NULL);
	}
	printf("throws: %ld exceptions\n", done);
	return 0;
}
