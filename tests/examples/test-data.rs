//! Makes the folder that test programs need on another machine, where `EXOTRACE_TEST_DATA` names
//! it.
//!
//! `cargo run -p exotrace-tests --example test-data -- FOLDER`

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args_os()
        .nth(1)
        .ok_or("give the folder to fill")?;
    support::compiled::ship(Path::new(&folder))?;
    Ok(())
}
