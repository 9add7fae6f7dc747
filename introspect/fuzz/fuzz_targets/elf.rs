//! Programs, libraries and kernels: headers, symbols, build id.
#![no_main]

use introspect::kernel::image::KernelImage;
use introspect::user::file_bytes::{FileBytes, Missing, MissingCause};
use introspect::user::object_file::ObjectFile;
use introspect::user::symbols::FunctionSymbols;
use libfuzzer_sys::fuzz_target;

/// A file of which the input is all there is.
struct Input<'i>(&'i [u8]);

impl FileBytes for Input<'_> {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        let start = usize::try_from(offset).ok();
        let range = start.and_then(|start| Some(start..start.checked_add(buf.len())?));
        match range.and_then(|range| self.0.get(range)) {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => {
                return Err(Missing {
                    offset,
                    length: buf.len() as u64,
                    cause: MissingCause::PastEnd { size: self.size() },
                });
            }
        }
        Ok(())
    }
}

fuzz_target!(|bytes: &[u8]| {
    let input = Input(bytes);
    if let Ok(object) = ObjectFile::parse(&input) {
        let _ = object.build_id();
        for section in object.sections() {
            let _ = object.section_bytes(section, 1 << 16);
        }
        let symbols = FunctionSymbols::read(&object);
        for function in symbols.iter() {
            let _ = symbols.resolve(function.address);
            assert!(symbols.find(function.name).is_some());
        }
    }
    if let Ok(image) = KernelImage::parse(bytes.to_vec()) {
        let _ = image.symbols();
        let _ = image.btf();
        for segment in image.segments() {
            let _ = image.read_at_vaddr(segment.virtual_address, 64);
        }
    }
});
