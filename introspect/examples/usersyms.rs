//! Prints the functions of a program or library of the host, or the meaning of one name or address:
//! `usersyms FILE [NAME|0xADDRESS]`.

use std::error::Error;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use introspect::user::demangle::demangle;
use introspect::user::object_file::ObjectFile;
use introspect::user::symbols::FunctionSymbols;
use introspect::user::symfs::HostFile;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: usersyms FILE [NAME|0xADDRESS]";
    let path = args.next().ok_or(usage)?;
    let file = HostFile::open(Path::new(&path))?;
    let start = Instant::now();
    let object = ObjectFile::parse(&file)?;
    let symbols = FunctionSymbols::read(&object);
    let read = start.elapsed();
    let id = object.build_id()?;
    let id = id.map_or_else(|| "none".to_owned(), |id| id.to_string());
    eprintln!(
        "{} functions of {:?} in {read:?}; build id {id}",
        symbols.len(),
        symbols.tables()
    );
    for lost in symbols.lost() {
        eprintln!("lost: {lost}");
    }
    let mut out = BufWriter::new(std::io::stdout().lock());
    match args.next() {
        Some(address) if address.starts_with("0x") => {
            let address = u64::from_str_radix(address.trim_start_matches("0x"), 16)?;
            match symbols.resolve(address) {
                Some((function, offset)) => {
                    writeln!(out, "{}+{offset:#x}", demangle(function.name))?;
                }
                None => writeln!(out, "no function")?,
            }
        }
        Some(name) => match symbols.find(&name) {
            Some(function) => writeln!(out, "{:#x}", function.address)?,
            None => writeln!(out, "near: {:?}", symbols.nearest_names(&name, 5))?,
        },
        None => {
            for f in symbols.iter() {
                writeln!(
                    out,
                    "{:016x} {:x} {:?} {:?} {}",
                    f.address, f.size, f.kind, f.binding, f.name
                )?;
            }
        }
    }
    Ok(())
}
