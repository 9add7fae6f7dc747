#!/bin/sh
# Goes back in time before a panic of a distribution, on an emulated host:
#
#   tests/images/debian.sh trixie images/debian-13-programs.qcow2 postgresql
#   cargo host svm --memory 8192 --limit 3000 --put tests/images/guest.sh --put tests/images/history.sh --put images -- \
#       sh history.sh images/debian-13-programs.qcow2
#
# The distribution runs with a history, PostgreSQL works, and the kernel panics. The machine of two
# seconds before is restored with other probes, and comes to the panic again by itself. A snapshot
# of a hit is restored beside it.
set -u
image=$1
. ./guest.sh

start=$(now)
exotrace run --image "$image" --overlay --net user,host=2222:22 --name m --memory 1G --serial m.serial \
    --history 60s --snapshots kept 2>m.log &
machine=$!
answers exotrace "$start" $machine
guest 'systemctl start postgresql; until su postgres -c "psql -qc \"select 1\"" >/dev/null 2>&1; do sleep 0.5; done'
guest 'su postgres -c "createdb bench; pgbench -qi bench" >/dev/null 2>&1'
exotrace stat --vm m | grep checkpoints

# A hit of a script from another terminal.
exotrace trace --vm m -e 'syscall:fdatasync:entry /comm == "postgres"/ { snapshot("commit"); exit() }' >hit.txt 2>&1 &
hit=$!
guest 'systemd-run -q --uid=postgres sh -c "pgbench -qT 60 -c 2 bench >/dev/null 2>&1"'
wait $hit || fail "the script"
grep 'snapshot' hit.txt

guest 'systemd-run -q sh -c "sleep 5; echo c >/proc/sysrq-trigger"'
wait $machine
echo "the machine has ended: $?"
grep -v '^  ' m.log | grep 'kept/\|panic'
ls kept

exotrace run --restore kept/before-panic --replay --disk "$image" --net off --name again --serial again.serial \
    -e 'syscall:write:entry { @writes[comm] = count(); }
        kprobe:sysrq_handle_crash:entry { printf("the crash comes by %s, pid %d\n", comm, pid); }' >again.txt 2>again.log
echo "the machine from before the panic has ended: $?"
cat again.txt
grep 'recording\|panic' again.log
grep -q 'the crash comes by sh' again.txt || fail "no panic"

timeout 600 exotrace run --restore kept/commit --disk "$image" --net off --name hit --serial hit.serial --for 3 \
    -e 'syscall:fdatasync:entry /@n++ == 0/ { printf("first: fdatasync by %s, pid %d\n", comm, pid); }' >commit.txt 2>commit.log
echo "the machine of the hit has ended: $?"
cat commit.txt
grep -q 'first: fdatasync by postgres' commit.txt || fail "not the hit"
