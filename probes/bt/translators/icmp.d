/*
 * ICMP headers (RFC 792), the same on all systems. SDT(9) uses this structure as its example.
 *
 * Numbers are in the byte order of the machine.
 */
struct icmp_hdr_dt {
	uint8_t icmp_type;	/* 0 echo reply, 3 unreachable, 5 redirect, 8 echo, 11 time exceeded */
	uint8_t icmp_code;
	uint16_t icmp_cksum;
	uint16_t icmp_id;	/* of echo and its reply */
	uint16_t icmp_seq;	/* the same */
	uint32_t icmp_gateway;	/* of a redirect */
	uint16_t icmp_mtu;	/* of unreachable, code 4: what would fit */
};

/* Linux: <linux/icmp.h>. */
translator struct icmp_hdr_dt < struct icmphdr *p > {
	icmp_type = p->type;
	icmp_code = p->code;
	icmp_cksum = ntohs(p->checksum);
	icmp_id = ntohs(p->un.echo.id);
	icmp_seq = ntohs(p->un.echo.sequence);
	icmp_gateway = ntohl(p->un.gateway);
	icmp_mtu = ntohs(p->un.frag.mtu);
};

/* Linux: a packet whose transport header has been found. */
translator struct icmp_hdr_dt < struct sk_buff *p > {
	icmp_type = ((struct icmphdr *)(p->head + p->transport_header))->type;
	icmp_code = ((struct icmphdr *)(p->head + p->transport_header))->code;
	icmp_cksum = ntohs(((struct icmphdr *)(p->head + p->transport_header))->checksum);
	icmp_id = ntohs(((struct icmphdr *)(p->head + p->transport_header))->un.echo.id);
	icmp_seq = ntohs(((struct icmphdr *)(p->head + p->transport_header))->un.echo.sequence);
	icmp_gateway = ntohl(((struct icmphdr *)(p->head + p->transport_header))->un.gateway);
	icmp_mtu = ntohs(((struct icmphdr *)(p->head + p->transport_header))->un.frag.mtu);
};

/* Programs with the names of BSD, such as the example program icmp. What follows the first four members differs, and is left out. */
struct icmp {
	uint8_t icmp_type;
	uint8_t icmp_code;
	uint16_t icmp_cksum;
	uint16_t icmp_id;
	uint16_t icmp_seq;
};

translator struct icmp_hdr_dt < struct icmp *p > {
	icmp_type = p->icmp_type;
	icmp_code = p->icmp_code;
	icmp_cksum = ntohs(p->icmp_cksum);
	icmp_id = ntohs(p->icmp_id);
	icmp_seq = ntohs(p->icmp_seq);
};
