/*
 * Processes, as D's proc provider shows them: psinfo_t, from the kernel's structure of any thread of the process.
 *
 * Numbers are those of the first namespace.
 */
typedef struct psinfo {
	int32_t pr_pid;
	int32_t pr_ppid;	/* the parent's */
	int32_t pr_pgid;	/* the process group's */
	int32_t pr_sid;		/* the session's */
	int32_t pr_nlwp;	/* threads */
	uint32_t pr_uid;
	uint32_t pr_euid;
	uint32_t pr_gid;
	uint32_t pr_egid;
	uintptr_t pr_addr;	/* the structure */
	char pr_fname[16];	/* the first thread's name: the program's file, unless it has changed it */
	string pr_psargs;	/* the first argument: of the process that runs only, "" of kernel threads */
} psinfo_t;

/* pids is by enum pid_type: 2 process group, 3 session. 0x200000 is PF_KTHREAD. */
translator psinfo_t < struct task_struct *t > {
	pr_pid = t->tgid;
	pr_ppid = t->real_parent->tgid;
	pr_pgid = t->signal->pids[2]->numbers[0].nr;
	pr_sid = t->signal->pids[3]->numbers[0].nr;
	pr_nlwp = t->signal->nr_threads;
	pr_uid = t->real_cred->uid.val;
	pr_euid = t->real_cred->euid.val;
	pr_gid = t->real_cred->gid.val;
	pr_egid = t->real_cred->egid.val;
	pr_addr = (uint64_t)t->group_leader;
	pr_fname = t->group_leader->comm;
	pr_psargs = t->flags & 0x200000 || t->mm == 0 ? "" : str(t->mm->arg_start);
};
