# Shared by .ci/run and .ci/fuzz-long: the fuzz targets, and how they are built and run. Source it
# in the root of the repository. The stable toolchain suffices without a sanitizer, and the
# fuzzed code has next to no unsafe code.

# Crate, target, and runs of .ci/run.
fuzz_targets() {
    cat <<'TARGETS'
introspect btf 20000
introspect core_file 100000
introspect elf 50000
introspect kallsyms 20000
introspect kernel_tables 50000
introspect maple_tree 50000
introspect notes 100000
introspect orc 20000
introspect panic 50000
introspect processes 3000
introspect saved_image 5000
introspect xarray 20000
probes port_streams 20000
probes script 30000
devices disk_image 3000
devices image_boot 20000
devices mmio 10000
devices ports 50000
devices virtio 20000
vmm emulator 50000
vmm kernel 30000
vmm snapshot 50000
cli expect 30000
cli kdump 20000
cli protocol 100000
TARGETS
}

# A cargo subcommand as a prebuilt wheel, named by version and hash: building one takes longer than all other checks
# together. The fourth argument is the wheel's name where it is another. Sets `program`.
tool() {
    local tools=${XDG_CACHE_HOME:-$HOME/.cache}/exotrace/ci-tools
    program=$tools/bin/$1
    if [ ! -x "$program" ] && ! command -v "$1" >/dev/null; then
        python3 -m venv "$tools"
        "$tools/bin/pip" install --quiet --no-deps --require-hashes --requirement /dev/stdin \
            <<<"${4:-astral-dev-toolchain-$1}==$2 --hash=sha256:$3"
    fi
    [ -x "$program" ] || program=$1
}

# Builds targets into a folder ($1) with the coverage counters that libFuzzer reads: the flags of
# cargo-fuzz without a sanitizer. Further arguments are cargo's own: --bins, or some of them by --bin.
# With `fast` in $2, comparisons are not recorded.
fuzz_build() {
    local built=$1 speed=$2 flag flags=(-Cpasses=sancov-module --cfg=fuzzing -Cdebug-assertions -Ccodegen-units=1)
    shift 2
    for flag in sanitizer-coverage-level=4 sanitizer-coverage-inline-8bit-counters sanitizer-coverage-pc-table \
        sanitizer-coverage-stack-depth simplifycfg-branch-fold-threshold=0; do
        flags+=("-Cllvm-args=-$flag")
    done
    [ "$speed" = fast ] || flags+=(-Cllvm-args=-sanitizer-coverage-trace-compares)
    # One build of all crates: cargo gives them the same features, and compiles each once.
    RUSTFLAGS="${flags[*]}" cargo build --manifest-path fuzz/Cargo.toml --workspace --locked --release \
        --target x86_64-unknown-linux-gnu --target-dir "$built" "$@"
}

# Runs a target ($2) of a crate ($1), built into a folder ($3), from its seeds, adding to a corpus
# ($4); further arguments are libFuzzer's own options. Its output goes to $3/TARGET.txt, and a
# failing input to $3/TARGET-*.
fuzz_run() {
    local crate=$1 target=$2 built=$3 corpus=$4
    shift 4
    "$built/x86_64-unknown-linux-gnu/release/$target" -max_len=20000 -timeout=20 -rss_limit_mb=2048 \
        -artifact_prefix="$built/$target-" "$@" "$corpus" "$crate/fuzz/seeds/$target" >"$built/$target.txt" 2>&1
}
