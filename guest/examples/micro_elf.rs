//! Writes the micro guest's ELF file: `cargo run -p exotrace-guest --example micro_elf FILE`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: micro_elf FILE");
        return ExitCode::from(2);
    };
    match std::fs::write(&path, guest::micro::elf()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}
