//! Prints the symbols of a kernel image like nm(1), or those similar to one name: `ksyms VMLINUX
//! [NAME]`.

use std::error::Error;
use std::io::{BufWriter, Write};
use std::time::Instant;

use introspect::kernel::image::KernelImage;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: ksyms VMLINUX [NAME]")?;
    let bytes = std::fs::read(&path)?;
    let start = Instant::now();
    let image = KernelImage::parse(bytes)?;
    let parsed = start.elapsed();
    let symbols = image.symbols()?;
    let read = start.elapsed() - parsed;
    eprintln!("{}", image.banner().unwrap_or("no banner"));
    eprintln!(
        "{} symbols; image {parsed:?}, symbols {read:?}",
        symbols.len()
    );
    eprintln!(
        "entry {:#x}, PVH entry {:#x?}",
        image.entry(),
        image.pvh_entry()
    );
    let mut out = BufWriter::new(std::io::stdout().lock());
    match args.next() {
        Some(name) => match symbols.address_of(&name) {
            Some(address) => writeln!(out, "{address:#x}")?,
            None => {
                let start = Instant::now();
                let near = symbols.nearest_names(&name, 5);
                writeln!(
                    out,
                    "{name} does not exist; near: {near:?} ({:?})",
                    start.elapsed()
                )?;
            }
        },
        None => {
            for symbol in symbols.iter() {
                writeln!(
                    out,
                    "{:016x} {} {}",
                    symbol.address, symbol.kind, symbol.name
                )?;
            }
        }
    }
    Ok(())
}
