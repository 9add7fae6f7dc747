/*
 * A client of dt(4): reads of the guest's programs, as they enter and leave read(2).
 *
 *     gcc -o example example.c dtclient.c && ./example SOCKET
 *
 * With -DDT_OLD_ABI it speaks the older layout. It lists the probes, enables the entry and the return of read, records until it has 16
 * events, prints them with the counts, and looks up the file behind an address of the last reader.
 */
#include "dtclient.h"

#include <err.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EVENTS 16

static uint32_t
find(const struct dtioc_probe_info *list, size_t count, const char *prov, const char *func, const char *name)
{
	for (size_t i = 0; i < count; i++)
		if (strcmp(list[i].dtpi_prov, prov) == 0 && strcmp(list[i].dtpi_func, func) == 0 &&
		    strcmp(list[i].dtpi_name, name) == 0)
			return list[i].dtpi_pbn;
	errx(1, "no probe %s:%s:%s", prov, func, name);
}

static void
enable(int device, uint32_t probe, uint64_t flags)
{
	struct dtioc_req req = { 0 };
	char why[256];

	req.dtrq_pbn = probe;
	req.dtrq_evtflags = flags;
	if (dt_ioctl(device, DTIOCPRBENABLE, &req) == -1) {
		int error = errno;

		if (dt_text(device, DT_REASON, 0, why, sizeof(why)) == -1)
			why[0] = '\0';
		errx(1, "probe %u: %s (%s)", probe, strerror(error), why);
	}
}

/* Finds the file that process `pid` has mapped at `address`, and reads its first bytes. */
static void
resolve(int device, pid_t pid, unsigned long address)
{
	struct dtioc_rdvn found = { 0 };
	char start[4] = { 0 };

	found.dtrv_pid = pid;
	found.dtrv_va = (caddr_t)address;
	if (dt_ioctl(device, DTIOCRDVNODE, &found) == -1) {
		printf("resolved %lx of %d: %s\n", address, pid, strerror(errno));
		return;
	}
	if (pread(found.dtrv_fd, start, sizeof(start), 0) != sizeof(start))
		err(1, "the file of %d", pid);
	printf("resolved %lx of %d: start %lx offset %lx length %zu elf %d\n", address, pid,
	    (unsigned long)found.dtrv_start, (unsigned long)found.dtrv_offset, found.dtrv_len,
	    memcmp(start, "\177ELF", 4) == 0);
	close(found.dtrv_fd);
}

int
main(int argc, char **argv)
{
	struct dtioc_probe list = { 0 };
	struct dtioc_stat stat;
	struct dt_evt events[EVENTS];
	uint32_t entry, ret;
	int device, on = 1, off = 0, have = 0;
	char name[128];

	if (argc != 2)
		errx(2, "usage: example SOCKET");
	device = dt_open(argv[1], DT_ABI, 0);
	if (device == -1)
		err(1, "%s", argv[1]);
	if (dt_ioctl(device, DTIOCGPLIST, &list) == -1)
		err(1, "DTIOCGPLIST");
	list.dtpr_probes = calloc(1, list.dtpr_size);
	if (list.dtpr_probes == NULL || dt_ioctl(device, DTIOCGPLIST, &list) == -1)
		err(1, "DTIOCGPLIST");
	size_t count = list.dtpr_size / sizeof(*list.dtpr_probes);
	printf("probes %zu\n", count);
	entry = find(list.dtpr_probes, count, "syscall", "read", "entry");
	ret = find(list.dtpr_probes, count, "syscall", "read", "return");
	if (dt_text(device, DT_NAME, entry, name, sizeof(name)) == -1)
		err(1, "the name of %u", entry);
	printf("tracing %s\n", name);
	fflush(stdout);

	enable(device, entry, DTEVT_EXECNAME | DTEVT_FUNCARGS | DTEVT_USTACK | DTEVT_KSTACK);
	enable(device, ret, DTEVT_EXECNAME);
	if (dt_ioctl(device, DTIOCRECORD, &on) == -1)
		err(1, "DTIOCRECORD");
	printf("recording\n");
	fflush(stdout);
	while (have < EVENTS) {
		ssize_t got = dt_read(device, &events[have], (EVENTS - have) * sizeof(events[0]));

		if (got == -1)
			err(1, "read");
		have += got / sizeof(events[0]);
	}
	if (dt_ioctl(device, DTIOCRECORD, &off) == -1)
		err(1, "DTIOCRECORD");
	for (int i = 0; i < have; i++) {
		struct dt_evt *e = &events[i];

		if (e->dtev_pbn == entry)
			printf("entry %d %d %s fd %lld size %lld kstack %u\n", e->dtev_pid, e->dtev_tid, e->dtev_comm,
			    (long long)e->dtev_args[0], (long long)e->dtev_args[2], e->dtev_kstack.st_count);
		else
			printf("return %d %d %s value %lld error %d\n", e->dtev_pid, e->dtev_tid, e->dtev_comm,
			    (long long)e->dtev_retval[0], e->dtev_error);
	}
	if (dt_ioctl(device, DTIOCGSTATS, &stat) == -1)
		err(1, "DTIOCGSTATS");
	printf("stats %llu read %llu dropped\n", (unsigned long long)stat.dtst_readevt,
	    (unsigned long long)stat.dtst_dropevt);
#ifndef DT_OLD_ABI
	for (int i = have - 1; i >= 0; i--)
		if (events[i].dtev_pbn == entry && events[i].dtev_ustack.st_count > 0) {
			resolve(device, events[i].dtev_pid, events[i].dtev_ustack.st_pc[0]);
			break;
		}
#endif
	resolve(device, 1 << 21, 0x1000);
	free(list.dtpr_probes);
	return dt_close(device) == -1;
}
