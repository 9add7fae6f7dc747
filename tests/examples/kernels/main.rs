//! Fetches each of Debian's kernels, boots it on the emulated AMD-V host, and checks it by the
//! tests of the whole system against the guest's own reports.
//!
//! ```text
//! cargo kernels [--suite NAME]... [--test MODULE]... [--limit SECONDS] [--write FILE]
//!     [--logs DIR] [--dev]
//! ```
//!
//! Suites are bullseye, bookworm, trixie, trixie-backports, sid, and bookworm-generic for the
//! kernel that is not only for virtual machines. The default is all. `--test` names a module of
//! `tests/tests/system`. A line of JSON is printed for each test, then the table. `--write` puts
//! the results into a Markdown page between its marks. `--logs` keeps the output of each module, in
//! a folder for each kernel. `--dev` uses the debug build of exotrace. The status is 0 if all
//! requested tests passed.

mod checks;
mod page;

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use guest::build::debian::{self, DebianKernel, Flavour};
use guest::{Cache, Terminal};
use introspect::kernel::image::KernelImage;
use vmm::boot::KernelFile;

use page::{Outcome, Seen};

/// The kernels of `cargo kernels`: name, suite, flavour.
const KERNELS: [(&str, &str, Flavour); 6] = [
    ("bullseye", "bullseye", Flavour::Cloud),
    ("bookworm", "bookworm", Flavour::Cloud),
    ("bookworm-generic", "bookworm", Flavour::Generic),
    ("trixie", "trixie", Flavour::Cloud),
    ("trixie-backports", "trixie-backports", Flavour::Cloud),
    ("sid", "sid", Flavour::Cloud),
];
/// The module that the tests load.
const MODULE: &str = "brd.ko";
/// The time limit of a kernel's run in seconds.
const LIMIT: u32 = 3600;
/// The marks around the results in a page.
const MARKS: [&str; 2] = ["<!-- results -->", "<!-- end of results -->"];
/// The test program.
const SYSTEM: &str = "system";
/// The script that runs on the host, with modules as its arguments: the tests of each module, and a
/// line of JSON for each of them.
const SCRIPT: &str = r#"
export EXOTRACE_TEST_KERNEL=$PWD/kernel/vmlinuz EXOTRACE_TEST_DATA=$PWD/data EXOTRACE_BIN=/bin/exotrace
mkdir -p /out
for module; do
    log=/out/$module.log
    tests=$(./system --list 2> /dev/null | sed -n "s/^\($module::.*\): test$/\1/p")
    [ -n "$tests" ] || continue
    ./system --exact $tests --test-threads=1 --color=never > $log 2>&1
    for test in $tests; do
        result=FAILED
        if grep -q '^test result:' $log; then
            grep -qE "^    $test$" $log || result=ok
        else
            grep -qE "^test $test \.\.\. ok$" $log && result=ok
        fi
        why=$(sed -n "/^---- $test stdout ----$/,/^---- /p" $log | grep -A1 -m1 'panicked at' | tail -n 1 | tr -d '"\\' | cut -c1-300)
        echo "{\"test\":\"$test\",\"result\":\"$result\",\"why\":\"$why\"}"
    done | tee -a /out/results.json
done
"#;

struct Arguments {
    kernels: Vec<(&'static str, &'static str, Flavour)>,
    modules: Vec<String>,
    limit: u32,
    write: Option<PathBuf>,
    logs: Option<PathBuf>,
    dev: bool,
}

fn arguments() -> Result<Arguments, String> {
    let mut found = Arguments {
        kernels: Vec::new(),
        modules: Vec::new(),
        limit: LIMIT,
        write: None,
        logs: None,
        dev: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--dev" {
            found.dev = true;
            continue;
        }
        let value = words
            .next()
            .ok_or_else(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--suite" => {
                let known = KERNELS.iter().find(|(name, _, _)| *name == value);
                let names = KERNELS.map(|(name, _, _)| name).join(", ");
                found.kernels.push(
                    *known.ok_or_else(|| {
                        format!("no kernel {value} is checked; there are {names}")
                    })?,
                );
            }
            "--test" => found.modules.push(value),
            "--limit" => {
                let seconds = value.parse();
                found.limit =
                    seconds.map_err(|_| format!("--limit {value}: not a number of seconds"))?;
            }
            "--write" => found.write = Some(value.into()),
            "--logs" => found.logs = Some(value.into()),
            _ => {
                return Err(format!(
                    "unknown option {word}; see the first lines of tests/examples/kernels/main.rs"
                ));
            }
        }
    }
    if found.kernels.is_empty() {
        found.kernels = KERNELS.to_vec();
    }
    if found.modules.is_empty() {
        found.modules = checks::modules().into_iter().map(str::to_owned).collect();
    }
    Ok(found)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("kernels: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool, Box<dyn Error>> {
    let arguments = arguments()?;
    let cache = Cache::open()?;
    let program = test_program()?;
    let mut seen = Vec::new();
    for (name, suite, flavour) in &arguments.kernels {
        let kernel = debian::suite_kernel(&cache, suite, *flavour, &Terminal::new())?;
        eprintln!("{name}: {}", kernel.release);
        let symbols = symbols(&kernel)?;
        let (outcomes, trouble) = on_host(&kernel, &program, &arguments)?;
        seen.push(Seen {
            name: (*name).to_owned(),
            release: kernel.release,
            symbols,
            outcomes,
            trouble,
        });
    }
    let text = format!("{}\n{}", page::table(&seen), page::losses(&seen));
    println!("{text}");
    if let Some(file) = &arguments.write {
        write(file, &text)?;
    }
    Ok(seen.iter().all(|seen| seen.passes(&arguments.modules)))
}

/// Builds the test program.
fn test_program() -> Result<PathBuf, Box<dyn Error>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    // With the features of the whole workspace, as `cargo test --workspace` builds it.
    build.args(["build", "--workspace", "--quiet", "--test", SYSTEM]);
    build.arg("--message-format=json-render-diagnostics");
    let mut child = build.stdout(Stdio::piped()).spawn()?;
    let mut program = None;
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line?;
            if !line.contains(r#""kind":["test"]"#) {
                continue;
            }
            let path = line.split_once(r#""executable":""#);
            if let Some((path, _)) = path.and_then(|(_, rest)| rest.split_once('"')) {
                program = Some(PathBuf::from(path));
            }
        }
    }
    match child.wait()?.success() {
        true => program.ok_or_else(|| format!("cargo has built no {SYSTEM}").into()),
        false => Err("the tests cannot be built".into()),
    }
}

/// Compares the image's symbols with those of kallsyms-finder (vmlinux-to-elf at PyPI), if that is
/// installed.
fn symbols(kernel: &DebianKernel) -> Result<String, Box<dyn Error>> {
    let file = KernelFile::open(&kernel.image)?;
    let image = KernelImage::parse(file.shared_elf())?;
    let symbols = image.symbols()?;
    let mut ours: Vec<(u64, String)> = symbols
        .iter()
        .map(|symbol| (symbol.address, symbol.name.to_owned()))
        .collect();
    let folder = tempfile::tempdir()?;
    let vmlinux = folder.path().join("vmlinux");
    fs::write(&vmlinux, file.elf())?;
    let Ok(output) = Command::new("kallsyms-finder").arg(&vmlinux).output() else {
        return Ok(format!("{}, not compared", ours.len()));
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let mut theirs: Vec<(u64, String)> = text
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            let (_, name) = (words.next()?, words.next()?);
            Some((address, name.to_owned()))
        })
        .collect();
    ours.sort_unstable();
    theirs.sort_unstable();
    Ok(match ours == theirs {
        true => format!("{}, all equal", ours.len()),
        false => format!("**{} and {}, which differ**", ours.len(), theirs.len()),
    })
}

/// Runs the modules on the host with that kernel as guest. Returns their outcomes, and the reason
/// why some may be missing.
fn on_host(
    kernel: &DebianKernel,
    program: &Path,
    arguments: &Arguments,
) -> Result<(Vec<Outcome>, Option<String>), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let put = |name: &str| folder.path().join(name);
    let out = match &arguments.logs {
        Some(logs) => logs.join(&kernel.release),
        None => put("out"),
    };
    fs::create_dir_all(put("kernel/modules"))?;
    fs::copy(&kernel.image, put("kernel/vmlinuz"))?;
    fs::write(put("kernel/modules").join(MODULE), module(kernel)?)?;
    // It has 40 MB of debug information.
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(put(SYSTEM)).arg(program);
    if !strip.status()?.success() {
        return Err(format!("{} cannot be stripped", program.display()).into());
    }
    fs::create_dir(put("data"))?;
    support::compiled::ship(&put("data"))?;
    fs::write(put("check.sh"), SCRIPT)?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut host = Command::new(cargo);
    host.args(["host", "svm", "--limit", &arguments.limit.to_string()]);
    host.args(arguments.dev.then_some("--dev"));
    host.arg("--out").arg(&out);
    for name in ["kernel", SYSTEM, "data", "check.sh"] {
        host.arg("--put").arg(put(name));
    }
    host.args(["--", "bash", "check.sh"])
        .args(&arguments.modules);
    let status = host.status()?;
    let results = fs::read_to_string(out.join("results.json")).unwrap_or_default();
    let outcomes: Vec<Outcome> = results.lines().filter_map(outcome).collect();
    let trouble = match status.success() {
        true => None,
        false => Some(format!("the host ended with {status}")),
    };
    Ok((outcomes, trouble))
}

/// Parses a line of [`SCRIPT`]'s output.
fn outcome(line: &str) -> Option<Outcome> {
    let field = |name: &str| {
        let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    Some(Outcome {
        test: field("test")?,
        result: field("result")?,
        why: field("why")?,
    })
}

/// Returns the module's file, uncompressed.
fn module(kernel: &DebianKernel) -> Result<Vec<u8>, Box<dyn Error>> {
    let folder = kernel.modules.join("kernel/drivers/block");
    let plain = folder.join(MODULE);
    if plain.is_file() {
        return Ok(fs::read(plain)?);
    }
    let packed = folder.join(format!("{MODULE}.xz"));
    let output = Command::new("xz").args(["-dc"]).arg(&packed).output()?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(format!("xz cannot unpack {}", packed.display()).into()),
    }
}

/// Replaces the text between the marks of a Markdown page with the results.
fn write(file: &Path, results: &str) -> Result<(), Box<dyn Error>> {
    let [start, end] = MARKS;
    let text = fs::read_to_string(file)?;
    let parts = text
        .split_once(start)
        .and_then(|(before, rest)| Some((before, rest.split_once(end)?.1)));
    let (before, after) =
        parts.ok_or_else(|| format!("{}: no {start} and {end}", file.display()))?;
    Ok(fs::write(
        file,
        format!("{before}{start}\n\n{results}\n{end}{after}"),
    )?)
}
