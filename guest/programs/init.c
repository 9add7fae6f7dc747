/* init: the first process. Mounts the usual file systems and prints `exotrace: ready`. Runs the
 * program named after `--` on the kernel command line (`-- PROGRAM [ARGUMENT]...`, from /bin), or
 * else a shell, on the serial port, and resets when that ends.
 *
 * It reads /proc/cmdline for that: its own arguments also have every word that the kernel does not
 * know, such as `noxsave`. */
#include "guest.h"

enum {
	CMDLINE = 2048, WORDS = 64,
	REBOOT_MAGIC1 = (int)0xfee1dead, REBOOT_MAGIC2 = 672274793, REBOOT_RESTART = 0x1234567,
};

static void mount_all(void)
{
	static const char *const mounts[][2] = {
		{ "proc", "/proc" }, { "sysfs", "/sys" }, { "devtmpfs", "/dev" }, { "tmpfs", "/tmp" },
	};

	for (unsigned i = 0; i < sizeof(mounts) / sizeof(mounts[0]); i++) {
		if (syscall5(SYS_mount, (long)mounts[i][0], (long)mounts[i][1], (long)mounts[i][0], 0, 0))
			print("exotrace: cannot mount ", mounts[i][1], "\n");
	}
}

/* Joins base and name into path; 0 if that is too long. */
static int join(char *path, unsigned long room, const char *base, const char *name)
{
	unsigned long b = length(base), n = length(name);

	if (b + n >= room)
		return 0;
	memcpy(path, base, b);
	memcpy(path + b, name, n + 1);
	return 1;
}

/* Links ports of a virtio-console by their names in /dev/virtio-ports, as udev does. */
static void link_ports(void)
{
	static const char class[] = "/sys/class/virtio-ports/", folder[] = "/dev/virtio-ports/";
	static char entries[2048];
	long fd = syscall2(SYS_open, class, O_RDONLY);
	long got = fd < 0 ? 0 : syscall3(SYS_getdents64, fd, entries, sizeof(entries));
	int made = 0;

	/* struct linux_dirent64: inode, offset, its own length, type, name */
	for (long at = 0; at + 19 < got; at += *(unsigned short *)(entries + at + 16)) {
		const char *entry = entries + at + 19;
		char path[128], name[80], link[128], target[80];
		long file, n;

		if (entry[0] == '.' || !join(path, sizeof(path), class, entry))
			continue;
		n = length(path);
		if (!join(path + n, sizeof(path) - n, "/name", ""))
			continue;
		file = syscall2(SYS_open, path, O_RDONLY);
		if (file < 0)
			continue;
		n = syscall3(SYS_read, file, name, sizeof(name) - 1);
		syscall1(SYS_close, file);
		/* The name ends with a newline; a port without one is read as "(null)". */
		if (n < 2 || name[0] == '(')
			continue;
		name[n - 1] = 0;
		if (!join(link, sizeof(link), folder, name) || !join(target, sizeof(target), "../", entry))
			continue;
		if (!made++)
			syscall2(SYS_mkdir, "/dev/virtio-ports", 0755);
		syscall2(SYS_symlink, target, link);
	}
	if (fd >= 0)
		syscall1(SYS_close, fd);
}

/* In a session of its own the first terminal opened becomes the controlling one: Ctrl-C then works.
 */
static void take_terminal(void)
{
	long fd;

	syscall0(SYS_setsid);
	fd = syscall2(SYS_open, "/dev/ttyS0", O_RDWR);
	if (fd < 0)
		return;
	for (int i = 0; i < 3; i++)
		syscall2(SYS_dup2, fd, i);
	if (fd > 2)
		syscall1(SYS_close, fd);
}

/* Splits the words after `--` in /proc/cmdline into words, NULL-terminated; none if there is no
 * `--`. */
static int wanted(char *line, char **words)
{
	long fd = syscall2(SYS_open, "/proc/cmdline", O_RDONLY);
	long got = fd < 0 ? 0 : syscall3(SYS_read, fd, line, CMDLINE - 1);
	int n = 0, behind = 0;
	char *at = line;

	syscall1(SYS_close, fd);
	line[got > 0 ? got : 0] = 0;
	while (n < WORDS - 1) {
		char *start;

		while (*at == ' ' || *at == '\n')
			at++;
		if (!*at)
			break;
		start = at;
		while (*at && *at != ' ' && *at != '\n')
			at++;
		if (*at)
			*at++ = 0;
		if (behind)
			words[n++] = start;
		else
			behind = start[0] == '-' && start[1] == '-' && !start[2];
	}
	words[n] = 0;
	return n;
}

static void run(char **argv, char **envp)
{
	static const char directory[] = "/bin/";
	char path[128];
	unsigned long n = length(argv[0]);

	take_terminal();
	if (n < sizeof(path) - sizeof(directory)) {
		memcpy(path, directory, sizeof(directory) - 1);
		memcpy(path + sizeof(directory) - 1, argv[0], n + 1);
		syscall3(SYS_execve, path, argv, envp);
	}
	quit(127);
}

int program(int argc, char **argv, char **envp)
{
	static char line[CMDLINE];
	static char *words[WORDS];
	char *shell[] = { "sh", 0 };
	char **target;
	char digits[DIGITS];
	int status = 0;
	long child;

	(void)argc, (void)argv;
	mount_all();
	link_ports();
	target = wanted(line, words) ? words : shell;
	print("exotrace: ready\n");
	child = syscall0(SYS_fork);
	if (child == 0)
		run(target, envp);
	/* Orphans are children of init, too; an error means that there is no child at all. */
	for (;;) {
		long ended = syscall5(SYS_wait4, -1, (long)&status, 0, 0, 0);

		if (ended == child || ended < 0)
			break;
	}
	status = status & 0x7f ? 128 + (status & 0x7f) : status >> 8 & 0xff;
	print("exotrace: ", target[0], " ended with status ", decimal(status, digits), "\n");
	syscall0(SYS_sync);
	syscall3(SYS_reboot, REBOOT_MAGIC1, REBOOT_MAGIC2, REBOOT_RESTART);
	return 1;
}
