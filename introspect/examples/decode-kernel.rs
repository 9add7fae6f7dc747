//! Measures the time to load a kernel's symbols and types from its image and from a cache:
//! `decode-kernel VMLINUX`.

use std::error::Error;
use std::time::{Duration, Instant};

use introspect::kernel::cached::DecodedKernel;
use introspect::kernel::image::KernelImage;
use introspect::kernel::shared_bytes::SharedBytes;

const ROUNDS: usize = 9;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args()
        .nth(1)
        .ok_or("usage: decode-kernel VMLINUX")?;
    let image = KernelImage::parse(std::fs::read(&path)?)?;
    let symbols = measure("symbols from the image", || image.symbols())?;
    let btf = measure("types from the image", || image.btf()).ok();
    let kernel = DecodedKernel {
        symbols,
        btf,
        banner: image.banner().map(str::to_owned),
        panic_finder: None,
    };
    let bytes = kernel.to_bytes(b"key");
    println!(
        "{} symbols, cache of {} bytes",
        kernel.symbols.len(),
        bytes.len()
    );
    let shared = SharedBytes::new(bytes);
    let cached = measure("both from a cache in memory", || {
        DecodedKernel::from_bytes(b"key", shared.clone())
    })?;
    assert!(
        cached.symbols.iter().eq(kernel.symbols.iter()),
        "same symbols"
    );
    let file = std::env::temp_dir().join(format!("decode-kernel.{}", std::process::id()));
    std::fs::write(&file, shared.as_bytes())?;
    measure("both from a cache file, read whole", || {
        let bytes = std::fs::read(&file).map_err(|error| error.to_string())?;
        DecodedKernel::from_bytes(b"key", SharedBytes::new(bytes)).map_err(|e| e.to_string())
    })?;
    std::fs::remove_file(&file)?;
    Ok(())
}

/// Prints the median of some runs, and returns the last result.
fn measure<T, E>(what: &str, mut run: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let mut times: Vec<Duration> = Vec::with_capacity(ROUNDS);
    loop {
        let start = Instant::now();
        let result = run();
        times.push(start.elapsed());
        if times.len() == ROUNDS {
            times.sort_unstable();
            let (fastest, median) = (times.first(), times.get(ROUNDS / 2));
            println!(
                "{what}: {:?}, at best {:?}",
                median.copied().unwrap_or_default(),
                fastest.copied().unwrap_or_default()
            );
            return result;
        }
    }
}
