#!/usr/bin/env bash
# Puts what figures.sh needs beside an image into a folder: qemu.sh IMAGE FOLDER
#
# Debian's QEMU with its libraries and firmware, to run where they are not installed; the kernel
# and initramfs of an image that debian.sh has made; and fio(1) on a disk for the guest. Needs root,
# and Debian's packages qemu-system-x86, seabios, qemu-utils, fio and e2fsprogs.
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
image=$(realpath "$1") folder=$(realpath -m "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf "$folder"
mkdir -p "$folder/lib" "$folder/firmware"
# Copies a program to a folder, and its libraries to lib/ there.
with_libraries() {
    mkdir -p "$2/lib"
    cp "$1" "$2/"
    ldd "$1" | grep -o '/[^ ]*' | xargs -I{} cp -L {} "$2/lib/"
}
with_libraries "$(command -v qemu-system-x86_64)" "$folder"
mv "$folder/qemu-system-x86_64" "$folder/qemu"
with_libraries "$(command -v fio)" "$work/fio"
mke2fs -q -t ext2 -L fio -d "$work/fio" "$folder/fio.img" 128M
for file in bios-256k.bin bios-microvm.bin kvmvapic.bin linuxboot_dma.bin pvh.bin; do
    for place in /usr/share/qemu /usr/share/seabios; do
        [ -e "$place/$file" ] && cp -L "$place/$file" "$folder/firmware/"
    done
done

qemu-img convert -O raw "$image" "$work/raw"
take() {
    name=$(debugfs -R 'ls -p /boot' "$work/raw?offset=1048576" 2>/dev/null | cut -d / -f 6 | grep "^$1-" | tail -n 1)
    debugfs -R "dump /boot/$name $folder/$1" "$work/raw?offset=1048576" 2>/dev/null
}
take vmlinuz
take initrd.img
debugfs -R 'stats -h' "$work/raw?offset=1048576" 2>/dev/null | sed -n 's/^Filesystem UUID: *//p' >"$folder/uuid"
du -sh "$folder"
