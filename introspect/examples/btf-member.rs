//! Prints the offsets of struct members and the parameters of functions: `btf-member
//! VMLINUX|BTF_FILE (STRUCT.MEMBER | FUNCTION)...`.

use std::error::Error;
use std::time::Instant;

use introspect::kernel::btf::Btf;
use introspect::kernel::image::KernelImage;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args
        .next()
        .ok_or("usage: btf-member VMLINUX|BTF_FILE (STRUCT.MEMBER | FUNCTION)...")?;
    let bytes = std::fs::read(&path)?;
    let start = Instant::now();
    let btf = match bytes.starts_with(b"\x7fELF") {
        true => KernelImage::parse(bytes)?.btf()?,
        false => Btf::parse(&bytes)?,
    };
    eprintln!("{} types, read in {:?}", btf.len(), start.elapsed());
    for name in args {
        if name.contains('.') {
            match btf.member(&name) {
                Ok(m) => println!(
                    "{name}: byte {} bit {} size {} {}",
                    m.byte_offset, m.bit_offset, m.size, m.type_name
                ),
                Err(error) => println!("{error}"),
            }
        } else {
            match btf.func_proto_args(&name) {
                Ok(prototype) => {
                    let list = prototype
                        .parameters
                        .iter()
                        .map(|p| format!("{} {}", p.type_name, p.name));
                    let mut list: Vec<String> = list.collect();
                    list.extend(prototype.variadic.then(|| "...".to_owned()));
                    println!("{} {name}({})", prototype.returns, list.join(", "));
                }
                Err(error) => println!("{error}"),
            }
        }
    }
    Ok(())
}
