/* See dtclient.h. For hosts of little endian. */
#define _GNU_SOURCE
#include "dtclient.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct answer {
	uint32_t error;
	uint32_t length;
};

/* Converts an error number of OpenBSD to this system's. */
static int
own_errno(uint32_t number)
{
	switch (number) {
	case 40:
		return EMSGSIZE;
	case 45:
		return EOPNOTSUPP;
	default:
		/* Up to 34 they are equal, except for 11, which the device does not use. */
		return number <= 34 ? (int)number : EIO;
	}
}

static int
send_all(int device, const void *bytes, size_t length)
{
	const char *at = bytes;
	ssize_t sent;

	while (length > 0) {
		sent = send(device, at, length, MSG_NOSIGNAL);
		if (sent == -1 && errno == EINTR)
			continue;
		if (sent == -1)
			return -1;
		at += sent;
		length -= sent;
	}
	return 0;
}

/* Fills `bytes`. Stores an accompanying descriptor in `descriptor`, unless that is NULL. */
static int
receive_all(int device, void *bytes, size_t length, int *descriptor)
{
	char *at = bytes;
	ssize_t received;

	while (length > 0) {
		union {
			struct cmsghdr header;
			char space[CMSG_SPACE(sizeof(int))];
		} control;
		struct iovec part = { at, length };
		struct msghdr message = { 0 };
		struct cmsghdr *header;

		message.msg_iov = &part;
		message.msg_iovlen = 1;
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		received = recvmsg(device, &message, MSG_CMSG_CLOEXEC);
		if (received == -1 && errno == EINTR)
			continue;
		if (received == -1)
			return -1;
		header = CMSG_FIRSTHDR(&message);
		if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
			int got;

			memcpy(&got, CMSG_DATA(header), sizeof(got));
			if (descriptor != NULL && *descriptor == -1)
				*descriptor = got;
			else
				close(got);
		}
		if (received == 0) {
			errno = ENXIO;
			return -1;
		}
		at += received;
		length -= received;
	}
	return 0;
}

static int
skip(int device, size_t length)
{
	char bytes[256];

	while (length > 0) {
		size_t part = length < sizeof(bytes) ? length : sizeof(bytes);

		if (receive_all(device, bytes, part, NULL) == -1)
			return -1;
		length -= part;
	}
	return 0;
}

/* Receives the rest of an answer: as many bytes as fit into `buffer`. Discards the others. */
static int
receive_rest(int device, size_t length, void *buffer, size_t size)
{
	size_t part = length < size ? length : size;

	if (receive_all(device, buffer, part, NULL) == -1)
		return -1;
	return skip(device, length - part);
}

static int
send_request(int device, uint32_t request, const void *argument, uint32_t length)
{
	uint32_t header[2] = { request, length };
	char bytes[sizeof(header) + 64];

	if (length > 64) {
		errno = EINVAL;
		return -1;
	}
	memcpy(bytes, header, sizeof(header));
	if (length > 0)
		memcpy(bytes + sizeof(header), argument, length);
	return send_all(device, bytes, sizeof(header) + length);
}

static int
ask(int device, uint32_t request, const void *argument, uint32_t length, struct answer *answer, int *descriptor)
{
	if (send_request(device, request, argument, length) == -1)
		return -1;
	return receive_all(device, answer, sizeof(*answer), descriptor);
}

int
dt_open(const char *path, unsigned int abi, unsigned int flags)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	uint32_t open[3] = { DT_MAGIC, abi, flags };
	struct answer answer;
	int device, error;

	if (strlen(path) >= sizeof(address.sun_path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	strcpy(address.sun_path, path);
	device = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (device == -1)
		return -1;
	if (connect(device, (struct sockaddr *)&address, sizeof(address)) == -1)
		goto failed;
	if (send_all(device, open, sizeof(open)) == -1 || receive_all(device, &answer, sizeof(answer), NULL) == -1)
		goto failed;
	if (answer.error != 0) {
		errno = own_errno(answer.error);
		goto failed;
	}
	if (skip(device, answer.length) == -1)
		goto failed;
	return device;
failed:
	error = errno;
	close(device);
	errno = error;
	return -1;
}

int
dt_ioctl(int device, uint32_t request, void *argument)
{
	uint32_t size = request >> 16 & 0x1fff;
	int takes = (request & DT_IOC_IN) != 0, descriptor = -1, error;
	char structure[64];
	struct answer answer;
	void *records = NULL;
	size_t room = 0;

	if (size > sizeof(structure)) {
		errno = EINVAL;
		return -1;
	}
	if (request == DTIOCGPLIST) {
		struct dtioc_probe *list = argument;

		records = list->dtpr_probes;
		room = list->dtpr_size;
	}
#ifdef DTIOCGARGS
	if (request == DTIOCGARGS) {
		struct dtioc_arg *arguments = argument;

		records = arguments->dtar_args;
		room = arguments->dtar_size;
	}
#endif
	if (ask(device, request, argument, takes ? size : 0, &answer, &descriptor) == -1)
		goto failed;
	if (answer.length > 0) {
		uint32_t first = answer.length < size ? answer.length : size;

		if (receive_all(device, structure, first, &descriptor) == -1 ||
		    receive_rest(device, answer.length - first, records, records == NULL ? 0 : room) == -1)
			goto failed;
		/* As on BSD, an argument is copied back only if the request has succeeded. */
		if (answer.error == 0)
			memcpy(argument, structure, first);
	}
	if (request == DTIOCRDVNODE && answer.error == 0)
		((struct dtioc_rdvn *)argument)->dtrv_fd = descriptor;
	else if (descriptor != -1)
		close(descriptor);
	if (answer.error != 0) {
		errno = own_errno(answer.error);
		return -1;
	}
	return 0;
failed:
	error = errno;
	if (descriptor != -1)
		close(descriptor);
	errno = error;
	return -1;
}

ssize_t
dt_read(int device, void *buffer, size_t size)
{
	uint64_t room = size;
	struct answer answer, next;
	int interrupted;
	char byte;

	if (send_request(device, DT_READ, &room, sizeof(room)) == -1)
		return -1;
	/* Only this wait is interrupted: an answer that has begun is read to its end. Another request ends the wait for the device, too. */
	interrupted = recv(device, &byte, 1, MSG_PEEK) == -1 && errno == EINTR;
	if (interrupted && send_request(device, DT_REASON, NULL, 0) == -1)
		return -1;
	if (receive_all(device, &answer, sizeof(answer), NULL) == -1 ||
	    receive_rest(device, answer.length, buffer, size) == -1)
		return -1;
	if (interrupted && (receive_all(device, &next, sizeof(next), NULL) == -1 || skip(device, next.length) == -1))
		return -1;
	if (answer.error != 0) {
		errno = own_errno(answer.error);
		return -1;
	}
	return answer.length < size ? answer.length : size;
}

ssize_t
dt_text(int device, uint32_t request, uint32_t number, char *buffer, size_t size)
{
	struct answer answer;
	size_t length;

	if (size == 0) {
		errno = EINVAL;
		return -1;
	}
	if (ask(device, request, &number, request == DT_NAME ? sizeof(number) : 0, &answer, NULL) == -1)
		return -1;
	if (receive_rest(device, answer.length, buffer, size - 1) == -1)
		return -1;
	if (answer.error != 0) {
		errno = own_errno(answer.error);
		return -1;
	}
	length = answer.length < size - 1 ? answer.length : size - 1;
	buffer[length] = '\0';
	return length;
}

int
dt_close(int device)
{
	return close(device);
}
