// Values that only C++ has: references, scoped enumerations, nullptr, and sites in templates and inline functions, which linkers merge.
#include <exotrace/sdt.h>

enum class Scoped : short { minus = -1 };

template <class T> __attribute__((noinline)) void generic(T &a, const T &b, T *c)
{
	DTRACE_PROBE4(values, generic, a, b, c, nullptr);
}

__attribute__((noinline)) void scoped(Scoped a, bool b, const int (&c)[3]) { DTRACE_PROBE3(values, scoped, a, b, c); }

int main()
{
	int narrow = 1;
	long wide = 2;
	const int three[3] = {};

	generic(narrow, narrow, &narrow);
	generic(wide, wide, &wide);
	scoped(Scoped::minus, true, three);
}
