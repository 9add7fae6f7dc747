//! Fetches, or finds, Debian's cloud kernel and prints where it is: `fetch_cloud_kernel [VERSION]`,
//! such as 6.12.

use guest::build::debian;
use guest::{Cache, Terminal};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let version = std::env::args().nth(1);
    let kernel = debian::cloud_kernel(&Cache::open()?, version.as_deref(), &Terminal::new())?;
    println!(
        "{}\n{}\n{}",
        kernel.release,
        kernel.image.display(),
        kernel.modules.display()
    );
    Ok(())
}
