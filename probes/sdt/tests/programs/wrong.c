/* Errors that must not compile: one line each. */
#include <exotrace/sdt.h>

SDT_PROVIDER_DEFINE(wrong);
SDT_PROBE_DEFINE1(wrong, , , defined, "int");

#if CASE == 1
SDT_PROBE_DEFINE0(worng, , , provider_misspelt);
#elif CASE == 2
void site(void) { SDT_PROBE1(wrong, , , defnied, 1); }
#elif CASE == 3
SDT_PROBE_DEFINE3(wrong, , , two_types_for_three, "int");
#elif CASE == 4
void site(double a) { SDT_PROBE1(wrong, , , defined, a); }
#elif CASE == 5
void site(__int128 a) { SDT_PROBE1(wrong, , , defined, a); }
#elif CASE == 6
SDT_PROBE_DEFINE0(wrong, , , a234567890123456789012345678901234567890123456789012345678901234);
#elif CASE == 7
void site(void) { (void)SDT_PROBE_ENABLED(wrong, , , defnied); }
#endif

int main(void) { SDT_PROBE1(wrong, , , defined, 1); return 0; }
