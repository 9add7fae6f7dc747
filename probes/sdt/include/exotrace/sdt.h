/*
 * exotrace/sdt.h: statically defined tracing probes, SDT(9), for programs that run in a guest (or anywhere else).
 *
 *	#include <exotrace/sdt.h>
 *
 *	SDT_PROVIDER_DEFINE(icmp);
 *	SDT_PROBE_DEFINE1(icmp, , unreach, pkt_receive, pkt-receive, "struct icmp *");
 *
 *	void unreach(struct icmp *packet)
 *	{
 *		SDT_PROBE1(icmp, , unreach, pkt_receive, packet);
 *	}
 *
 * makes the probe `icmp::unreach:pkt-receive`. A site costs one `nop`. With arguments it is also a memory clobber, so that the target of a
 * pointer is in memory when a tracer reads it. Everything else is in ELF notes, which no program loads. For C99, C++11 and later, gcc
 * and clang, x86-64 and AT&T assembly; needs no other header and no library.
 *
 * SDT_PROVIDER_DECLARE(prov), SDT_PROVIDER_DEFINE(prov)
 *	One of them must precede the probes of the provider in each source file: a misspelt provider does not compile. Neither emits anything.
 * SDT_PROBE_DEFINE(prov, mod, func, name [, sname])
 * SDT_PROBE_DEFINEn(prov, mod, func, name [, sname], type0, ...), n from 0 to 7
 * SDT_PROBE_DEFINEn_XLATE(prov, mod, func, name [, sname], type0, xtype0, ...)
 *	At file scope, once per program. mod and func may be empty. Types are string literals. Without sname, each `__` in name is a `-` to
 *	scripts; with it (the form of 2013), scripts use sname, and name is sname with each `-` as `_`. The forms are distinguished by the
 *	number of macro arguments.
 * SDT_PROBE_DECLARE(prov, mod, func, name)
 *	In the other source files with sites of the probe.
 * SDT_PROBEn(prov, mod, func, name, value0, ...), n from 0 to 7
 *	A site, as a statement. Values are integers, enumerations, booleans, pointers and arrays of at most 8 bytes each, evaluated once;
 *	floating point does not compile. Any number of sites may share a probe.
 * SDT_PROBE_ENABLED(prov, mod, func, name)
 *	Nonzero if a tracer has enabled the probe, to skip costly preparation of its values. Constantly 1 unless EXOTRACE_SDT_SEMAPHORES is
 *	defined before this header in all source files of the program; then a load of the probe's counter.
 * DTRACE_PROBE(prov, name), DTRACE_PROBEn(prov, name, value0, ...), n from 1 to 7
 *	A site without a definition: types unknown, no module, no function.
 *
 * The emitted notes, for tracers. Strings end in NUL, numbers are little endian, notes are aligned to 4:
 *
 * .note.stapsdt, owner "stapsdt", type 3: one for each site, as systemtap, gdb, perf and bpftrace read it.
 *	u64 site, u64 address of .stapsdt.base, u64 semaphore or 0, provider, name as the C identifier (`pkt_receive`, `pkt__receive`),
 *	arguments such as `8@%rdi -4@$5`.
 * .note.exotrace, owner "exotrace", type 1: one for each definition.
 *	provider, module, function, name, then for each argument its type and its translated type (empty if none). The name is sname, or
 *	the identifier with each `__` as `-`.
 * .note.exotrace, owner "exotrace", type 2: one for each site.
 *	u64 site, u64 address of .stapsdt.base, provider, module, function, name. The name is the identifier with each `__` as `-`. The
 *	preprocessor does not know the sname at a site (the definition may be in another file), so a site belongs to the definition
 *	of the same provider, module and function whose name is equal, or else to the one whose name is equal once its dashes are written
 *	as underscores: `pkt_receive` to `pkt-receive`.
 */
#ifndef EXOTRACE_SDT_H
#define EXOTRACE_SDT_H

/* Empty macro arguments and GNU forms below are intended: no -Wpedantic in the programs that use them. */
#pragma GCC system_header

#if !defined(__x86_64__) || !defined(__ELF__)
#error "exotrace/sdt.h: probe sites are written for x86-64 and ELF only"
#endif

/* ---- Providers and declarations: prototypes that are never called and leave no trace in the object file. */

/*
 * The macros for programs turn names into text and symbols before any other macro can expand them: `linux` and `unix`
 * are macros in many compilers. `probe` is the symbol of a probe.
 */
#ifdef __cplusplus
#define EXO_SDT_EXTERN extern "C"
#else
#define EXO_SDT_EXTERN extern
#endif

#define SDT_PROVIDER_DECLARE(prov) EXO_SDT_EXTERN void sdt_provider_##prov(void)
#define SDT_PROVIDER_DEFINE(prov) EXO_SDT_EXTERN void sdt_provider_##prov(void)

#define SDT_PROBE_DECLARE(prov, mod, func, name) \
	EXO_SDT_DECLARE(sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name)
#define EXO_SDT_DECLARE(provider, probe, prov, mod, func, name) \
	EXO_SDT_SEMAPHORE_DECLARE(probe) \
	EXO_SDT_EXTERN void probe(__typeof__(provider) *, EXO_SDT_FITS(prov, 64), EXO_SDT_FITS(mod, 64), EXO_SDT_FITS(func, 192), \
		EXO_SDT_FITS(name, 64))

/* Lengths with NUL as in SDT: for a longer name, an array of negative size. */
#define EXO_SDT_FITS(text, most) char (*)[sizeof(text) <= (most) ? 1 : -1]

/* ---- Semaphores: a counter for each probe, which a tracer increments while it listens. */

#ifdef EXOTRACE_SDT_SEMAPHORES
#define EXO_SDT_SEMAPHORE_DECLARE(probe) EXO_SDT_EXTERN unsigned short probe##_semaphore __attribute__((visibility("hidden")));
#define EXO_SDT_SEMAPHORE_DEFINE(probe) \
	unsigned short probe##_semaphore __attribute__((visibility("hidden"), section(".probes"), used)) = 0;
#define EXO_SDT_SEMAPHORE(probe) #probe "_semaphore"
#define SDT_PROBE_ENABLED(prov, mod, func, name) \
	__builtin_expect(*(volatile unsigned short *)&sdt_##prov##_##mod##_##func##_##name##_semaphore != 0, 0)
#else
#define EXO_SDT_SEMAPHORE_DECLARE(probe)
#define EXO_SDT_SEMAPHORE_DEFINE(probe)
#define EXO_SDT_SEMAPHORE(probe) "0"
#define SDT_PROBE_ENABLED(prov, mod, func, name) ((void)sizeof(&sdt_##prov##_##mod##_##func##_##name), 1)
#endif

/* ---- Notes, as assembly text. */

/* Labels are numbers: each 991f is the next one, so that text repeats in one object file. */
#define EXO_SDT_NOTE(section, flags, owner, type, description) \
	".pushsection " section ",\"" flags "\",@note\n" \
	".balign 4\n" \
	".4byte 992f-991f, 994f-993f, " type "\n" \
	"991: .asciz \"" owner "\"\n" \
	"992: .balign 4\n" \
	"993:\n" description \
	"994: .balign 4\n" \
	".popsection\n"

#define EXO_SDT_STRING(text) ".asciz \"" text "\"\n"

/* The identifier with each `__` as `-`: one character at a time. The symbol is set while an underscore may have a second. */
#define EXO_SDT_DASHED(identifier) \
	".set .Lexotrace_sdt_wait, 0\n" \
	".irpc c," identifier "\n" \
	".ifc \\c,_\n" \
	".if .Lexotrace_sdt_wait\n" \
	".ascii \"-\"\n" \
	".endif\n" \
	".set .Lexotrace_sdt_wait, 1 - .Lexotrace_sdt_wait\n" \
	".else\n" \
	".if .Lexotrace_sdt_wait\n" \
	".ascii \"_\"\n" \
	".set .Lexotrace_sdt_wait, 0\n" \
	".endif\n" \
	".ascii \"\\c\"\n" \
	".endif\n" \
	".endr\n" \
	".if .Lexotrace_sdt_wait\n" \
	".ascii \"_\"\n" \
	".endif\n" \
	".byte 0\n"

/* ---- Definitions. */

#define EXO_SDT_TEXT_(...) #__VA_ARGS__
#define EXO_SDT_TEXT(...) EXO_SDT_TEXT_(__VA_ARGS__)

/* A type is a string literal already; as text it has the quotes that assembly needs. */
#define EXO_SDT_TYPE(type) ".asciz " EXO_SDT_TEXT(type) "\n"
#define EXO_SDT_NATIVE0()
#define EXO_SDT_NATIVE1(t) EXO_SDT_TYPE(t) EXO_SDT_TYPE("")
#define EXO_SDT_NATIVE2(t, ...) EXO_SDT_NATIVE1(t) EXO_SDT_NATIVE1(__VA_ARGS__)
#define EXO_SDT_NATIVE3(t, ...) EXO_SDT_NATIVE1(t) EXO_SDT_NATIVE2(__VA_ARGS__)
#define EXO_SDT_NATIVE4(t, ...) EXO_SDT_NATIVE1(t) EXO_SDT_NATIVE3(__VA_ARGS__)
#define EXO_SDT_NATIVE5(t, ...) EXO_SDT_NATIVE1(t) EXO_SDT_NATIVE4(__VA_ARGS__)
#define EXO_SDT_NATIVE6(t, ...) EXO_SDT_NATIVE1(t) EXO_SDT_NATIVE5(__VA_ARGS__)
#define EXO_SDT_NATIVE7(t, ...) EXO_SDT_NATIVE1(t) EXO_SDT_NATIVE6(__VA_ARGS__)
#define EXO_SDT_XLATE1(t, x) EXO_SDT_TYPE(t) EXO_SDT_TYPE(x)
#define EXO_SDT_XLATE2(t, x, ...) EXO_SDT_XLATE1(t, x) EXO_SDT_XLATE1(__VA_ARGS__)
#define EXO_SDT_XLATE3(t, x, ...) EXO_SDT_XLATE1(t, x) EXO_SDT_XLATE2(__VA_ARGS__)
#define EXO_SDT_XLATE4(t, x, ...) EXO_SDT_XLATE1(t, x) EXO_SDT_XLATE3(__VA_ARGS__)
#define EXO_SDT_XLATE5(t, x, ...) EXO_SDT_XLATE1(t, x) EXO_SDT_XLATE4(__VA_ARGS__)
#define EXO_SDT_XLATE6(t, x, ...) EXO_SDT_XLATE1(t, x) EXO_SDT_XLATE5(__VA_ARGS__)
#define EXO_SDT_XLATE7(t, x, ...) EXO_SDT_XLATE1(t, x) EXO_SDT_XLATE6(__VA_ARGS__)

/*
 * Selects the form of a definition by the number of its arguments after the name: EXO_SDT_NATIVE3_WITH_4, three types and four arguments, has
 * an sname. Any other number is an undeclared function, whose name describes the error.
 */
#define EXO_SDT_COUNT(...) EXO_SDT_COUNT_(__VA_ARGS__, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define EXO_SDT_COUNT_(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, count, ...) count
#define EXO_SDT_PASTE_(a, b) a##b
#define EXO_SDT_PASTE(a, b) EXO_SDT_PASTE_(a, b)

#define EXO_SDT_CURRENT(prov, mod, func, name, types, ...) \
	EXO_SDT_DECLARATION(prov, mod, func, EXO_SDT_DASHED(name), types(__VA_ARGS__))
#define EXO_SDT_YEAR2013(prov, mod, func, name, types, sname, ...) \
	EXO_SDT_DECLARATION(prov, mod, func, EXO_SDT_STRING(EXO_SDT_TEXT(sname)), types(__VA_ARGS__))
#define EXO_SDT_DECLARATION(prov, mod, func, name, types) \
	__asm__(EXO_SDT_NOTE(".note.exotrace", "", "exotrace", "1", \
		EXO_SDT_STRING(prov) EXO_SDT_STRING(mod) EXO_SDT_STRING(func) name types))

#define EXO_SDT_NATIVE0_WITH_0 EXO_SDT_CURRENT
#define EXO_SDT_NATIVE0_WITH_1 EXO_SDT_YEAR2013
#define EXO_SDT_NATIVE1_WITH_1 EXO_SDT_CURRENT
#define EXO_SDT_NATIVE1_WITH_2 EXO_SDT_YEAR2013
#define EXO_SDT_NATIVE2_WITH_2 EXO_SDT_CURRENT
#define EXO_SDT_NATIVE2_WITH_3 EXO_SDT_YEAR2013
#define EXO_SDT_NATIVE3_WITH_3 EXO_SDT_CURRENT
#define EXO_SDT_NATIVE3_WITH_4 EXO_SDT_YEAR2013
#define EXO_SDT_NATIVE4_WITH_4 EXO_SDT_CURRENT
#define EXO_SDT_NATIVE4_WITH_5 EXO_SDT_YEAR2013
#define EXO_SDT_NATIVE5_WITH_5 EXO_SDT_CURRENT
#define EXO_SDT_NATIVE5_WITH_6 EXO_SDT_YEAR2013
#define EXO_SDT_NATIVE6_WITH_6 EXO_SDT_CURRENT
#define EXO_SDT_NATIVE6_WITH_7 EXO_SDT_YEAR2013
#define EXO_SDT_NATIVE7_WITH_7 EXO_SDT_CURRENT
#define EXO_SDT_NATIVE7_WITH_8 EXO_SDT_YEAR2013
#define EXO_SDT_XLATE1_WITH_2 EXO_SDT_CURRENT
#define EXO_SDT_XLATE1_WITH_3 EXO_SDT_YEAR2013
#define EXO_SDT_XLATE2_WITH_4 EXO_SDT_CURRENT
#define EXO_SDT_XLATE2_WITH_5 EXO_SDT_YEAR2013
#define EXO_SDT_XLATE3_WITH_6 EXO_SDT_CURRENT
#define EXO_SDT_XLATE3_WITH_7 EXO_SDT_YEAR2013
#define EXO_SDT_XLATE4_WITH_8 EXO_SDT_CURRENT
#define EXO_SDT_XLATE4_WITH_9 EXO_SDT_YEAR2013
#define EXO_SDT_XLATE5_WITH_10 EXO_SDT_CURRENT
#define EXO_SDT_XLATE5_WITH_11 EXO_SDT_YEAR2013
#define EXO_SDT_XLATE6_WITH_12 EXO_SDT_CURRENT
#define EXO_SDT_XLATE6_WITH_13 EXO_SDT_YEAR2013
#define EXO_SDT_XLATE7_WITH_14 EXO_SDT_CURRENT
#define EXO_SDT_XLATE7_WITH_15 EXO_SDT_YEAR2013

#define EXO_SDT_DEFINE(types, provider, probe, prov, mod, func, name, ...) \
	EXO_SDT_DECLARE(provider, probe, prov, mod, func, name); \
	EXO_SDT_SEMAPHORE_DEFINE(probe) \
	EXO_SDT_PASTE(types##_WITH_, EXO_SDT_COUNT(0, ##__VA_ARGS__))(prov, mod, func, name, types, ##__VA_ARGS__)

#define SDT_PROBE_DEFINE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE0, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE0(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE0, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE1(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE1, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE2(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE2, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE3(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE3, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE4(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE4, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE5(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE5, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE6(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE6, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE7(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE7, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE0_XLATE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_NATIVE0, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE1_XLATE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_XLATE1, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE2_XLATE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_XLATE2, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE3_XLATE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_XLATE3, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE4_XLATE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_XLATE4, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE5_XLATE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_XLATE5, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE6_XLATE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_XLATE6, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)
#define SDT_PROBE_DEFINE7_XLATE(prov, mod, func, name, ...) \
	EXO_SDT_DEFINE(EXO_SDT_XLATE7, sdt_provider_##prov, sdt_##prov##_##mod##_##func##_##name, #prov, #mod, #func, #name, ##__VA_ARGS__)

/* ---- The description of a value for a tracer: its size in bytes, negative if signed; and the value itself, arrays as pointers. */

#ifdef __cplusplus
extern "C++" {
/* Never called: passed by value, an array is a pointer, and references and qualifiers are gone. */
template <class T> T exo_sdt_passed(T);
void *exo_sdt_passed(decltype(nullptr));

template <class T> struct exo_sdt_value {
	static_assert(sizeof(T) <= 8, "a probe's value has at most 8 bytes");
	enum { size = T(-1) < T(0) ? -(int)sizeof(T) : (int)sizeof(T) };
};
template <class T> struct exo_sdt_value<T *> {
	enum { size = sizeof(T *) };
};
/* Floating point has no description, so that it does not compile. */
template <> struct exo_sdt_value<float>;
template <> struct exo_sdt_value<double>;
}
#define EXO_SDT_SIZE(value) (exo_sdt_value<decltype(exo_sdt_passed(value))>::size)
#define EXO_SDT_VALUE(value) ((decltype(exo_sdt_passed(value)))(value))
#else
/* After a comma, an array is a pointer and a narrow integer stays narrow. */
#define EXO_SDT_TYPEOF(value) __typeof__(((void)0, (value)))
#define EXO_SDT_POINTER_CLASS 5
#define EXO_SDT_REAL_CLASS 8
#define EXO_SDT_CLASS(value) __builtin_classify_type(((void)0, (value)))
/* Signs are determined for integers only: a comparison of pointers is not a constant expression. */
#define EXO_SDT_SIGNED(value) \
	((EXO_SDT_TYPEOF(__builtin_choose_expr(EXO_SDT_CLASS(value) == EXO_SDT_POINTER_CLASS, 0U, (value))))-1 < 1)
/* An array of negative size for values without a description: floating point, and values wider than 8 bytes. */
#define EXO_SDT_SIZE(value) \
	((int)(sizeof(EXO_SDT_TYPEOF(value)) * \
	       sizeof(char[sizeof(EXO_SDT_TYPEOF(value)) <= 8 && EXO_SDT_CLASS(value) < EXO_SDT_REAL_CLASS ? 1 : -1])) * \
	 (EXO_SDT_SIGNED(value) ? -1 : 1))
#define EXO_SDT_VALUE(value) ((EXO_SDT_TYPEOF(value))(value))
#endif

/* ---- Sites. */

/*
 * The anchor of link-time addresses, one for a program, by the names that systemtap gave it: files compiled with <sys/sdt.h> share it.
 * Nothing that is loaded refers to it: the flag "R" keeps it through a linker's --gc-sections, where the assembler should know the flag.
 */
#if defined(__clang__) ? __clang_major__ >= 13 : __GNUC__ >= 12
#define EXO_SDT_RETAIN "R"
#else
#define EXO_SDT_RETAIN ""
#endif
#define EXO_SDT_BASE \
	".ifndef _.stapsdt.base\n" \
	".pushsection .stapsdt.base,\"aG" EXO_SDT_RETAIN "\",\"progbits\",.stapsdt.base,comdat\n" \
	".weak _.stapsdt.base\n" \
	".hidden _.stapsdt.base\n" \
	"_.stapsdt.base: .space 1\n" \
	".size _.stapsdt.base, 1\n" \
	".popsection\n" \
	".endif\n"

/* The notes of a site are dropped with its function if the linker drops duplicates of it: the flag "?". */
#define EXO_SDT_SITE_TEXT(semaphore, prov, mod, func, name, values) \
	"990: nop\n" EXO_SDT_NOTE(".note.stapsdt", "?", "stapsdt", "3", \
		".8byte 990b, _.stapsdt.base, " semaphore "\n" EXO_SDT_STRING(prov) EXO_SDT_STRING(name) EXO_SDT_STRING(values)) \
	EXO_SDT_NOTE(".note.exotrace", "?", "exotrace", "2", \
		".8byte 990b, _.stapsdt.base\n" \
		EXO_SDT_STRING(prov) EXO_SDT_STRING(mod) EXO_SDT_STRING(func) EXO_SDT_DASHED(name)) \
	EXO_SDT_BASE

/* The text has many lines and one instruction. `inline` keeps compilers from estimating its size by its lines. */
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 9
#define EXO_SDT_ASM __asm__ __volatile__ __inline__
#else
#define EXO_SDT_ASM __asm__ __volatile__
#endif

#define EXO_SDT_FORMAT0 ""
#define EXO_SDT_FORMAT1 "%c[s0]@%[v0]"
#define EXO_SDT_FORMAT2 EXO_SDT_FORMAT1 " %c[s1]@%[v1]"
#define EXO_SDT_FORMAT3 EXO_SDT_FORMAT2 " %c[s2]@%[v2]"
#define EXO_SDT_FORMAT4 EXO_SDT_FORMAT3 " %c[s3]@%[v3]"
#define EXO_SDT_FORMAT5 EXO_SDT_FORMAT4 " %c[s4]@%[v4]"
#define EXO_SDT_FORMAT6 EXO_SDT_FORMAT5 " %c[s5]@%[v5]"
#define EXO_SDT_FORMAT7 EXO_SDT_FORMAT6 " %c[s6]@%[v6]"

/*
 * A constant, memory or a register, wherever the value is already. clang, given the choice, copies registers to memory first; and in a shared
 * library a global's address is in memory whose name (`x@GOTPCREL`) has no meaning after linking. Elsewhere this applies only to the address of
 * a shared library's function: keep it in a variable to trace it.
 */
#if defined(__clang__) || (defined(__PIC__) && !defined(__PIE__))
#define EXO_SDT_PLACE "nr"
#else
#define EXO_SDT_PLACE "nor"
#endif
#define EXO_SDT_OPERAND(size, operand, value) [size] "n"(EXO_SDT_SIZE(value)), [operand] EXO_SDT_PLACE(EXO_SDT_VALUE(value))
#define EXO_SDT_OPERANDS1(a) EXO_SDT_OPERAND(s0, v0, a)
#define EXO_SDT_OPERANDS2(a, b) EXO_SDT_OPERANDS1(a), EXO_SDT_OPERAND(s1, v1, b)
#define EXO_SDT_OPERANDS3(a, b, c) EXO_SDT_OPERANDS2(a, b), EXO_SDT_OPERAND(s2, v2, c)
#define EXO_SDT_OPERANDS4(a, b, c, d) EXO_SDT_OPERANDS3(a, b, c), EXO_SDT_OPERAND(s3, v3, d)
#define EXO_SDT_OPERANDS5(a, b, c, d, e) EXO_SDT_OPERANDS4(a, b, c, d), EXO_SDT_OPERAND(s4, v4, e)
#define EXO_SDT_OPERANDS6(a, b, c, d, e, f) EXO_SDT_OPERANDS5(a, b, c, d, e), EXO_SDT_OPERAND(s5, v5, f)
#define EXO_SDT_OPERANDS7(a, b, c, d, e, f, g) EXO_SDT_OPERANDS6(a, b, c, d, e, f), EXO_SDT_OPERAND(s6, v6, g)

/* Tracers follow pointers: at a site with values, the program's stores must be in memory. */
#define EXO_SDT_SITE0(semaphore, prov, mod, func, name) \
	EXO_SDT_ASM(EXO_SDT_SITE_TEXT(semaphore, prov, mod, func, name, ""))
#define EXO_SDT_SITE(n, semaphore, prov, mod, func, name, ...) \
	EXO_SDT_ASM(EXO_SDT_SITE_TEXT(semaphore, prov, mod, func, name, EXO_SDT_FORMAT##n) : : EXO_SDT_OPERANDS##n(__VA_ARGS__) : "memory")

/* A site of an undeclared probe does not compile. */
#define EXO_SDT_KNOWN(probe) (void)sizeof(&probe)

#define SDT_PROBE0(prov, mod, func, name) \
	do { \
		EXO_SDT_KNOWN(sdt_##prov##_##mod##_##func##_##name); \
		EXO_SDT_SITE0(EXO_SDT_SEMAPHORE(sdt_##prov##_##mod##_##func##_##name), #prov, #mod, #func, #name); \
	} while (0)
#define SDT_PROBE1(prov, mod, func, name, arg0) \
	do { \
		EXO_SDT_KNOWN(sdt_##prov##_##mod##_##func##_##name); \
		EXO_SDT_SITE(1, EXO_SDT_SEMAPHORE(sdt_##prov##_##mod##_##func##_##name), #prov, #mod, #func, #name, arg0); \
	} while (0)
#define SDT_PROBE2(prov, mod, func, name, arg0, arg1) \
	do { \
		EXO_SDT_KNOWN(sdt_##prov##_##mod##_##func##_##name); \
		EXO_SDT_SITE(2, EXO_SDT_SEMAPHORE(sdt_##prov##_##mod##_##func##_##name), #prov, #mod, #func, #name, arg0, arg1); \
	} while (0)
#define SDT_PROBE3(prov, mod, func, name, arg0, arg1, arg2) \
	do { \
		EXO_SDT_KNOWN(sdt_##prov##_##mod##_##func##_##name); \
		EXO_SDT_SITE(3, EXO_SDT_SEMAPHORE(sdt_##prov##_##mod##_##func##_##name), #prov, #mod, #func, #name, arg0, arg1, arg2); \
	} while (0)
#define SDT_PROBE4(prov, mod, func, name, arg0, arg1, arg2, arg3) \
	do { \
		EXO_SDT_KNOWN(sdt_##prov##_##mod##_##func##_##name); \
		EXO_SDT_SITE(4, EXO_SDT_SEMAPHORE(sdt_##prov##_##mod##_##func##_##name), #prov, #mod, #func, #name, arg0, arg1, arg2, arg3); \
	} while (0)
#define SDT_PROBE5(prov, mod, func, name, arg0, arg1, arg2, arg3, arg4) \
	do { \
		EXO_SDT_KNOWN(sdt_##prov##_##mod##_##func##_##name); \
		EXO_SDT_SITE(5, EXO_SDT_SEMAPHORE(sdt_##prov##_##mod##_##func##_##name), #prov, #mod, #func, #name, arg0, arg1, arg2, arg3, arg4); \
	} while (0)
#define SDT_PROBE6(prov, mod, func, name, arg0, arg1, arg2, arg3, arg4, arg5) \
	do { \
		EXO_SDT_KNOWN(sdt_##prov##_##mod##_##func##_##name); \
		EXO_SDT_SITE(6, EXO_SDT_SEMAPHORE(sdt_##prov##_##mod##_##func##_##name), #prov, #mod, #func, #name, arg0, arg1, arg2, arg3, arg4, arg5); \
	} while (0)
#define SDT_PROBE7(prov, mod, func, name, arg0, arg1, arg2, arg3, arg4, arg5, arg6) \
	do { \
		EXO_SDT_KNOWN(sdt_##prov##_##mod##_##func##_##name); \
		EXO_SDT_SITE(7, EXO_SDT_SEMAPHORE(sdt_##prov##_##mod##_##func##_##name), #prov, #mod, #func, #name, arg0, arg1, arg2, arg3, arg4, arg5, arg6); \
	} while (0)

/* <sys/sdt.h> has the same names for the same use. */
#ifndef DTRACE_PROBE
#define DTRACE_PROBE(prov, name) \
	do { \
		EXO_SDT_SITE0("0", #prov, "", "", #name); \
	} while (0)
#define DTRACE_PROBE1(prov, name, arg0) \
	do { \
		EXO_SDT_SITE(1, "0", #prov, "", "", #name, arg0); \
	} while (0)
#define DTRACE_PROBE2(prov, name, arg0, arg1) \
	do { \
		EXO_SDT_SITE(2, "0", #prov, "", "", #name, arg0, arg1); \
	} while (0)
#define DTRACE_PROBE3(prov, name, arg0, arg1, arg2) \
	do { \
		EXO_SDT_SITE(3, "0", #prov, "", "", #name, arg0, arg1, arg2); \
	} while (0)
#define DTRACE_PROBE4(prov, name, arg0, arg1, arg2, arg3) \
	do { \
		EXO_SDT_SITE(4, "0", #prov, "", "", #name, arg0, arg1, arg2, arg3); \
	} while (0)
#define DTRACE_PROBE5(prov, name, arg0, arg1, arg2, arg3, arg4) \
	do { \
		EXO_SDT_SITE(5, "0", #prov, "", "", #name, arg0, arg1, arg2, arg3, arg4); \
	} while (0)
#define DTRACE_PROBE6(prov, name, arg0, arg1, arg2, arg3, arg4, arg5) \
	do { \
		EXO_SDT_SITE(6, "0", #prov, "", "", #name, arg0, arg1, arg2, arg3, arg4, arg5); \
	} while (0)
#define DTRACE_PROBE7(prov, name, arg0, arg1, arg2, arg3, arg4, arg5, arg6) \
	do { \
		EXO_SDT_SITE(7, "0", #prov, "", "", #name, arg0, arg1, arg2, arg3, arg4, arg5, arg6); \
	} while (0)
#endif

#endif
