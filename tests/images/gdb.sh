#!/bin/sh
# Debugs PostgreSQL with gdb in a distribution at work, from outside, on an emulated host:
#
#   tests/images/debian.sh trixie images/debian-13-programs.qcow2 postgresql
#   cargo host svm --memory 6144 --limit 3000 --put tests/images/gdb.sh --put images --put GDB -- \
#       sh gdb.sh images/debian-13-programs.qcow2 GDB/run
#
# GDB is a folder with gdb(1) and the libraries that it needs; `run` in it starts gdb. A server
# process of PostgreSQL is stopped in a function, stepped, stopped at system calls, and caught in a
# crash. The distribution has to run on after each.
set -u
image=$1
gdb=$2
limit=900

fail() {
    echo "FAILED: $*"
    tail -n 20 ./*.log ./*.txt
    exit 1
}
# Whether a program of this shell has not ended.
alive() { ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status" && [ -e "/proc/$1" ]; }
now() { cut -d . -f 1 /proc/uptime; }
guest() {
    ssh -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \
        -o ConnectTimeout=30 -p 2222 root@127.0.0.1 "$@" </dev/null
}
# Runs gdb's commands on a server process.
debugs() {
    begun=$(now)
    {
        echo 'set pagination off'
        echo 'set confirm off'
        echo 'set width 0'
        echo 'set remotetimeout 120'
        echo "target remote | exotrace gdb --vm m -p $1"
        cat
    } >commands.txt
    "$gdb" -q -nx -batch -x commands.txt >gdb.txt 2>&1
    grep -v '^warning: \|^Reading ' gdb.txt
    echo "-- $(($(now) - begun)) s"
}

start=$(now)
exotrace run --image "$image" --overlay --net user,host=2222:22 --name m --memory 1G --serial m.serial 2>m.log &
machine=$!
until guest true 2>/dev/null; do
    alive $machine || fail "the machine has ended"
    [ $(($(now) - start)) -lt $limit ] || fail "no answer"
    sleep 0.5
done
echo "ssh answers after $(($(now) - start)) s"
guest 'systemctl start postgresql; until su postgres -c "psql -qc \"select 1\"" >/dev/null 2>&1; do sleep 0.5; done'
# gdb reads programs and libraries from the guest's memory.
guest 'cat /usr/lib/postgresql/*/bin/postgres /usr/lib/x86_64-linux-gnu/lib*.so.* >/dev/null'
# A client that asks every half second.
client='while :; do echo "select count(*) from pg_class;"; sleep 0.5; done | psql -q >/dev/null 2>&1'
server() {
    guest "systemd-run -q --uid=postgres sh -c '$client'"
    until pid=$(exotrace ps --vm m 2>/dev/null | awk '/postgres: .*\[local\]/ { print $1; exit }') && [ -n "$pid" ]; do
        sleep 0.5
    done
    echo "the server process is $pid: $(exotrace ps --vm m 2>/dev/null | grep "^ *$pid ")"
}
server
debugs "$pid" <<'COMMANDS'
info threads
info sharedlibrary
bt
break standard_ExecutorRun
continue
bt
info registers rip rdi
stepi
stepi
finish
delete
catch syscall 44
continue
continue
print $rax > 0
detach
COMMANDS
grep -q 'libc.so.6$' gdb.txt || fail "no libraries"
grep -q 'Breakpoint 1, .*standard_ExecutorRun' gdb.txt || fail "not stopped in the function"
grep -q 'returned from syscall' gdb.txt || fail "not stopped at the system call"
guest true || fail "the distribution does not run on"

guest "systemd-run -q sh -c 'sleep 5; kill -SEGV $pid'"
debugs "$pid" <<'COMMANDS'
continue
bt
continue
COMMANDS
grep -q 'received signal SIGSEGV' gdb.txt || fail "no crash"
grep -q 'terminated with signal SIGSEGV' gdb.txt || fail "no end"
guest 'until su postgres -c "psql -qc \"select 1\"" >/dev/null 2>&1; do sleep 0.5; done'
echo "PostgreSQL serves again"
exotrace stop --vm m --gracefully
wait $machine
echo "the machine has ended: $?"
