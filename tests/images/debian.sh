#!/usr/bin/env bash
# Makes an image of Debian from its archive: debian.sh SUITE FILE.qcow2 [PACKAGE...]
#
# A GPT with one ext4 partition, Debian's cloud kernel, systemd, ssh for root without a password
# (over the network of `--net user,host=PORT:22`), and an entry of the Boot Loader Specification
# with a serial console. Needs root, and Debian's packages mmdebstrap, e2fsprogs, fdisk, qemu-utils.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
suite=$1 file=$(realpath -m "$2")
shift 2
packages=linux-image-cloud-amd64,systemd-sysv,systemd-resolved,udev,dbus,iproute2,openssh-server
for package; do packages+=,$package; done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uuid=$(cat /proc/sys/kernel/random/uuid)
mmdebstrap --quiet --variant=apt --include="$packages" "$suite" "$work/root"
cd "$work"
echo "UUID=$uuid / ext4 errors=remount-ro 0 1" >root/etc/fstab
echo debian >root/etc/hostname
printf '[Match]\nType=ether\n[Network]\nDHCP=ipv4\n' >root/etc/systemd/network/80-dhcp.network
chroot root systemctl --quiet enable systemd-networkd
chroot root passwd --quiet --delete root
printf 'PermitRootLogin yes\nPermitEmptyPasswords yes\n' >root/etc/ssh/sshd_config.d/test.conf
mkdir -p root/boot/loader/entries
for kernel in root/boot/vmlinuz-*; do
    version=${kernel#root/boot/vmlinuz-}
    cat >"root/boot/loader/entries/$version.conf" <<ENTRY
title Debian ($suite)
version $version
linux /boot/vmlinuz-$version
initrd /boot/initrd.img-$version
options root=UUID=$uuid ro console=ttyS0
ENTRY
done

start=1 size=$(($(du -sm root | cut -f 1) * 3 / 2 + 256))
truncate -s $((size + 2 * start))M raw
sfdisk --quiet raw <<<"label: gpt
start=${start}MiB, size=${size}MiB, type=4f68bce3-e8cd-4db1-96e7-fbcaf984b709"
mke2fs -q -t ext4 -U "$uuid" -L root -d root -E offset=$((start << 20)) raw ${size}M
qemu-img convert -O qcow2 raw "$file"
