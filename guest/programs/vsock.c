/* vsock listen PORT: takes connections of the host to this port, one after the other. vsock connect
 * PORT: connects to this port of the host. Both send back what they get, until the other side has
 * sent all. At the end of each connection they print `vsock: N bytes`, or `vsock: error N`. */
#include "guest.h"

enum { SYS_socket = 41, SYS_connect = 42, SYS_accept = 43, SYS_bind = 49, SYS_listen = 50, SYS_shutdown = 48 };
enum { AF_VSOCK = 40, SOCK_STREAM = 1, SHUT_WR = 1, ANY_CID = -1, HOST_CID = 2 };

/* struct sockaddr_vm */
struct address {
	unsigned short family, reserved;
	unsigned int port, cid, zero;
};

static void tell(const char *what, long count, const char *unit)
{
	char digits[DIGITS];

	print("vsock: ", what, decimal(count, digits), unit, "\n");
}

/* Sends back what comes. Returns the number of bytes, or an error. */
static long echo(long fd)
{
	static char buffer[16384];
	long all = 0, n;

	while ((n = syscall3(SYS_read, fd, buffer, sizeof(buffer))) > 0) {
		for (long done = 0, now; done < n; done += now) {
			now = syscall3(SYS_write, fd, buffer + done, n - done);
			if (now < 0)
				return now;
		}
		all += n;
	}
	if (!n)
		syscall2(SYS_shutdown, fd, SHUT_WR);
	return n < 0 ? n : all;
}

static long end(long fd, long result)
{
	if (result < 0)
		tell("error ", -result, "");
	else
		tell("", result, " bytes");
	if (fd >= 0)
		syscall1(SYS_close, fd);
	return result;
}

int program(int argc, char **argv, char **envp)
{
	struct address address = { AF_VSOCK, 0, argc > 2 ? number(argv[2], 0) : 0, HOST_CID, 0 };
	long fd = syscall3(SYS_socket, AF_VSOCK, SOCK_STREAM, 0), result;

	(void)envp;
	if (argc != 3)
		return 2;
	if (argv[1][0] == 'c') {
		result = syscall3(SYS_connect, fd, &address, sizeof(address));
		return end(fd, result < 0 ? result : echo(fd)) < 0;
	}
	address.cid = ANY_CID;
	result = syscall3(SYS_bind, fd, &address, sizeof(address));
	if (result >= 0)
		result = syscall2(SYS_listen, fd, 8);
	if (result < 0)
		return end(fd, result) < 0;
	tell("listens on ", address.port, "");
	for (;;) {
		long client = syscall3(SYS_accept, fd, 0, 0);

		end(client, client < 0 ? client : echo(client));
		if (client < 0)
			return 1;
	}
}
