//! Queries a file of Parquet with DuckDB.

use std::path::Path;
use std::process::Command;

use super::{Package, output};

const DUCKDB: Package = Package {
    requirements: &["duckdb==2.0.1"],
    entry: "second-opinion-duckdb-2.0.1",
};
/// Prints the rows of a query, a line each, with values between bars.
const SCRIPT: &str = "\
import duckdb, sys
for row in duckdb.connect().execute(sys.argv[2].replace('?', repr(sys.argv[1]))).fetchall():
    print('|'.join('' if value is None else str(value) for value in row))
";

/// Returns the rows of a query, in which `?` is the file's path. Values are joined by bars.
///
/// # Panics
/// If the file or the query is faulty.
pub fn query(file: &Path, query: &str) -> Vec<String> {
    let mut command = Command::new(DUCKDB.installed().join("bin/python3"));
    command.args(["-c", SCRIPT]).arg(file).arg(query);
    let what = format!("DuckDB on {}: {query}", file.display());
    let text = output(&what, &mut command);
    text.lines().map(str::to_owned).collect()
}
