//! Programs, libraries and kernels: headers, symbols and their names, build id, static probes. Also
//! the names of generated code.
#![no_main]

use introspect::kernel::image::KernelImage;
use introspect::user::demangle::demangle;
use introspect::user::object_file::ObjectFile;
use introspect::user::perf_map::PerfMap;
use introspect::user::static_probes::StaticSites;
use introspect::user::symbols::FunctionSymbols;
use introspect::x86_64::GeneralRegisters;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(object) = ObjectFile::parse(&bytes) {
        let _ = object.build_id();
        for section in object.sections() {
            let _ = object.section_bytes(section, 1 << 16);
        }
        for site in StaticSites::read(&object).sites {
            for argument in &site.arguments {
                let memory = |_: u64, buffer: &mut [u8]| {
                    buffer.fill(0xff);
                    true
                };
                let value = argument.value(&GeneralRegisters::default(), u64::MAX, &memory);
                assert!(value.is_none() || argument.error().is_none());
            }
        }
        let symbols = FunctionSymbols::read(&object);
        for function in symbols.iter() {
            let _ = symbols.resolve(function.address);
            assert!(symbols.find(function.name).is_some());
            let _ = demangle(function.name);
        }
    }
    let map = PerfMap::parse(bytes);
    assert!(map.len() <= bytes.len());
    let _ = map.resolve(u64::MAX / 2);
    if let Ok(image) = KernelImage::parse(bytes.to_vec()) {
        let _ = image.symbols();
        let _ = image.btf();
        for segment in image.segments() {
            let _ = image.read_at_vaddr(segment.virtual_address, 64);
        }
    }
});
