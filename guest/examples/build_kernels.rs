//! Builds, or finds, the two kernels and prints where they are: `build_kernels [small|rich]...`.

use guest::build::kernel;
use guest::{Cache, Terminal};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cache = Cache::open()?;
    let progress = Terminal::new();
    for name in std::env::args().skip(1) {
        let kernel = match name.as_str() {
            "small" => kernel::small(&cache, &progress)?,
            "rich" => kernel::rich(&cache, &progress)?,
            other => return Err(format!("no kernel is called {other}; small and rich are").into()),
        };
        println!("{}", kernel.vmlinux().display());
    }
    Ok(())
}
