//! Compilers and binary tools, and their output about a program. It needs gcc, g++, binutils and
//! gdb, as the checks install them.

#![allow(dead_code, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns the folder of the package, with `include`, `src` and `tests`.
pub fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a tool to its end, successful or not.
pub fn outcome(tool: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(tool);
    command.args(arguments).env("LC_ALL", "C");
    command
        .output()
        .unwrap_or_else(|error| panic!("cannot run {tool}: {error}"))
}

/// Returns a tool's output; its failure is the test's.
pub fn output(tool: &str, arguments: &[&str]) -> String {
    let output = outcome(tool, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{tool} {}: {}\n{errors}",
        arguments.join(" "),
        output.status
    );
    String::from_utf8(output.stdout).unwrap()
}

/// A compiled program in a folder of its own.
pub struct Program {
    folder: tempfile::TempDir,
    pub path: String,
}

/// A line of `.note.stapsdt`, as `readelf -n` shows it.
#[derive(Debug, PartialEq, Eq, Clone)]
pub struct Site {
    pub provider: String,
    pub name: String,
    pub location: u64,
    pub base: u64,
    pub semaphore: u64,
    pub arguments: String,
}

impl Site {
    /// Returns the text before the `@` of each argument.
    pub fn sizes(&self) -> String {
        let sizes = self
            .arguments
            .split(' ')
            .map(|argument| argument.split('@').next().unwrap_or_default());
        sizes.collect::<Vec<_>>().join(" ")
    }
}

/// A note of `.note.exotrace`: its type, a site's two addresses, and its strings.
#[derive(Debug, PartialEq, Eq, Clone)]
pub struct Note {
    pub kind: u32,
    pub addresses: Vec<u64>,
    pub strings: Vec<String>,
}

impl Program {
    /// Compiles with `compiler arguments... -o PROGRAM`, where `{}` in an argument stands for a new
    /// folder.
    pub fn compile(compiler: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program").to_str().unwrap().to_owned();
        output(compiler, &[arguments, &["-o", &path]].concat());
        Self { folder, path }
    }

    /// Compiles C or C++ from `tests/programs` or `examples`, with all warnings as errors.
    pub fn c(compiler: &str, source: &str, options: &[&str]) -> Self {
        let source = package().join(source);
        let include = package().join("include");
        let fixed = [
            "-Wall",
            "-Wextra",
            "-Werror",
            "-I",
            include.to_str().unwrap(),
            source.to_str().unwrap(),
        ];
        Self::compile(compiler, &[&fixed, options].concat())
    }

    /// Compiles Rust from `tests/programs` or `examples`; the crate, then the needed libraries, are
    /// compiled with the same options.
    pub fn rust(source: &str, libraries: &[&str], options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_str().unwrap();
        let edition = ["--edition", "2024", "-Dwarnings", "-L", at];
        // Link-time optimisation is for programs only.
        let for_library: Vec<&str> = options
            .iter()
            .copied()
            .filter(|option| !option.contains("lto"))
            .collect();
        let mut names = Vec::new();
        for (name, source) in std::iter::once(("exotrace_sdt", "src/lib.rs".into())).chain(
            libraries
                .iter()
                .map(|name| (*name, program(&format!("{name}.rs")))),
        ) {
            let source = package().join(source);
            let library = format!("{at}/lib{name}.rlib");
            let kind = [
                "--crate-type",
                "rlib",
                "--crate-name",
                name,
                source.to_str().unwrap(),
                "-o",
                &library,
            ];
            let known: Vec<&str> = names
                .iter()
                .flat_map(|name: &String| ["--extern", name.as_str()])
                .collect();
            output(
                "rustc",
                &[&edition, for_library.as_slice(), &known, &kind].concat(),
            );
            names.push(format!("{name}={library}"));
        }
        let source = package().join(source);
        let known: Vec<&str> = names
            .iter()
            .flat_map(|name| ["--extern", name.as_str()])
            .collect();
        Self::compile(
            "rustc",
            &[&edition, options, &known, &[source.to_str().unwrap()]].concat(),
        )
    }

    /// Returns the notes for systemtap and the like.
    pub fn sites(&self) -> Vec<Site> {
        let text = output("readelf", &["-n", &self.path]);
        let mut sites = Vec::new();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if !line.trim_start().starts_with("stapsdt ") {
                continue;
            }
            let mut field = |name: &str| {
                let line = lines.next().unwrap_or_default().trim_start();
                line.strip_prefix(name)
                    .unwrap_or_else(|| panic!("no {name} in {line:?}"))
                    .trim()
                    .to_owned()
            };
            let (provider, name, places, arguments) = (
                field("Provider:"),
                field("Name:"),
                field("Location:"),
                field("Arguments:"),
            );
            let mut numbers = places.split(", ").map(|part| {
                u64::from_str_radix(part.rsplit("0x").next().unwrap_or_default(), 16).unwrap()
            });
            let mut number = || numbers.next().unwrap();
            let (location, base, semaphore) = (number(), number(), number());
            sites.push(Site {
                provider,
                name,
                location,
                base,
                semaphore,
                arguments,
            });
        }
        sites
    }

    /// Returns the project's own notes, from the bytes of their section.
    pub fn notes(&self) -> Vec<Note> {
        let file = self.folder.path().join("section");
        let dump = format!(".note.exotrace={}", file.display());
        output(
            "objcopy",
            &["--dump-section", &dump, &self.path, "/dev/null"],
        );
        let bytes = std::fs::read(file).unwrap();
        let mut notes = Vec::new();
        let mut rest = bytes.as_slice();
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
        while !rest.is_empty() {
            let (owner, size, kind) = (
                number(rest) as usize,
                number(&rest[4..]) as usize,
                number(&rest[8..]),
            );
            assert_eq!(&rest[12..12 + owner], b"exotrace\0");
            let start = 12 + owner.next_multiple_of(4);
            let mut description = &rest[start..start + size];
            let mut addresses = Vec::new();
            if kind == 2 {
                let (numbers, strings) = description.split_at(16);
                addresses = numbers
                    .chunks(8)
                    .map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
                    .collect();
                description = strings;
            }
            let strings = description
                .strip_suffix(b"\0")
                .expect("a NUL ends the last string")
                .split(|&byte| byte == 0);
            let strings = strings
                .map(|text| String::from_utf8(text.to_vec()).unwrap())
                .collect();
            notes.push(Note {
                kind,
                addresses,
                strings,
            });
            rest = &rest[start + size.next_multiple_of(4)..];
        }
        notes
    }

    /// Returns the definitions' strings joined by `|`, sorted.
    pub fn definitions(&self) -> Vec<String> {
        let notes = self.notes().into_iter().filter(|note| note.kind == 1);
        sorted(notes.map(|note| note.strings.join("|")))
    }

    /// Returns the section header's address of `.stapsdt.base`.
    pub fn base(&self) -> u64 {
        let sections = output("readelf", &["-W", "-S", &self.path]);
        let line = sections
            .lines()
            .find(|line| line.contains(" .stapsdt.base "))
            .expect("a section .stapsdt.base");
        let address = line
            .split_whitespace()
            .skip_while(|word| *word != "PROGBITS")
            .nth(1)
            .unwrap();
        u64::from_str_radix(address, 16).unwrap()
    }

    /// Returns the instructions of a function, without addresses and the padding at its end.
    pub fn instructions(&self, function: &str) -> Vec<String> {
        let only = format!("--disassemble={function}");
        let text = output(
            "objdump",
            &[
                "-d",
                "--no-show-raw-insn",
                "--no-addresses",
                &only,
                &self.path,
            ],
        );
        let heading = format!("<{function}>:");
        let lines = text.lines().skip_while(|line| *line != heading).skip(1);
        let lines = lines.map(str::trim).take_while(|line| !line.is_empty());
        let mut instructions: Vec<String> = lines
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        let end = instructions
            .iter()
            .rposition(|line| line.starts_with("ret"))
            .expect("a function that returns");
        instructions.truncate(end + 1);
        instructions
    }

    /// Returns the instructions of a function without their operands: a probe keeps values where
    /// they are, so that others move.
    pub fn operations(&self, function: &str) -> Vec<String> {
        let instructions = self.instructions(function);
        instructions
            .iter()
            .map(|line| line.split(' ').next().unwrap_or_default().to_owned())
            .collect()
    }

    /// Returns gdb's output for these commands.
    pub fn gdb(&self, commands: &[&str]) -> String {
        let mut arguments = vec!["-nx", "-batch"];
        for command in commands {
            arguments.extend(["-ex", command]);
        }
        arguments.push(&self.path);
        output("gdb", &arguments)
    }

    /// Checks gdb's view of the example `icmp`, in either language, whose first probe's note has
    /// `name`.
    pub fn check_example(&self, name: &str) {
        self.check_sites();
        let shown = self.gdb(&[
            &format!("break -probe-stap icmp:{name}"),
            "run 3",
            "continue",
            // The second packet: type 3, code 1.
            "printf \"values %d: %d %d\\n\", $_probe_argc, *(unsigned short *)$_probe_arg0, $_probe_arg1",
            "delete",
            "continue",
        ]);
        assert!(
            shown.contains("values 2: 259 1\n") && shown.contains("icmp: 3 packets"),
            "{shown}"
        );
        assert_eq!(
            self.definitions(),
            [
                "icmp||unreach|pkt-receive|struct icmp *||unsigned long|",
                "icmp|||receive|struct icmp *|struct icmp_hdr_dt *"
            ]
        );
    }

    /// Returns name and sizes of each site, sorted.
    pub fn sizes(&self) -> Vec<String> {
        let sites = self.sites().into_iter();
        sorted(sites.map(|site| format!("{} {}", site.name, site.sizes())))
    }

    /// Checks that sites name their probes: provider, module, function and name of some.
    pub fn check_names(&self, expected: &[[&str; 4]]) {
        let notes = self.notes();
        for expected in expected {
            assert!(
                notes
                    .iter()
                    .any(|note| note.kind == 2 && note.strings == expected),
                "{expected:?} in {notes:?}"
            );
        }
    }

    /// Checks what all programs' notes have in common, regardless of compiler and linking: see the
    /// assertions.
    pub fn check_sites(&self) {
        let (sites, base) = (self.sites(), self.base());
        let own: Vec<Note> = self
            .notes()
            .into_iter()
            .filter(|note| note.kind == 2)
            .collect();
        assert!(!sites.is_empty());
        assert_eq!(sites.len(), own.len(), "each site has both notes");
        for (site, own) in sites.iter().zip(&own) {
            assert_eq!(
                site.base, base,
                "no prelink correction in a program fresh from the linker: {site:?}"
            );
            assert_eq!(
                own.addresses,
                [site.location, site.base],
                "both notes are of one place: {site:?}"
            );
            assert_eq!(own.strings.len(), 4, "{own:?}");
            assert_eq!(own.strings[0], site.provider);
            assert_eq!(own.strings[3], site.name.replace("__", "-"));
        }
        let places: Vec<String> = sites
            .iter()
            .map(|site| format!("x/i {:#x}", site.location))
            .collect();
        let shown = self.gdb(&places.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(
            shown
                .lines()
                .filter(|line| line.trim_end().ends_with("\tnop"))
                .count(),
            sites.len(),
            "{shown}"
        );
        let listed = self.gdb(&["info probes stap"]);
        for site in &sites {
            let place = format!("{:#018x}", site.location);
            let mut lines = listed.lines().filter(|line| line.contains(&place));
            assert!(
                lines.any(|line| line.split_whitespace().take(3).eq([
                    "stap",
                    &site.provider,
                    &site.name
                ])),
                "{site:?} in {listed}"
            );
        }
    }
}

/// Returns lines sorted, for comparison.
pub fn sorted<Line: ToString>(lines: impl Iterator<Item = Line>) -> Vec<String> {
    let mut lines: Vec<String> = lines.map(|line| line.to_string()).collect();
    lines.sort();
    lines
}

/// Returns a file of `tests/programs`.
pub fn program(name: &str) -> String {
    PathBuf::from("tests/programs")
        .join(name)
        .to_str()
        .unwrap()
        .to_owned()
}
