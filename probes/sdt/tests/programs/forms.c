/* Each form of definition and site, for C and C++. A function has the arguments that its probe passes, in their registers. */
#include <exotrace/sdt.h>

#ifdef __cplusplus
extern "C" {
#endif

SDT_PROVIDER_DECLARE(forms);
SDT_PROVIDER_DEFINE(forms);
/* Macros in many compilers. */
SDT_PROVIDER_DEFINE(linux);

/* The form of 2013. */
SDT_PROBE_DEFINE(forms, , , none_old, none-old);
SDT_PROBE_DEFINE0(forms, , , zero_old, zero-old);
SDT_PROBE_DEFINE1(forms, , unreach, pkt_receive, pkt-receive, "struct icmp *");
SDT_PROBE_DEFINE2(forms, module, , two_old, two-old, "int", "long");
SDT_PROBE_DEFINE3(forms, module, function, three_old, three-old, "a", "b", "c");
SDT_PROBE_DEFINE4(forms, , , four_old, four-old, "a", "b", "c", "d");
SDT_PROBE_DEFINE5(forms, , , five_old, five-old, "a", "b", "c", "d", "e");
SDT_PROBE_DEFINE6(forms, , , six_old, six-old, "a", "b", "c", "d", "e", "f");
SDT_PROBE_DEFINE7(forms, , , seven_old, seven-old, "a", "b", "c", "d", "e", "f", "g");
SDT_PROBE_DEFINE0_XLATE(forms, , , xzero_old, xzero-old);
SDT_PROBE_DEFINE1_XLATE(forms, , , xone_old, xone-old, "a", "A");
SDT_PROBE_DEFINE2_XLATE(forms, , , xtwo_old, xtwo-old, "a", "A", "b", "B");
SDT_PROBE_DEFINE3_XLATE(forms, , , xthree_old, xthree-old, "a", "A", "b", "B", "c", "C");
SDT_PROBE_DEFINE4_XLATE(forms, , , xfour_old, xfour-old, "a", "A", "b", "B", "c", "C", "d", "D");
SDT_PROBE_DEFINE5_XLATE(forms, , , xfive_old, xfive-old, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E");
SDT_PROBE_DEFINE6_XLATE(forms, , , xsix_old, xsix-old, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E", "f", "F");
SDT_PROBE_DEFINE7_XLATE(forms, , , xseven_old, xseven-old, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E", "f", "F", "g", "G");

/* The current form. */
SDT_PROBE_DEFINE(forms, , , none__new);
SDT_PROBE_DEFINE0(linux, unix, linux, zero__new);
SDT_PROBE_DEFINE1(forms, , , one__, "int");
SDT_PROBE_DEFINE2(forms, , , _two_new, "int", "long");
SDT_PROBE_DEFINE3(forms, , , three___new, "a", "b", "c");
SDT_PROBE_DEFINE4(forms, , , four____new, "a", "b", "c", "d");
SDT_PROBE_DEFINE5(forms, , , five, "a", "b", "c", "d", "e");
SDT_PROBE_DEFINE6(forms, , , six, "a", "b", "c", "d", "e", "f");
SDT_PROBE_DEFINE7(forms, , , seven, "struct icmp *", "int", "unsigned char", "signed char", "short", "unsigned long", "int");
SDT_PROBE_DEFINE0_XLATE(forms, , , xzero);
SDT_PROBE_DEFINE1_XLATE(forms, , , xone, "struct icmp *", "struct icmp_hdr_dt *");
SDT_PROBE_DEFINE2_XLATE(forms, , , xtwo, "a", "A", "b", "");
SDT_PROBE_DEFINE3_XLATE(forms, , , xthree, "a", "A", "b", "B", "c", "C");
SDT_PROBE_DEFINE4_XLATE(forms, , , xfour, "a", "A", "b", "B", "c", "C", "d", "D");
SDT_PROBE_DEFINE5_XLATE(forms, , , xfive, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E");
SDT_PROBE_DEFINE6_XLATE(forms, , , xsix, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E", "f", "F");
SDT_PROBE_DEFINE7_XLATE(forms, , , xseven, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E", "f", "F", "g", "G");

/* May follow the definition, and come again. */
SDT_PROBE_DECLARE(forms, , , five);
SDT_PROBE_DECLARE(forms, , , five);

#define KEPT __attribute__((noinline, used))

KEPT void zero(void) { SDT_PROBE0(linux, unix, linux, zero__new); }
KEPT void one(const char *a) { SDT_PROBE1(forms, , unreach, pkt_receive, a); }
KEPT void two(int a, long b) { SDT_PROBE2(forms, module, , two_old, a, b); }
KEPT void three(unsigned a, unsigned long b, char *c) { SDT_PROBE3(forms, module, function, three_old, a, b, c); }
KEPT void four(short a, unsigned short b, signed char c, unsigned char d) { SDT_PROBE4(forms, , , four____new, a, b, c, d); }
KEPT void five(int a, int b, int c, int d, int e) { SDT_PROBE5(forms, , , five, a, b, c, d, e); }
KEPT void six(int a, int b, int c, int d, int e, int f) { SDT_PROBE6(forms, , , six, a, b, c, d, e, f); }
KEPT void seven(void *a, int b, unsigned char c, signed char d, short e, unsigned long f) { SDT_PROBE7(forms, , , seven, a, b, c, d, e, f, 5); }
KEPT void constants(void) { DTRACE_PROBE4(forms, constants, -7, 7u, -1L, (void *)0); }
KEPT void enabled(void)
{
	if (SDT_PROBE_ENABLED(forms, , , five))
		SDT_PROBE5(forms, , , five, 1, 2, 3, 4, 5);
}
KEPT void conveniences(long a)
{
	DTRACE_PROBE(forms, plain);
	DTRACE_PROBE1(forms, plain1, a);
	DTRACE_PROBE2(forms, plain2, a, a);
	DTRACE_PROBE3(forms, plain3, a, a, a);
	DTRACE_PROBE5(forms, plain5, a, a, a, a, a);
	DTRACE_PROBE6(forms, plain6, a, a, a, a, a, a);
	DTRACE_PROBE7(forms, plain7, a, a, a, a, a, a, a);
}

/* A value is evaluated once, and an array is its address. */
static char text[] = "text";
KEPT int once(void)
{
	int calls = 0;

	DTRACE_PROBE2(forms, once, ++calls, text);
	return calls;
}

/* With its probe and without. */
KEPT long costs(long *a, int b, unsigned long c)
{
#ifndef WITHOUT
	DTRACE_PROBE3(forms, costs, a, b, c);
#endif
	return *a + b + (long)c;
}

int main(void)
{
	long number = 1;

	zero();
	one("one");
	two(-2, 2);
	three(3, 3, text);
	four(-4, 4, -4, 4);
	five(1, 2, 3, 4, 5);
	six(1, 2, 3, 4, 5, 6);
	seven(text, -2, 3, -4, -5, 6);
	constants();
	enabled();
	conveniences(7);
	return once() != 1 || costs(&number, 1, 1) != 3;
}

#ifdef __cplusplus
}
#endif
