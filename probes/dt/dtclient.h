/*
 * The device dt(4) of a machine of exotrace, over its socket: $XDG_RUNTIME_DIR/exotrace/NAME/dt, or without the variable
 * /tmp/exotrace-UID/NAME/dt. An open is a connection; closing it takes its probes away.
 *
 * All of these give -1 and set errno where they fail, as the system calls do that they stand for.
 *
 * The wire, in numbers of little endian: the client begins with three of 32 bits: DT_MAGIC, the layout, flags. Then comes, again and
 * again, a request: 32 bits of code, 32 of length, so many bytes. Each answer, that to the open included, is 32 bits of error (0, or
 * OpenBSD's number), 32 of length, so many bytes. With the answer to DTIOCRDVNODE comes a descriptor. A read that waits ends with
 * EINTR where the next request comes.
 */
#ifndef EXOTRACE_DTCLIENT_H
#define EXOTRACE_DTCLIENT_H

#include "dtvar.h"

#define DT_MAGIC 0x01345444u /* 'D' 'T' '4' 1 */

/* Layouts. */
#define DT_ABI_OLD 0
#define DT_ABI_CURRENT 1
#ifdef DT_OLD_ABI
#define DT_ABI DT_ABI_OLD
#else
#define DT_ABI DT_ABI_CURRENT
#endif

/* Flags: keep the limits of OpenBSD. */
#define DT_STRICT 1

/* Requests besides those of dtvar.h. */
#define DT_READ 0    /* argument: 64 bits, room in bytes */
#define DT_REASON 1  /* why the last request failed, as text */
#define DT_MISSING 2 /* what is not in the list of probes and why, as text */
#define DT_NAME 3    /* argument: 32 bits, a probe; its whole name */

/* Opens the device at the socket `path`; gives its descriptor. */
int dt_open(const char *path, unsigned int abi, unsigned int flags);

/* As ioctl(2) of the device: `argument` is what the request says, and pointers in it work. */
int dt_ioctl(int device, uint32_t request, void *argument);

/*
 * As read(2) of the device: waits for events, gives the bytes of those it has read. A signal whose handler does not restart system calls
 * ends the wait with EINTR.
 */
ssize_t dt_read(int device, void *buffer, size_t size);

/* The text of DT_REASON or DT_MISSING, or of DT_NAME for the probe `number`, with a NUL and cut to `size`. */
ssize_t dt_text(int device, uint32_t request, uint32_t number, char *buffer, size_t size);

/* Closes the device. */
int dt_close(int device);

#endif
