#!/bin/sh
# Runs scripts of bt, one after the other, over a distribution at work in an image that debian.sh has
# made, on an emulated host:
#
#   tests/images/debian.sh trixie images/debian-13.qcow2
#   cargo host svm --memory 6144 --limit 3000 --put tests/images/guest.sh --put tests/images/scripts.sh --put images --put SCRIPTS -- \
#       sh scripts.sh images/debian-13.qcow2 SCRIPTS [LINES]
#
# SCRIPTS is a folder with files *.bt, such as probes/bt/scripts, or the tools of another tracer.
# Prints LINES (12) lines of each one's output, and at the end how many ran, and why others did not.
set -u
image=$1
scripts=$2
lines=${3:-12}
. ./guest.sh
# The arguments of a script that needs some.
arguments() {
    case $1 in
    funccount) echo 'vfs_*' ;;
    funclatency) echo vfs_read ;;
    esac
}

start=$(now)
exotrace run --image "$image" --overlay --net user,host=2222:22 --name m --memory 1G --serial m.serial 2>m.log &
machine=$!
answers exotrace "$start" $machine

# A file is known by its pages in memory, so a process has to have it.
guest 'systemd-run -q --unit=shell bash -c "while :; do sleep 1000; done"'
# What the scripts observe, in small.
work='
bash -ic "exit 3" >/dev/null 2>&1
ls -l /usr/bin >/dev/null; cat /etc/passwd >/dev/null; stat /nowhere >/dev/null 2>&1
dd if=/dev/zero of=/var/tmp/data bs=64k count=8 conv=fsync 2>/dev/null; sync; cat /var/tmp/data >/dev/null; rm /var/tmp/data
echo 1 >/proc/sys/vm/drop_caches; cat /usr/bin/bash >/dev/null
getent hosts localhost >/dev/null; sleep 0.2
mkdir -p /run/m; mount -t tmpfs none /run/m; umount /run/m
modprobe dummy; modprobe -r dummy
setpriv --reuid 1000 true
bash -c "exec 3<>/dev/tcp/127.0.0.1/22; read -r -t 2 line <&3"
bash -c "kill -9 \$\$" 2>/dev/null
true'
ran=0 failed=
for file in "$scripts"/*.bt; do
    name=$(basename "$file" .bt)
    : >err.txt
    # shellcheck disable=SC2046
    exotrace trace --vm m "$file" $(arguments "$name") >out.txt 2>err.txt &
    tracing=$!
    begun=$(now)
    until grep -q '^exotrace: attached' err.txt || ! alive $tracing; do
        ! is_over "$begun" 60 || break
        sleep 0.2
    done
    if alive $tracing; then
        guest "$work" >/dev/null 2>&1
        kill -INT $tracing 2>/dev/null
    fi
    status=0
    wait $tracing || status=$?
    alive $machine || fail "the machine has ended at $name"
    echo "== $name: status $status, $(wc -l <out.txt) lines"
    head -n "$lines" out.txt
    grep -v '^exotrace: attached' err.txt | head -n 4
    if [ $status -eq 0 ]; then
        ran=$((ran + 1))
    else
        failed="$failed $name"
    fi
done
exotrace stop --vm m
wait $machine
echo "$ran ran; not:${failed:- none}"
