//! Saves the memory and CPUs of a crowded guest as a core file, with the guest's own /proc beside
//! it.
//!
//! `cargo run --release -p exotrace-tests --example save-core -- CORE FOLDER`

use std::error::Error;
use std::fs;
use std::path::Path;

use introspect::core_file::write_core;
use introspect::{Gpa, PhysicalMemory};
use support::crowd;

const PAGE: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [core, folder] = arguments.as_slice() else {
        return Err("usage: save-core CORE FOLDER".into());
    };
    let Some(host) = support::host() else {
        return Ok(());
    };
    let shell = crowd::guest(host);
    eprintln!("the crowd stands");
    let texts = crowd::proc_texts(&shell, crowd::Asked::Everything);
    for (path, text) in texts.iter() {
        let path = Path::new(folder).join(path);
        fs::create_dir_all(path.parent().unwrap_or(Path::new(folder)))?;
        fs::write(path, text)?;
    }
    let machine = shell.linux.machine();
    let paused = machine.pause();
    let cpus = shell.linux.cpus(&paused);
    let mut pages = Vec::new();
    for range in machine.ram().ram() {
        for gpa in range.step_by(PAGE) {
            let mut page = vec![0; PAGE];
            machine.ram().read_physical(Gpa(gpa), &mut page)?;
            if page.iter().any(|byte| *byte != 0) {
                pages.push((gpa, page));
            }
        }
    }
    // Runs of pages.
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for (gpa, page) in pages {
        match runs.last_mut() {
            Some((start, bytes)) if *start + bytes.len() as u64 == gpa => bytes.extend(page),
            _ => runs.push((gpa, page)),
        }
    }
    let mut file = fs::File::create(core)?;
    let ranges = runs
        .iter()
        .map(|(gpa, bytes)| (Gpa(*gpa), bytes.as_slice()));
    write_core(&mut file, &cpus, ranges)?;
    eprintln!("{} runs of pages, {} CPUs", runs.len(), cpus.len());
    Ok(())
}
