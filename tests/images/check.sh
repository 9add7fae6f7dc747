#!/bin/sh
# Checks a machine on an image that debian.sh has made, on an emulated host:
#
#   tests/images/debian.sh trixie images/debian-13.qcow2
#   cargo host svm --dev --memory 6144 --put tests/images/check.sh --put images -- sh check.sh images/debian-13.qcow2
#
# It boots by its own boot loader's entry under an overlay, is reached by ssh, traced, saved, shut
# down by its power button, and restored twice at once, each with a disk of its own.
set -u
image=$1
limit=600
before=$(sha256sum <"$image")

fail() {
    echo "FAILED: $*"
    tail -n 5 ./*.log
    exit 1
}
# Whether a program of this shell has not ended.
alive() { ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status" && [ -e "/proc/$1" ]; }
# Runs a command in the guest behind a port.
guest() {
    port=$1
    shift
    ssh -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \
        -o ConnectTimeout=30 -p "$port" root@127.0.0.1 "$@" </dev/null
}
# Waits until a guest answers; prints the seconds.
answers() {
    start=$(date +%s)
    until guest "$1" true 2>/dev/null; do
        [ $(($(date +%s) - start)) -lt $limit ] || fail "no answer on port $1"
        sleep 0.5
    done
    echo "port $1 answers after $(($(date +%s) - start)) s"
}

exotrace run --image "$image" --overlay --net user,host=2222:22 --name first --memory 768M \
    --serial first.serial 2>first.log &
first=$!
answers 2222
grep 'boot loader entry' first.log || fail "no entry"
guest 2222 'uname -r; ip -4 -br addr; systemctl is-system-running --wait; echo kept >/root/file; sync'
exotrace snapshot --vm first saved || fail snapshot
exotrace trace --vm first -e 'BEGIN { printf("armed\n"); }
    tracepoint:sched:sched_process_exec { printf("%s\n", comm); } tracepoint:sched:sched_process_exec /comm == "ls"/ { exit(); }' \
    >trace.txt 2>trace.log &
tracing=$!
until grep -q armed trace.txt; do
    alive $tracing || fail trace
    sleep 0.2
done
guest 2222 'ls / >/dev/null'
wait $tracing || fail trace
grep -qx ls trace.txt || fail "no program in the trace"
exotrace stop --vm first --gracefully || fail "stop --gracefully"
wait $first || fail "the status of the run"
grep 'guest powered off' first.log || fail "no power-off"

for n in 1 2; do
    exotrace run --restore saved --image "$image" --net user,host=300$n:22 --name "r$n" --serial null 2>"r$n.log" &
done
for n in 1 2; do
    answers 300$n
    [ "$(guest 300$n 'cat /root/file')" = kept ] || fail "r$n has lost a file"
    guest 300$n "echo $n >/root/own; sync"
done
for n in 1 2; do
    [ "$(guest 300$n 'echo 3 >/proc/sys/vm/drop_caches; cat /root/own')" = $n ] || fail "r$n has another's disk"
    exotrace stop --vm r$n || fail "stop r$n"
done
[ "$(sha256sum <"$image")" = "$before" ] || fail "the image has changed"
echo "all as it should be"
