/*
 * icmp [COUNT]: a program with probes. Makes COUNT (10) ICMP headers of type 3, Destination Unreachable, with codes 0 to 15 in turn, and passes
 * each to two probes:
 *
 *	icmp::unreach:pkt-receive	struct icmp *, and the number of those before
 *	icmp:::receive			struct icmp *, which scripts see as struct icmp_hdr_dt *
 *
 * Prints `icmp: COUNT packets`.
 *
 *	cc -O2 -g -I../include -o icmp icmp.c
 */
#include <exotrace/sdt.h>
#include <stdio.h>
#include <stdlib.h>

/* RFC 792, with the field names of BSD; in network byte order. */
struct icmp {
	unsigned char icmp_type;
	unsigned char icmp_code;
	unsigned short icmp_cksum;
	unsigned short icmp_id;
	unsigned short icmp_seq;
};

SDT_PROVIDER_DEFINE(icmp);
/* The form of 2013, with the name as scripts write it. */
SDT_PROBE_DEFINE2(icmp, , unreach, pkt_receive, pkt-receive, "struct icmp *", "unsigned long");
/* The current form: no name for scripts, since it has no dash. */
SDT_PROBE_DEFINE1_XLATE(icmp, , , receive, "struct icmp *", "struct icmp_hdr_dt *");

static __attribute__((noinline)) void unreach(struct icmp *packet, unsigned long before)
{
	SDT_PROBE2(icmp, , unreach, pkt_receive, packet, before);
}

static __attribute__((noinline)) void receive(struct icmp *packet)
{
	SDT_PROBE1(icmp, , , receive, packet);
}

int main(int argc, char **argv)
{
	unsigned long count = argc > 1 ? strtoul(argv[1], NULL, 10) : 10;

	for (unsigned long i = 0; i < count; i++) {
		struct icmp packet = {
			.icmp_type = 3, .icmp_code = i % 16, .icmp_id = __builtin_bswap16(7),
			.icmp_seq = __builtin_bswap16((unsigned short)i)
		};

		receive(&packet);
		unreach(&packet, i);
	}
	printf("icmp: %lu packets\n", count);
	return 0;
}
