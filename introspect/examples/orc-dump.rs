//! Prints a kernel image's unwind information like `objtool --dump=orc` of Linux 6.1: `orc-dump
//! VMLINUX`.

use std::error::Error;
use std::io::{BufWriter, Write};

use introspect::kernel::image::KernelImage;
use introspect::stack::orc::OrcCopy;
use introspect::stack::orc_versions::{OrcEntry, OrcFormat, OrcType};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: orc-dump VMLINUX")?;
    let image = KernelImage::parse(std::fs::read(&path)?)?;
    let btf = image.btf().map_err(|error| eprintln!("{error}")).ok();
    let format = OrcFormat::of(btf.as_ref(), image.banner())?;
    let start = std::time::Instant::now();
    let table = OrcCopy::of_image(&image, &image.symbols()?, format)?;
    eprintln!(
        "{format:?}, {} records, {:?}",
        table.iter().len(),
        start.elapsed()
    );
    let mut out = BufWriter::new(std::io::stdout().lock());
    for (address, entry) in table.iter() {
        match entry {
            Some(entry) => writeln!(out, "{address:x}: {}", text(&entry))?,
            None => writeln!(out, "{address:x}: unknown")?,
        }
    }
    Ok(())
}

fn text(entry: &OrcEntry) -> String {
    let kind = match entry.kind {
        OrcType::Registers => "regs",
        OrcType::HardwareFrame => "regs (partial)",
        // In the older format, records without content and at the stack's end have the number of
        // this one.
        OrcType::Call | OrcType::EndOfStack | OrcType::Undefined => "call",
    };
    format!(
        "sp:{} bp:{} type:{kind} end:{}",
        entry.sp.place(entry.sp_offset),
        entry.bp.place(entry.bp_offset),
        u8::from(entry.kind == OrcType::EndOfStack)
    )
}
