//! Finds the kernel in the memory of a core file, without its image: `live-kernel CORE [VMLINUX]`.
//! If the image is passed, its symbols, types and banner must be the same.

use std::error::Error;
use std::time::Instant;

use introspect::PausedMemory;
use introspect::core_file::CoreFile;
use introspect::kernel::image::KernelImage;
use introspect::kernel::module_symbols::ModuleSymbolsLayout;
use introspect::kernel::modules::ModulesLayout;
use introspect::kernel::running::RunningKernel;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: live-kernel CORE [VMLINUX]")?;
    let core = CoreFile::parse(std::fs::read(&path)?)?;
    let paused = PausedMemory::new(&core);
    let mut last = None;
    for cpu in core.cpus() {
        let view = paused.view(cpu.address_space());
        let start = Instant::now();
        let found = RunningKernel::find(view, cpu, 0)?;
        println!(
            "CPU at {:#x}: {} symbols in {:?}",
            cpu.general.rip,
            found.symbols.len(),
            start.elapsed()
        );
        last = Some(found);
    }
    let live = last.ok_or("the core file has no CPU")?;
    println!("{}", live.banner.as_deref().unwrap_or("no banner"));
    let id = live
        .build_id
        .as_ref()
        .map_or("none".to_owned(), |id| id.to_string());
    println!("slide {:x?}, build id {id}", live.slide);
    match &live.types {
        Ok(btf) => println!("{} types", btf.len()),
        Err(error) => println!("{error}"),
    }
    if let Some(path) = args.next() {
        compare(&live, &KernelImage::parse(std::fs::read(path)?)?)?;
    }
    let btf = live.types?;
    let view = paused.view(live.space);
    let layout = match ModulesLayout::new(&btf, &live.symbols) {
        Ok(layout) => layout,
        Err(error) => {
            println!("{error}");
            return Ok(());
        }
    };
    let start = Instant::now();
    let modules = layout.modules(view);
    if let Some(error) = modules.error {
        println!("{error}");
    }
    let (loaded, errors) = ModuleSymbolsLayout::new(&btf)?.read_all(view, modules.items);
    println!("modules read in {:?}", start.elapsed());
    for error in errors {
        println!("{error}");
    }
    for module in loaded.modules() {
        let (of, symbols) = (&module.module, module.symbols().len());
        let base = of.base().unwrap_or_default();
        println!("{} {} {base:#x}, {symbols} symbols", of.name, of.state);
        for range in &of.ranges {
            let (start, end) = (range.addresses.start, range.addresses.end);
            println!("  {start:#x}..{end:#x} {:?}", range.kind);
        }
        if let Some(function) = module.text_functions().last() {
            let found = loaded.resolve(function.symbol.address.wrapping_add(1));
            let found = found.map(|(symbol, offset)| format!("{symbol}+{offset:#x}"));
            println!("  last: {found:?} of {:#x}", function.size);
        }
    }
    Ok(())
}

fn compare(live: &RunningKernel, image: &KernelImage) -> Result<(), Box<dyn Error>> {
    let linked = image.symbols()?;
    let slide = live.slide.unwrap_or(0);
    let expected = linked.with_slide(slide);
    let different = expected
        .iter()
        .zip(live.symbols.iter())
        .filter(|(a, b)| a != b);
    println!(
        "{} symbols in the image, {} differ",
        expected.len(),
        different.count() + expected.len().abs_diff(live.symbols.len())
    );
    let highest = expected.iter().last().map_or(0, |s| s.address);
    let lowest = expected
        .iter()
        .find(|s| !s.absolute)
        .map_or(0, |s| s.address);
    let places = (lowest..highest).step_by(0x777);
    let wrong = places.filter(|at| expected.resolve(*at) != live.symbols.resolve(*at));
    println!("{} addresses resolve otherwise", wrong.count());
    let types = image.btf().map(|btf| btf.len());
    println!(
        "types: image {types:?}; banner the same: {}",
        image.banner() == live.banner.as_deref()
    );
    Ok(())
}
