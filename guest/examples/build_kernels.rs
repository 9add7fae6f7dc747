//! Builds, or finds, kernels and prints where they are: `build_kernels [small|rich|pc]...`.

use guest::build::kernel;
use guest::{Cache, Terminal};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cache = Cache::open()?;
    let progress = Terminal::new();
    for name in std::env::args().skip(1) {
        let kernel = match name.as_str() {
            "small" => kernel::small(&cache, &progress)?,
            "rich" => kernel::rich(&cache, &progress)?,
            "pc" => kernel::pc(&cache, &progress)?,
            other => {
                let wrong = format!("no kernel is called {other}; small, rich and pc are");
                return Err(wrong.into());
            }
        };
        println!("{}", kernel.vmlinux().display());
    }
    Ok(())
}
