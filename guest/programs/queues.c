/* queues REGISTERS AREA ROUNDS SEED: drives a virtio-mmio device through /dev/mem, unlike any driver.
 * REGISTERS and AREA are physical addresses, the area the last 64 KiB of RAM, which is unused
 * otherwise. Random addresses in rings and descriptors point to the area, to unmapped memory, or to
 * the first pages, which no Linux uses once all its CPUs are up. ROUNDS times it sets the device up
 * anew, gives it random descriptors, and reads and writes random registers. Prints `queues:
 * ROUNDS`. */
#include "guest.h"

enum { PAGE = 4096, AREA = 65536, READ_WRITE = 3, O_RDWR_SYNC = 0x101002 };
/* Registers (virtio 1.2, 4.2.2). */
enum {
	DEVICE_FEATURES_SEL = 0x14, DRIVER_FEATURES = 0x20, DRIVER_FEATURES_SEL = 0x24, QUEUE_SEL = 0x30, QUEUE_NUM = 0x38,
	QUEUE_READY = 0x44, QUEUE_NOTIFY = 0x50, INTERRUPT_ACK = 0x64, STATUS = 0x70,
	QUEUE_DESC = 0x80, QUEUE_DRIVER = 0x90, QUEUE_DEVICE = 0xa0, CONFIG = 0x100,
};

static unsigned long state;

static unsigned long random(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static volatile unsigned char *registers;

static void tell(unsigned long where, unsigned int what)
{
	*(volatile unsigned int *)(registers + where) = what;
}

static void tell_address(unsigned long where, unsigned long what)
{
	tell(where, what);
	tell(where + 4, what >> 32);
}

/* Mostly an address in the area; else one without memory. */
static unsigned long somewhere(unsigned long area)
{
	switch (random() % 16) {
	case 0:
		return random() | (1UL << 40);
	case 1:
		return -(random() % PAGE);
	default:
		return area + (random() % AREA & -16UL);
	}
}

static void set_up(unsigned long area)
{
	static const unsigned char steps[] = { 0, 1, 3, 11 };

	for (unsigned int i = 0; i < sizeof(steps); i++) {
		if (steps[i] == 11)
			for (unsigned int half = 0; half < 2; half++) {
				tell(DRIVER_FEATURES_SEL, half);
				/* VIRTIO_F_VERSION_1, and any of the others */
				tell(DRIVER_FEATURES, (random() & random()) | half);
			}
		tell(STATUS, steps[i]);
	}
	for (unsigned int queue = 0; queue < 4; queue++) {
		tell(QUEUE_SEL, queue);
		tell(QUEUE_NUM, random() % 8 ? 1 << random() % 9 : random());
		tell_address(QUEUE_DESC, somewhere(area) & -16UL);
		tell_address(QUEUE_DRIVER, somewhere(area) & -2UL);
		tell_address(QUEUE_DEVICE, somewhere(area) & -4UL);
		tell(QUEUE_READY, 1);
	}
	tell(STATUS, 15);
}

/* Random descriptors, some of which make sense. None is longer than a page and lies in RAM, because
 * a device writes to any descriptor. */
static void fill(unsigned char *memory, unsigned long area)
{
	for (unsigned long at = 0; at < AREA; at += 16) {
		unsigned long *words = (unsigned long *)(memory + at);

		words[0] = random() % 4 ? somewhere(area) : random() % 4;
		words[1] = random() % 4 ? (random() % 4096) | (random() & 7) << 32 | (random() % 64) << 48 : random() | 1UL << 31;
	}
}

int program(int argc, char **argv, char **envp)
{
	long fd = syscall2(SYS_open, "/dev/mem", O_RDWR_SYNC);
	unsigned long area, rounds;
	unsigned char *memory;
	char digits[DIGITS];

	(void)envp;
	if (argc != 5 || fd < 0)
		return 2;
	area = number(argv[2], 0);
	rounds = number(argv[3], 0);
	state = number(argv[4], 0) * 2 + 1;
	registers = map_shared(fd, number(argv[1], 0), PAGE, READ_WRITE);
	memory = map_shared(fd, area, AREA, READ_WRITE);
	if (!registers || !memory)
		return 2;
	for (unsigned long i = 0; i < rounds; i++) {
		set_up(area);
		fill(memory, area);
		for (unsigned int n = 0; n < 4; n++)
			tell(QUEUE_NOTIFY, random() % 4 ? random() % 4 : random());
		for (unsigned int n = 0; n < 8; n++) {
			unsigned long where = random() % 2 ? random() % PAGE & -4UL : CONFIG + random() % 64;

			if (random() % 2)
				(void)*(volatile unsigned int *)(registers + where % (PAGE - 4));
			else if (where < QUEUE_DESC || where >= CONFIG)
				registers[where] = random();
		}
		tell(INTERRUPT_ACK, 3);
	}
	tell(STATUS, 0);
	print("queues: ", decimal(rounds, digits), "\n");
	return 0;
}
