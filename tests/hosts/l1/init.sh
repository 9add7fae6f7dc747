#!/bin/busybox sh
# The first program of an emulated host: makes the root writable, runs the job and returns its
# results. Disks: the root (read only), the job (a tar), the results (room for a tar). Their names
# come on the kernel's command line.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
$b mount -t tmpfs -o size=90% tmpfs /mnt
$b mkdir /mnt/upper /mnt/work /mnt/root
$b mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
for word in $($b cat /proc/cmdline); do
    case $word in exo.*) eval "${word#exo.}" ;; esac
done
cd /mnt/root
$b mount -t proc proc proc
$b mount -t sysfs sys sys
$b mount -t devtmpfs dev dev
$b mkdir -p dev/pts dev/shm tmp run job out cache
$b mount -t devpts devpts dev/pts
$b mount -t tmpfs -o size=50% tmpfs dev/shm
$b mount -t tmpfs -o size=80%,mode=1777 tmpfs tmp
$b mount -t tmpfs -o mode=755 tmpfs run
# The cache is a file system of its own: an overlay without attributes renames no directories.
$b mkdir -p cached
$b mount --bind /cache cached
$b mount -t tmpfs -o size=80% tmpfs cache
for entry in cached/*; do
    $b ln -s /$entry cache/${entry#cached/}
done
[ -e dev/fd ] || $b ln -s /proc/self/fd dev/fd
$b ip link set lo up 2>/dev/null
# A network without anybody on it: passt gives its guest the addresses of the default route.
$b ip addr add 192.0.2.2/24 dev dummy0 && $b ip link set dummy0 up && $b ip route add default via 192.0.2.1
$b tar -xf "$job" -C job
$b stty -F /dev/console -onlcr 2>/dev/null
# A root of its own rather than chroot(2): a program in another root makes no user namespaces, as
# passt does.
$b mkdir -p mnt/old && $b pivot_root . mnt/old && cd /
$b sh /job/run </dev/console
echo $? >out/.status
echo 'exotrace-host: down'
# Waits until the console has printed everything.
$b stty -F /dev/console -onlcr 2>/dev/null
$b dmesg >out/.dmesg
$b tar -cf "$results" -C out . && $b sync
[ "$end" = port ] && for c in S h u t d o w n; do
    $b printf $c | $b dd of=/dev/port bs=1 seek=35072 conv=notrunc 2>/dev/null
done
$b poweroff -f
