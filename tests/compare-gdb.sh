#!/bin/sh
# Compares hits a second of one function: exotrace, and gdb at QEMU's stub with a breakpoint that
# counts and continues.
#
#   tests/compare-gdb.sh [HITS]
#
# HITS is the number of gdb's run, 5000 by default; exotrace's run has ten times as many.
#
# Both run the micro guest's program `calls` and stop at micro_leaf. exotrace also records each
# return, which is a second hit that is not counted here. The time is that of a whole run less that
# of a run with one hit: so starting and ending do not count. QEMU runs under KVM if breakpoints
# work there, else under TCG. Needs qemu-system-x86_64, gdb and gcc; installs what is missing if
# permitted (root, apt-get).
set -eu

hits=${1:-5000}
case $hits in
'' | *[!0-9]* | 0) echo "compare-gdb: HITS is \"$hits\"; give a number from 1 up" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

missing=
for need in qemu-system-x86_64:qemu-system-x86 gdb:gdb gcc:gcc; do
    command -v "${need%%:*}" >/dev/null || missing="$missing ${need#*:}"
done
if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "compare-gdb: install the packages$missing (names as in Debian) first" >&2
        exit 1
    fi
    echo "compare-gdb: installing$missing" >&2
    # shellcheck disable=SC2086 # several words on purpose
    apt-get install -y --no-install-recommends $missing >/dev/null
fi

cd "$here/.."
cargo build --release --quiet --package exotrace --bin exotrace
exotrace=${CARGO_TARGET_DIR:-target}/release/exotrace
cargo run --release --quiet --package exotrace-guest --example micro_elf "$work/micro.elf"
gcc -m32 -nostdlib -static -no-pie -Wl,-Ttext=0x200000,--build-id=none \
    -o "$work/boot.elf" tests/compare-gdb/multiboot.S

now() { date +%s.%N; }
# seconds A B: B - A
seconds() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f", b - a }'; }

# with_gdb ACCELERATOR CALLS: seconds of the run, or failure if not every call was a hit
with_gdb() {
    cat >"$work/script" <<END
set pagination off
set confirm off
set \$n = 0
target remote | exec qemu-system-x86_64 -accel $1 -m 16 -nodefaults -display none -serial file:$work/serial -no-reboot -S -gdb stdio -kernel $work/boot.elf -append "calls $2" -device loader,file=$work/micro.elf 2>$work/qemu.err
break *micro_leaf
commands
silent
set \$n = \$n + 1
continue
end
continue
END
    # The guest's end is an error for gdb's script if QEMU is gone before its last word is read;
    # hence -ex.
    start=$(now)
    timeout 600 gdb -batch -nx -x "$work/script" -ex 'printf "hits: %d\n", $n' "$work/micro.elf" \
        >"$work/gdb.out" 2>&1 || true
    end=$(now)
    grep -qx "hits: $2" "$work/gdb.out" || return 1
    seconds "$start" "$end"
}

# with_exotrace CALLS: seconds of the run
with_exotrace() {
    start=$(now)
    "$exotrace" run --kernel "$work/micro.elf" --memory 16M --cmdline "calls $1" --serial null --trace micro_leaf \
        -o /dev/null 2>"$work/exotrace.err" || { cat "$work/exotrace.err" >&2; return 1; }
    end=$(now)
    grep -q "$1 entries, $1 exits, 0 dropped" "$work/exotrace.err" || { cat "$work/exotrace.err" >&2; return 1; }
    seconds "$start" "$end"
}

accelerator=
for candidate in kvm tcg; do
    if few=$(with_gdb "$candidate" 1); then
        accelerator=$candidate
        break
    fi
    why=$(grep -hm 1 -e 'error' -e 'failed' "$work/qemu.err" "$work/gdb.out" | head -n 1)
    echo "compare-gdb: no breakpoint hit with -accel $candidate (${why:-no message})" >&2
done
if [ -z "$accelerator" ]; then
    echo "compare-gdb: QEMU runs the guest to its breakpoint under no accelerator" >&2
    exit 1
fi

many=$(with_gdb "$accelerator" $((hits + 1)))
gdb_time=$(seconds "$few" "$many")
own_hits=$((hits * 10))
few=$(with_exotrace 1)
many=$(with_exotrace $((own_hits + 1)))
own_time=$(seconds "$few" "$many")

awk -v h="$hits" -v t="$gdb_time" -v oh="$own_hits" -v ot="$own_time" -v accelerator="$accelerator" 'BEGIN {
    line = "%-28s %9s %9s %9s %7s\n"
    printf line, "", "hits", "seconds", "hits/s", "ratio"
    printf line, "gdb, QEMU -accel " accelerator, h, t, sprintf("%.0f", h / t), "1"
    printf line, "exotrace, returns as well", oh, ot, sprintf("%.0f", oh / ot), sprintf("%.1f", oh / ot / (h / t))
}'
