#!/bin/sh
# Checks a machine on an image that debian.sh has made, on an emulated host:
#
#   tests/images/debian.sh trixie images/debian-13.qcow2
#   cargo host svm --dev --memory 6144 --put tests/images/guest.sh --put tests/images/check.sh --put images -- sh check.sh images/debian-13.qcow2
#
# It boots by its own boot loader's entry under an overlay, is reached by ssh, traced, saved, shut
# down by its power button, and restored twice at once, each with a disk of its own.
set -u
image=$1
before=$(sha256sum <"$image")

. ./guest.sh

start=$(now)
exotrace run --image "$image" --overlay --net user,host=2222:22 --name first --memory 768M \
    --serial first.serial 2>first.log &
first=$!
answers first "$start" $first
grep 'boot loader entry' first.log || fail "no entry"
guest 'uname -r; ip -4 -br addr; systemctl is-system-running --wait; echo kept >/root/file; sync'
exotrace snapshot --vm first saved || fail snapshot
exotrace trace --vm first -e 'BEGIN { printf("armed\n"); }
    tracepoint:sched:sched_process_exec { printf("%s\n", comm); } tracepoint:sched:sched_process_exec /comm == "ls"/ { exit(); }' \
    >trace.txt 2>trace.log &
tracing=$!
until grep -q armed trace.txt; do
    alive $tracing || fail trace
    sleep 0.2
done
guest 'ls / >/dev/null'
wait $tracing || fail trace
grep -qx ls trace.txt || fail "no program in the trace"
exotrace stop --vm first --gracefully || fail "stop --gracefully"
wait $first || fail "the status of the run"
grep 'guest powered off' first.log || fail "no power-off"

start=$(now)
for n in 1 2; do
    exotrace run --restore saved --image "$image" --net user,host=300$n:22 --name "r$n" --serial null 2>"r$n.log" &
    echo $! >"r$n.pid"
done
for n in 1 2; do
    answers "r$n" "$start" "$(cat "r$n.pid")" 300$n
    [ "$(guest_at 300$n 'cat /root/file')" = kept ] || fail "r$n has lost a file"
    guest_at 300$n "echo $n >/root/own; sync"
done
for n in 1 2; do
    [ "$(guest_at 300$n 'echo 3 >/proc/sys/vm/drop_caches; cat /root/own')" = $n ] || fail "r$n has another's disk"
    exotrace stop --vm r$n || fail "stop r$n"
done
[ "$(sha256sum <"$image")" = "$before" ] || fail "the image has changed"
echo "all as it should be"
