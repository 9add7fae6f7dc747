/*
 * Packets, as D's ip provider shows them: pktinfo_t, ipinfo_t, ifinfo_t, ipv4info_t and ipv6info_t, from the kernel's structures for a
 * packet, a device and the two headers. From a packet, the header is the one at its network header: valid from ip_rcv and ip6_rcv on the way
 * in, from __ip_local_out on the way out.
 *
 * Numbers are in the byte order of the machine, addresses are text.
 */
typedef struct pktinfo {
	uintptr_t pkt_addr;	/* the packet's structure: the same packet has the same from probe to probe */
} pktinfo_t;

typedef struct csinfo {
	uintptr_t cs_addr;	/* the socket */
} csinfo_t;

typedef struct ifinfo {
	char if_name[16];
	uintptr_t if_addr;	/* the device's structure */
	int32_t if_index;
	uint32_t if_mtu;
} ifinfo_t;

typedef struct ipinfo {
	uint8_t ip_ver;		/* 4 or 6 */
	uint16_t ip_plength;	/* bytes behind the header */
	string ip_saddr;
	string ip_daddr;
} ipinfo_t;

typedef struct ipv4info {
	uint8_t ipv4_ver;
	uint8_t ipv4_ihl;	/* bytes of the header, options included */
	uint8_t ipv4_tos;
	uint16_t ipv4_length;	/* header included */
	uint16_t ipv4_ident;
	uint8_t ipv4_flags;	/* 1 more fragments, 2 do not fragment */
	uint16_t ipv4_offset;	/* of a fragment, in bytes */
	uint8_t ipv4_ttl;
	uint8_t ipv4_protocol;	/* 1 ICMP, 6 TCP, 17 UDP */
	uint16_t ipv4_checksum;
	string ipv4_saddr;
	string ipv4_daddr;
} ipv4info_t;

typedef struct ipv6info {
	uint8_t ipv6_ver;
	uint16_t ipv6_plen;	/* bytes behind the header */
	uint8_t ipv6_nexthdr;	/* 6 TCP, 17 UDP, 58 ICMPv6 */
	uint8_t ipv6_hlim;
	string ipv6_saddr;
	string ipv6_daddr;
} ipv6info_t;

translator pktinfo_t < struct sk_buff *p > {
	pkt_addr = (uint64_t)p;
};

translator csinfo_t < struct sock *s > {
	cs_addr = (uint64_t)s;
};

translator ifinfo_t < struct net_device *d > {
	if_name = d == 0 ? "" : str(d->name);
	if_addr = (uint64_t)d;
	if_index = d == 0 ? 0 : d->ifindex;
	if_mtu = d == 0 ? 0 : d->mtu;
};

/* The first half byte of either header is the version, the second of IPv4's its length in words. */
translator ipinfo_t < struct iphdr *h > {
	ip_ver = *(uint8_t *)h >> 4;
	ip_plength = ntohs(h->tot_len) - ((*(uint8_t *)h & 15) << 2);
	ip_saddr = ntop(2, h->saddr);
	ip_daddr = ntop(2, h->daddr);
};

translator ipinfo_t < struct ipv6hdr *h > {
	ip_ver = *(uint8_t *)h >> 4;
	ip_plength = ntohs(h->payload_len);
	ip_saddr = ntop(10, h->saddr.in6_u.u6_addr8);
	ip_daddr = ntop(10, h->daddr.in6_u.u6_addr8);
};

translator ipinfo_t < struct sk_buff *p > {
	ip_ver = *(uint8_t *)(p->head + p->network_header) >> 4;
	ip_plength = *(uint8_t *)(p->head + p->network_header) >> 4 == 4
		? ntohs(((struct iphdr *)(p->head + p->network_header))->tot_len) - ((*(uint8_t *)(p->head + p->network_header) & 15) << 2)
		: ntohs(((struct ipv6hdr *)(p->head + p->network_header))->payload_len);
	ip_saddr = *(uint8_t *)(p->head + p->network_header) >> 4 == 4
		? ntop(2, ((struct iphdr *)(p->head + p->network_header))->saddr)
		: ntop(10, ((struct ipv6hdr *)(p->head + p->network_header))->saddr.in6_u.u6_addr8);
	ip_daddr = *(uint8_t *)(p->head + p->network_header) >> 4 == 4
		? ntop(2, ((struct iphdr *)(p->head + p->network_header))->daddr)
		: ntop(10, ((struct ipv6hdr *)(p->head + p->network_header))->daddr.in6_u.u6_addr8);
};

translator ipv4info_t < struct iphdr *h > {
	ipv4_ver = *(uint8_t *)h >> 4;
	ipv4_ihl = (*(uint8_t *)h & 15) << 2;
	ipv4_tos = h->tos;
	ipv4_length = ntohs(h->tot_len);
	ipv4_ident = ntohs(h->id);
	ipv4_flags = ntohs(h->frag_off) >> 13;
	ipv4_offset = (ntohs(h->frag_off) & 0x1fff) << 3;
	ipv4_ttl = h->ttl;
	ipv4_protocol = h->protocol;
	ipv4_checksum = ntohs(h->check);
	ipv4_saddr = ntop(2, h->saddr);
	ipv4_daddr = ntop(2, h->daddr);
};

translator ipv6info_t < struct ipv6hdr *h > {
	ipv6_ver = *(uint8_t *)h >> 4;
	ipv6_plen = ntohs(h->payload_len);
	ipv6_nexthdr = h->nexthdr;
	ipv6_hlim = h->hop_limit;
	ipv6_saddr = ntop(10, h->saddr.in6_u.u6_addr8);
	ipv6_daddr = ntop(10, h->daddr.in6_u.u6_addr8);
};
