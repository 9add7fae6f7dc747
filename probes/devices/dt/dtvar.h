/*
 * The structures and requests of the device dt(4), as OpenBSD/amd64 lays them out.
 *
 * Names and layouts are OpenBSD's. A program that was written for it needs only another way to open the
 * device (dtclient.h). There are two layouts: today's, and with DT_OLD_ABI defined that of the manual page with
 * struct dt_filter, to about 2024. dt_open() takes the layout.
 */
#ifndef EXOTRACE_DTVAR_H
#define EXOTRACE_DTVAR_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define DTNAMESIZE 16	  /* a name, its NUL included */
#define DTMAXCOMLEN 24	  /* a program's name, its NUL included */
#define DTMAXFUNCARGS 10  /* arguments of an event */
#define DTMAXARGTYPES 5	  /* arguments with known types */
#define STACKTRACE_MAX 19 /* frames of a stack */

/* The recorded values of a hit (dtrq_evtflags). */
#define DTEVT_EXECNAME (1 << 0) /* name of the program */
#define DTEVT_USTACK (1 << 1)	/* stack of the program */
#define DTEVT_KSTACK (1 << 2)	/* stack of the kernel */
#define DTEVT_FUNCARGS (1 << 3) /* arguments */

struct stacktrace {
	unsigned int st_count;
	unsigned long st_pc[STACKTRACE_MAX];
};

/* The event of one hit; members that were not requested are 0. */
struct dt_evt {
	unsigned int dtev_pbn;	  /* number of the probe */
	unsigned int dtev_cpu;	  /* where */
	pid_t dtev_pid;		  /* in which process */
	pid_t dtev_tid;		  /* in which thread */
	struct timespec dtev_tsp; /* when, UTC */
	struct stacktrace dtev_kstack;
#ifndef DT_OLD_ABI
	struct stacktrace dtev_ustack;
#endif
	char dtev_comm[DTMAXCOMLEN];
	union {
		int64_t E_entry[DTMAXFUNCARGS];
		struct {
			int64_t __retval[2];
			int __error; /* 0, or the guest's errno */
		} E_return;
	} _args;
#define dtev_args _args.E_entry
#define dtev_retval _args.E_return.__retval
#define dtev_error _args.E_return.__error
};

#ifdef DT_OLD_ABI
/* The condition on which hits are recorded. */
struct dt_filter {
	enum dt_operand { DT_OP_NONE = 0, DT_OP_EQ, DT_OP_NE } dtf_operand;
	enum dt_filtervar { DT_FV_NONE = 0, DT_FV_PID, DT_FV_TID } dtf_variable;
	unsigned int dtf_value;
};
#endif

struct dtioc_probe_info {
	uint32_t dtpi_pbn; /* from 1 */
	uint8_t dtpi_nargs;
	char dtpi_prov[DTNAMESIZE];
	char dtpi_func[DTNAMESIZE];
	char dtpi_name[DTNAMESIZE];
};

struct dtioc_probe {
	size_t dtpr_size; /* bytes at dtpr_probes; 0 asks for their number */
	struct dtioc_probe_info *dtpr_probes;
};

struct dtioc_arg_info {
	uint32_t dtai_pbn;
	uint8_t dtai_argn;
	char dtai_argtype[DTNAMESIZE];
};

struct dtioc_arg {
	uint32_t dtar_pbn;
	size_t dtar_size; /* bytes at dtar_args; 0 asks for their number */
	struct dtioc_arg_info *dtar_args;
};

struct dtioc_req {
	uint32_t dtrq_pbn;
#ifdef DT_OLD_ABI
	struct dt_filter dtrq_filter;
	uint32_t dtrq_rate; /* times a second, of profile and interval */
	uint64_t dtrq_evtflags;
#else
	uint32_t __unused1;
	uint64_t dtrq_evtflags;
	uint64_t dtrq_nsecs; /* time between two ticks, of profile and interval */
#endif
};

struct dtioc_stat {
	uint64_t dtst_readevt; /* read */
	uint64_t dtst_dropevt; /* lost to a full ring */
#ifndef DT_OLD_ABI
	uint64_t dtst_skiptick; /* ticks that were too late for an event of their own */
	uint64_t dtst_recurevt; /* hits while recording a hit */
#endif
};

struct dtioc_rdvn {
	pid_t dtrv_pid;	      /* in: the process */
	int dtrv_fd;	      /* out: the file that it has mapped there */
	caddr_t dtrv_va;      /* in: an address in it */
	caddr_t dtrv_offset;  /* out: offset in the file of dtrv_start */
	caddr_t dtrv_start;   /* out: the start of the mapping */
	size_t dtrv_len;      /* out: bytes of the file */
};

/* Requests: direction, size and number. The system's own _IO macros pack differently. */
#define DT_IOC(direction, number, type) \
	((uint32_t)(direction) | ((uint32_t)sizeof(type) & 0x1fff) << 16 | (uint32_t)'D' << 8 | (number))
#define DT_IOC_IN 0x80000000u
#define DT_IOC_OUT 0x40000000u

#define DTIOCGPLIST DT_IOC(DT_IOC_IN | DT_IOC_OUT, 1, struct dtioc_probe)
#define DTIOCGSTATS DT_IOC(DT_IOC_OUT, 2, struct dtioc_stat)
#define DTIOCRECORD DT_IOC(DT_IOC_IN, 3, int)
#define DTIOCPRBENABLE DT_IOC(DT_IOC_IN, 4, struct dtioc_req)
#define DTIOCPRBDISABLE DT_IOC(DT_IOC_IN, 5, struct dtioc_req)
#ifndef DT_OLD_ABI
#define DTIOCGARGS DT_IOC(DT_IOC_IN | DT_IOC_OUT, 6, struct dtioc_arg)
#endif
#define DTIOCRDVNODE DT_IOC(DT_IOC_IN | DT_IOC_OUT, 8, struct dtioc_rdvn)

/* The offsets of members are part of the protocol. */
#ifdef DT_OLD_ABI
_Static_assert(sizeof(struct dt_evt) == 296, "dt_evt");
_Static_assert(offsetof(struct dt_evt, dtev_comm) == 192, "dtev_comm");
_Static_assert(offsetof(struct dt_evt, _args) == 216, "dtev_args");
_Static_assert(sizeof(struct dtioc_req) == 32, "dtioc_req");
_Static_assert(offsetof(struct dtioc_req, dtrq_rate) == 16, "dtrq_rate");
_Static_assert(offsetof(struct dtioc_req, dtrq_evtflags) == 24, "dtrq_evtflags");
_Static_assert(sizeof(struct dtioc_stat) == 16, "dtioc_stat");
_Static_assert(DTIOCGSTATS == 0x40104402u, "DTIOCGSTATS");
_Static_assert(DTIOCPRBENABLE == 0x80204404u, "DTIOCPRBENABLE");
_Static_assert(DTIOCPRBDISABLE == 0x80204405u, "DTIOCPRBDISABLE");
#else
_Static_assert(sizeof(struct dt_evt) == 456, "dt_evt");
_Static_assert(offsetof(struct dt_evt, dtev_ustack) == 192, "dtev_ustack");
_Static_assert(offsetof(struct dt_evt, dtev_comm) == 352, "dtev_comm");
_Static_assert(offsetof(struct dt_evt, _args) == 376, "dtev_args");
_Static_assert(sizeof(struct dtioc_req) == 24, "dtioc_req");
_Static_assert(offsetof(struct dtioc_req, dtrq_nsecs) == 16, "dtrq_nsecs");
_Static_assert(sizeof(struct dtioc_stat) == 32, "dtioc_stat");
_Static_assert(DTIOCGSTATS == 0x40204402u, "DTIOCGSTATS");
_Static_assert(DTIOCPRBENABLE == 0x80184404u, "DTIOCPRBENABLE");
_Static_assert(DTIOCPRBDISABLE == 0x80184405u, "DTIOCPRBDISABLE");
_Static_assert(DTIOCGARGS == 0xC0184406u, "DTIOCGARGS");
#endif
_Static_assert(offsetof(struct dt_evt, dtev_error) == offsetof(struct dt_evt, _args) + 16, "dtev_error");
_Static_assert(sizeof(struct stacktrace) == 160, "stacktrace");
_Static_assert(sizeof(struct dtioc_probe_info) == 56, "dtioc_probe_info");
_Static_assert(offsetof(struct dtioc_probe_info, dtpi_name) == 37, "dtpi_name");
_Static_assert(sizeof(struct dtioc_arg_info) == 24, "dtioc_arg_info");
_Static_assert(sizeof(struct dtioc_rdvn) == 40, "dtioc_rdvn");
_Static_assert(DTIOCGPLIST == 0xC0104401u, "DTIOCGPLIST");
_Static_assert(DTIOCRECORD == 0x80044403u, "DTIOCRECORD");
_Static_assert(DTIOCRDVNODE == 0xC0284408u, "DTIOCRDVNODE");

#endif
