/*
 * The device dt(4) of a machine of exotrace, over its socket: $XDG_RUNTIME_DIR/exotrace/NAME/dt, or without the variable
 * /tmp/exotrace-UID/NAME/dt. An open is a connection; closing it removes its probes.
 *
 * All functions return -1 and set errno if they fail, like the system calls that they represent.
 *
 * The wire protocol, in little-endian numbers: the client begins with three of 32 bits: DT_MAGIC, the layout, flags. Then it sends
 * requests: 32 bits of code, 32 of length, so many bytes. Each answer, that to the open included, is 32 bits of error (0, or
 * OpenBSD's number), 32 of length, so many bytes. A descriptor accompanies the answer to DTIOCRDVNODE. A waiting read ends with EINTR
 * when the next request arrives.
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
#define DT_REASON 1  /* the reason of the last failure, as text */
#define DT_MISSING 2 /* the probes that are not listed, with reasons, as text */
#define DT_NAME 3    /* argument: 32 bits, a probe; its whole name */

/* Opens the device at the socket `path`; returns its descriptor. */
int dt_open(const char *path, unsigned int abi, unsigned int flags);

/* As ioctl(2) of the device: `argument` depends on the request, and pointers in it work. */
int dt_ioctl(int device, uint32_t request, void *argument);

/*
 * As read(2) of the device: waits for events, returns the number of bytes read. A signal whose handler does not restart system calls
 * ends the wait with EINTR.
 */
ssize_t dt_read(int device, void *buffer, size_t size);

/* Copies to `buffer` the text of DT_REASON or DT_MISSING, or of DT_NAME for the probe `number`, with a NUL and cut to `size`. */
ssize_t dt_text(int device, uint32_t request, uint32_t number, char *buffer, size_t size);

/* Closes the device. */
int dt_close(int device);

#endif
