//! Makes the saved memory image of the tests: `shrink-core CORE VMLINUX PROC_FOLDER OUT`.
//!
//! `cargo run --release -p exotrace-tests --example save-core -- CORE FOLDER` makes CORE and the
//! folder with the guest's own `/proc` texts. `exotrace guest small` names the kernel. This program
//! writes three files. `OUT.core.xz` has the pages that are read to find the kernel and to query
//! everything about every process. `OUT.btf.xz` has the kernel's types, which this kernel keeps
//! only in its file. `OUT.expect` has the texts. `OUT` of the tests is
//! `introspect/tests/images/small-6.1`.

#[path = "../tests/answers/mod.rs"]
mod answers;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use answers::Guest;
use introspect::core_file::{CoreFile, write_core};
use introspect::kernel::btf::Btf;
use introspect::kernel::image::KernelImage;
use introspect::kernel::running::RunningKernel;
use introspect::x86_64::PAGE;
use introspect::{Gpa, Gva, MemoryView, PausedMemory, PhysicalMemory, PhysicalReadError};
use lzma_rust2::{XzOptions, XzWriter};

/// The compression level of xz(1), `-9`.
const PRESET: u32 = 9;

/// The core file's memory, with a record of the pages read. Pages of zeros, which the file omits,
/// are RAM here.
struct Recorder<'c> {
    core: &'c CoreFile,
    ram: Range<u64>,
    pages: RefCell<BTreeSet<u64>>,
}

impl Recorder<'_> {
    /// Notes the pages of a range of kernel memory as read.
    fn keep(&self, view: MemoryView<'_>, range: Range<u64>) -> Result<(), Box<dyn Error>> {
        for address in (range.start & !(PAGE - 1)..range.end).step_by(PAGE as usize) {
            let (gpa, _) = view.locate(Gva(address))?;
            self.pages.borrow_mut().insert(gpa.0 / PAGE);
        }
        Ok(())
    }

    fn page(&self, number: u64) -> [u8; PAGE as usize] {
        let mut page = [0; PAGE as usize];
        // A page that is not in the file is one of zeros.
        if self
            .core
            .read_physical(Gpa(number * PAGE), &mut page)
            .is_err()
        {
            page.fill(0);
        }
        page
    }
}

impl PhysicalMemory for Recorder<'_> {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        let length = buf.len();
        let end = address.0.saturating_add(length as u64);
        if address.0 < self.ram.start || end > self.ram.end {
            return Err(PhysicalReadError { address, length });
        }
        for number in address.0 / PAGE..end.div_ceil(PAGE) {
            self.pages.borrow_mut().insert(number);
            let page = self.page(number);
            let start = address.0.max(number * PAGE);
            let stop = end.min((number + 1) * PAGE);
            let to = (start - address.0) as usize..(stop - address.0) as usize;
            let from = (start % PAGE) as usize..;
            if let (Some(to), Some(from)) = (buf.get_mut(to), page.get(from)) {
                let count = to.len();
                to.copy_from_slice(from.get(..count).unwrap_or_default());
            }
        }
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        vec![self.ram.clone()]
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [core, vmlinux, texts, out] = arguments.as_slice() else {
        return Err("usage: shrink-core CORE VMLINUX PROC_FOLDER OUT".into());
    };
    let core = CoreFile::parse(fs::read(core)?)?;
    let image = KernelImage::parse(fs::read(vmlinux)?)?;
    let types = image.btf_bytes().ok_or("the kernel's file has no types")?;
    let btf = Btf::parse(types)?;
    let end = core.ram().last().map_or(0, |range| range.end);
    let recorder = Recorder {
        core: &core,
        ram: 0..end,
        pages: RefCell::default(),
    };
    let guest = Guest::find(&recorder, core.cpus(), &btf)?;
    // The search for the kernel reads all memory. The next search needs only the kernel itself.
    recorder.pages.borrow_mut().clear();
    keep_kernel(&recorder, &guest.kernel)?;
    let guest = Guest::new(&recorder, guest.kernel, core.cpus(), &btf)?;
    let answers = guest.answers(&recorder)?;
    let small = kept(&recorder)?;
    if Guest::find(&small, small.cpus(), &btf)?.answers(&small)? != answers {
        return Err("the smaller image gives other answers".into());
    }
    eprintln!(
        "{} pages of {:#x}",
        recorder.pages.borrow().len(),
        end / PAGE
    );
    pack(&format!("{out}.core.xz"), &written(&recorder)?)?;
    pack(&format!("{out}.btf.xz"), types)?;
    let mut expected = BTreeMap::new();
    read_texts(Path::new(texts), "", &mut expected)?;
    let expected: String = expected
        .iter()
        .map(|(path, text)| format!("==> {path} <==\n{text}\n"))
        .collect();
    fs::write(format!("{out}.expect"), expected)?;
    Ok(())
}

/// Keeps the pages needed to find the kernel: its symbols, which are among its constants, and its
/// identity.
fn keep_kernel(recorder: &Recorder<'_>, kernel: &RunningKernel) -> Result<(), Box<dyn Error>> {
    let cpus = recorder.core.cpus();
    for cpu in cpus {
        let paused = PausedMemory::new(recorder);
        let view = paused.view(cpu.address_space());
        recorder.keep(view, cpu.idt_base..cpu.idt_base + PAGE)?;
        for (from, to) in [
            ("__start_rodata", "__end_rodata"),
            ("__start_notes", "__stop_notes"),
            ("init_top_pgt", "init_top_pgt"),
        ] {
            let symbol = |name| {
                let found = kernel.symbols.address_of(name);
                found.ok_or_else(|| format!("the kernel names no {name}"))
            };
            recorder.keep(view, symbol(from)?..symbol(to)? + 1)?;
        }
        // The page tables that map the kernel.
        let paused = PausedMemory::new(recorder);
        for table in (0..1 << 30).step_by(1 << 21) {
            let at = Gva(0xffff_ffff_8000_0000 + table);
            let _ = paused.view(cpu.address_space()).locate(at);
            let _ = paused.view(kernel.space).locate(at);
        }
    }
    Ok(())
}

/// Returns the pages kept so far.
fn kept(recorder: &Recorder<'_>) -> Result<CoreFile, Box<dyn Error>> {
    Ok(CoreFile::parse(written(recorder)?)?)
}

fn written(recorder: &Recorder<'_>) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for number in recorder.pages.borrow().iter() {
        let page = recorder.page(*number);
        match runs.last_mut() {
            Some((start, bytes)) if *start + bytes.len() as u64 == number * PAGE => {
                bytes.extend(page);
            }
            _ => runs.push((number * PAGE, page.to_vec())),
        }
    }
    let mut file = Vec::new();
    let ranges = runs
        .iter()
        .map(|(gpa, bytes)| (Gpa(*gpa), bytes.as_slice()));
    write_core(&mut file, recorder.core.cpus(), ranges)?;
    Ok(file)
}

fn pack(path: &str, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let mut packed = XzWriter::new(Vec::new(), XzOptions::with_preset(PRESET))?;
    packed.write_all(bytes)?;
    let packed = packed.finish()?;
    eprintln!("{path}: {} bytes, packed {}", bytes.len(), packed.len());
    Ok(fs::write(path, packed)?)
}

/// Reads all files of a folder, by their paths below it.
fn read_texts(
    folder: &Path,
    prefix: &str,
    texts: &mut BTreeMap<String, String>,
) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            read_texts(&entry.path(), &format!("{name}/"), texts)?;
        } else {
            texts.insert(name, answers::escaped(&fs::read(entry.path())?));
        }
    }
    Ok(())
}
