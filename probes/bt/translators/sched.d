/*
 * Threads and CPUs, as D's sched provider shows them: lwpsinfo_t and cpuinfo_t, from the kernel's structure of a thread.
 */
typedef struct lwpsinfo {
	int32_t pr_lwpid;	/* the thread's number; of a process's first thread the process's */
	uint32_t pr_flag;	/* PF_ flags of <linux/sched.h> */
	int32_t pr_pri;		/* 0 to 99 for real time, 100 to 139 otherwise; less runs first */
	int32_t pr_nice;	/* -20 to 19 */
	uint8_t pr_state;	/* 1 sleeps, 2 could run, 3 has ended, 4 is stopped or traced, 6 runs */
	uint8_t pr_sname;	/* the same as a letter: S, R, Z, T, O */
	uint16_t pr_onpro;	/* the CPU it runs on, or ran on last */
	uintptr_t pr_addr;	/* the structure */
	char pr_name[16];
} lwpsinfo_t;

typedef struct cpuinfo {
	uint32_t cpu_id;
} cpuinfo_t;

/* 0xc is __TASK_STOPPED and __TASK_TRACED. 120 is DEFAULT_PRIO, that of nice 0. */
translator lwpsinfo_t < struct task_struct *t > {
	pr_lwpid = t->pid;
	pr_flag = t->flags;
	pr_pri = t->prio;
	pr_nice = t->static_prio - 120;
	pr_state = t->on_cpu ? 6 : t->exit_state ? 3 : t->__state == 0 ? 2 : t->__state & 0xc ? 4 : 1;
	pr_sname = t->on_cpu ? 79 : t->exit_state ? 90 : t->__state == 0 ? 82 : t->__state & 0xc ? 84 : 83;
	pr_onpro = t->thread_info.cpu;
	pr_addr = (uint64_t)t;
	pr_name = t->comm;
};

translator cpuinfo_t < struct task_struct *t > {
	cpu_id = t->thread_info.cpu;
};
