#!/bin/sh
# Measures a machine on an image beside QEMU's on the same emulated host:
#
#   tests/images/debian.sh trixie images/debian-13.qcow2 netcat-openbsd
#   tests/images/qemu.sh images/debian-13.qcow2 qemu
#   cargo host svm --memory 6144 --limit 3000 --put tests/images/guest.sh --put tests/images/figures.sh --put images --put qemu -- \
#       sh figures.sh images/debian-13.qcow2
#
# Prints seconds from the start to ssh's answer, for exotrace and for QEMU's
# q35 and microvm, the time of a restore to ssh's first line and to a command's answer, the network's
# throughput by passt, and that of a raw disk by fio(1) in the guest. WHAT chooses some of "network disk restore microvm".
# With DISK=overlay that disk is an overlay, of which QEMU's keeps nothing either.
set -u
image=$1
rounds=${ROUNDS:-1}
bytes=${BYTES:-20000000}
what=${WHAT:-network disk restore microvm}
# The size of the disk that is measured, and what makes it an overlay for either.
disk=268435456
case ${DISK:-raw} in
raw) overlay= snapshot=off ;;
overlay) overlay=,overlay snapshot=on ;;
esac
append="root=UUID=$(cat qemu/uuid) ro console=ttyS0"

. ./guest.sh
# Prints the seconds that bytes take from the guest, and to it.
network() {
    name=$1
    gateway=$(guest 'ip -4 route show default' | cut -d ' ' -f 3)
    busybox nc -l -p 5001 >received &
    listener=$!
    start=$(now)
    guest "head -c $bytes /dev/zero | nc -N $gateway 5001" || fail "$name: nc in the guest"
    wait $listener
    [ "$(wc -c <received)" = "$bytes" ] || fail "$name: $(wc -c <received) bytes came"
    echo "$name: $bytes bytes from the guest in $(since "$start") s"
    guest 'nc -l -p 5002 >/tmp/received; wc -c </tmp/received' >count &
    listener=$!
    until guest 'ss -Hltn sport = 5002 | grep -q .'; do sleep 0.2; done
    start=$(now)
    head -c "$bytes" /dev/zero | busybox nc 127.0.0.1 5002
    wait $listener
    [ "$(cat count)" = "$bytes" ] || fail "$name: $(cat count) bytes came"
    echo "$name: $bytes bytes to the guest in $(since "$start") s"
}
# Prints the throughput of the disk, past the guest's page cache.
disk() {
    name=$1
    guest 'mount -o ro LABEL=fio /mnt' || fail "$name: no fio"
    device=$(guest "lsblk -bdno NAME,SIZE" | awk "\$2 == $disk { print \$1 }")
    for job in "read 1M 4" "write 1M 4" "randread 4k 1" "randread 4k 16" "randwrite 4k 1" "randwrite 4k 16"; do
        set -- $job
        guest "/mnt/lib/ld-linux-x86-64.so.2 --library-path /mnt/lib /mnt/fio --name=job --filename=/dev/$device \
            --direct=1 --ioengine=libaio --rw=$1 --bs=$2 --iodepth=$3 --runtime=10 --time_based \
            --output-format=terse --terse-version=3" >fio.txt || fail "$name: fio"
        awk -F ';' -v what="$name: $job" '{ printf("%s: %d KiB/s, %d requests/s\n", what, $7 + $48, $8 + $49) }' fio.txt
    done
}
wants() { case " $what " in *" $1 "*) ;; *) return 1 ;; esac; }
qemu() {
    name=$1 machine=$2
    # passt makes the socket as the user nobody.
    sockets=$(mktemp -d)
    chmod 777 "$sockets"
    passt -q -f -s "$sockets/passt" -t 2222:22,5002 2>passt.log &
    passt=$!
    until [ -S "$sockets/passt" ]; do
        alive $passt || fail "passt"
        sleep 0.1
    done
    qemu/lib/ld-linux-x86-64.so.2 --library-path qemu/lib qemu/qemu -L qemu/firmware -M "$machine" \
        -accel kvm -cpu host -m 768 -nodefaults -display none -no-user-config -serial "file:$name.serial" \
        -kernel qemu/vmlinuz -initrd qemu/initrd.img -append "$append" \
        -drive "if=none,id=disk,file=$image,format=qcow2,snapshot=on" \
        -netdev stream,id=net,server=off,addr.type=unix,addr.path=$sockets/passt \
        -drive if=none,id=fio,file=qemu/fio.img,format=raw,readonly=on -device virtio-blk-pci,drive=fio \
        -drive if=none,id=scratch,file=scratch,format=raw,snapshot=$snapshot -device virtio-blk-pci,drive=scratch \
        -device virtio-blk-pci,drive=disk -device virtio-net-pci,netdev=net,romfile= -device virtio-rng-pci 2>"$name.log" &
    vmm=$!
}
ended() {
    kill $vmm $passt 2>/dev/null
    wait $vmm $passt
}

dd if=/dev/zero of=scratch bs=1M count=$((disk >> 20)) 2>/dev/null
round=0
while [ $round -lt "$rounds" ]; do
    round=$((round + 1))
    start=$(now)
    exotrace run --image "$image,overlay" --net user,host=2222:22,host=5002:5002,loopback --name m --memory 768M \
        --disk qemu/fio.img,ro --disk "scratch$overlay" \
        --serial exotrace.serial 2>exotrace.log &
    vmm=$!
    answers exotrace "$start" $vmm
    ! wants network || network exotrace
    ! wants disk || disk exotrace
    if [ $round = 1 ] && wants restore; then
        exotrace snapshot --vm m saved 2>snapshot.log || fail snapshot
    fi
    exotrace stop --vm m
    wait $vmm

    for restored in 1 2 3; do
        wants restore || break
        start=$(now)
        exotrace run --restore saved --image "$image" --disk qemu/fio.img,ro --disk "scratch$overlay" --net user,host=2222:22 --name r --serial null 2>restore.log &
        vmm=$!
        until [ "$(busybox nc -w 5 127.0.0.1 2222 </dev/null 2>/dev/null | head -c 4)" = SSH- ]; do sleep 0.1; done
        echo "exotrace: restored, ssh's first line after $(since "$start") s"
        until guest true 2>/dev/null; do sleep 0.1; done
        echo "exotrace: restored, a command by ssh after $(since "$start") s"
        exotrace stop --vm r
        wait $vmm
    done

    start=$(now)
    qemu q35 q35
    answers q35 "$start" $vmm
    ! wants network || network q35
    ! wants disk || disk q35
    ended
    wants microvm || continue
    start=$(now)
    qemu microvm microvm,pcie=on,rtc=on,acpi=on
    answers microvm "$start" $vmm
    ended
done
