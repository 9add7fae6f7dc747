#!/bin/sh
# Debugs PostgreSQL with gdb in a distribution at work, from outside, on an emulated host:
#
#   tests/images/debian.sh trixie images/debian-13-programs.qcow2 postgresql
#   cargo host svm --memory 6144 --limit 3000 --put tests/images/guest.sh --put tests/images/gdb.sh --put images --put GDB -- \
#       sh gdb.sh images/debian-13-programs.qcow2 GDB/run
#
# GDB is a folder with gdb(1) and the libraries that it needs; `run` in it starts gdb. A server
# process of PostgreSQL is stopped in a function, stepped, stopped at system calls and at writes to
# a variable, and caught in a crash. The kernel is stopped in its functions and at writes.
# The distribution has to run on after each.
set -u
image=$1
gdb=$2
. ./guest.sh
# Runs gdb's commands on a process or the kernel, by these options of exotrace gdb.
debugs() {
    begun=$(now)
    {
        echo 'set pagination off'
        echo 'set confirm off'
        echo 'set width 0'
        echo 'set remotetimeout 120'
        echo "target remote | exotrace gdb --vm m $*"
        cat
    } >commands.txt
    "$gdb" -q -nx -batch -x commands.txt >gdb.txt 2>&1
    grep -v '^warning: \|^Reading ' gdb.txt
    echo "-- $(since "$begun") s"
}

start=$(now)
exotrace run --image "$image" --overlay --net user,host=2222:22 --name m --memory 1G --serial m.serial 2>m.log &
machine=$!
answers exotrace "$start" $machine
guest 'systemctl start postgresql; until su postgres -c "psql -qc \"select 1\"" >/dev/null 2>&1; do sleep 0.5; done'
# gdb reads programs and libraries from the guest's memory.
guest 'cat /usr/lib/postgresql/*/bin/postgres /usr/lib/x86_64-linux-gnu/lib*.so.* >/dev/null'
# A client that asks every half second.
client='echo "create table t(n int);"; while :; do echo "select count(*) from pg_class; insert into t values (1);"; sleep 0.5; done | psql -q >/dev/null 2>&1'
server() {
    guest "systemd-run -q --uid=postgres sh -c '$client'"
    until pid=$(exotrace ps --vm m 2>/dev/null | awk '/postgres: .*\[local\]/ { print $1; exit }') && [ -n "$pid" ]; do
        sleep 0.5
    done
    echo "the server process is $pid: $(exotrace ps --vm m 2>/dev/null | grep "^ *$pid ")"
}
server
debugs -p "$pid" <<'COMMANDS'
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
watch *(unsigned *)&InterruptHoldoffCount
continue
bt 2
continue
info breakpoints
delete
catch syscall 44
continue
continue
print $rax > 0
detach
COMMANDS
grep -q 'libc.so.6$' gdb.txt || fail "no libraries"
grep -q 'Breakpoint 1, .*standard_ExecutorRun' gdb.txt || fail "not stopped in the function"
grep -q 'Hardware watchpoint 2: ' gdb.txt || fail "no watchpoint"
[ "$(grep -c '^New value = ' gdb.txt)" = 2 ] || fail "not stopped at writes"
grep -q 'returned from syscall' gdb.txt || fail "not stopped at the system call"
guest true || fail "the distribution does not run on"

# The kernel, of which there is no file: a system call, a module, and writes to a variable.
debugs --kernel <<'COMMANDS'
print ((struct task_struct *)&init_task)->comm
ptype struct list_head
info threads
thread 2
bt
tbreak vfs_fsync_range
continue
bt
tbreak ext4_sync_file
continue
bt 3
info symbol cryptd_queue_worker
watch *(long *)&jiffies_64
continue
bt 4
detach
COMMANDS
grep -q ' in do_syscall_64 (' gdb.txt || fail "no stack of the kernel"
grep -q '= "swapper/0' gdb.txt && grep -q 'struct list_head \*next;' gdb.txt || fail "no types of the kernel"
grep -q '.text.cryptd$' gdb.txt || fail "no symbols of a module"
grep -q '^Hardware watchpoint 3: ' gdb.txt || fail "not stopped at a write of the kernel"

# Writers of the kernel's clock, by a script.
exotrace trace --vm m -e 'watchpoint:jiffies_64:8:w { @[kstack(2)] = count(); } interval:s:3 { exit(); }' >watch.txt 2>&1
cat watch.txt
grep -q 'do_timer\|tick_do_update_jiffies64' watch.txt || fail "no writes to jiffies_64"

guest "systemd-run -q sh -c 'sleep 5; kill -SEGV $pid'"
debugs -p "$pid" <<'COMMANDS'
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
