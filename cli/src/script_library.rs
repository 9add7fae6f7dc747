//! The library of translators: structures that look the same whatever the kernel's own are called
//! (the role of /usr/lib/dtrace).
//!
//! Some come with exotrace; a folder given with `-L` adds more, in files ending in `.d`. They are
//! texts of the same language, of which structures and translators are used. A translator of a
//! script or a folder precedes one of the same name that came earlier.

use crate::protocol::script::ScriptRequest;
use bt::diagnostic::Diagnostic;
use std::fs;
use std::path::{Path, PathBuf};

use bt::ast::{Dialect, Script};
use bt::parse;

use crate::protocol::error::{ErrorKind, RequestError};

/// The largest accepted file, in bytes.
const LARGEST: u64 = 256 << 10;

/// A folder or file of the library cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The system cannot read it.
    #[error("library {path}: {source}", path = path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is too large.
    #[error("library {path}: {found} bytes; at most {LARGEST} are taken", path = path.display())]
    Large {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        found: u64,
    },
}

/// Returns the texts of a folder's files, by name.
///
/// # Errors
/// If the folder or a file cannot be read.
pub fn read(folder: &Path) -> Result<Vec<(String, String)>, LibraryError> {
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| LibraryError::Read { path, source }
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed(folder))? {
        let path = entry.map_err(failed(folder))?.path();
        if path.extension().is_some_and(|ending| ending == "d") {
            files.push(path);
        }
    }
    files.sort();
    let mut texts = Vec::new();
    for path in files {
        let size = fs::metadata(&path).map_err(failed(&path))?.len();
        if size > LARGEST {
            return Err(LibraryError::Large { path, found: size });
        }
        let text = fs::read_to_string(&path).map_err(failed(&path))?;
        texts.push((path.display().to_string(), text));
    }
    Ok(texts)
}

/// Adds the library's structures and translators to the script.
///
/// # Errors
/// If one of the texts has errors.
pub fn put_before(script: &mut Script, texts: &[(String, String)]) -> Result<(), RequestError> {
    let own = bt::library::TEXTS.iter().map(|(n, t)| (*n, *t));
    let given = texts
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()));
    // The first match wins: the script's own, then a folder's, then exotrace's.
    for (name, text) in given.chain(own) {
        let parsed = parse::parse(text.as_bytes(), Dialect::Normal);
        let parsed = parsed.map_err(|wrong| refuse(name, text.as_bytes(), &wrong))?;
        script.translators.extend(parsed.translators);
        for structure in parsed.structures {
            if !script
                .structures
                .iter()
                .any(|known| known.name == structure.name)
            {
                script.structures.push(structure);
            }
        }
    }
    Ok(())
}

/// Returns the error that shows all errors of a script, one after the other.
fn refuse(file: &str, script: &[u8], wrong: &[Diagnostic]) -> RequestError {
    let shown: String = wrong.iter().map(|d| d.render(file, script)).collect();
    RequestError::new(ErrorKind::Script, shown)
}

impl ScriptRequest {
    /// Parses the script and adds its library.
    ///
    /// # Errors
    /// If the script or its library has errors.
    pub fn parse(&self) -> Result<Script, RequestError> {
        let script = parse::parse(self.text.as_bytes(), self.dialect());
        let mut script = script.map_err(|wrong| self.refuse(&wrong))?;
        if !self.strict {
            put_before(&mut script, &self.library)?;
        }
        Ok(script)
    }

    /// Returns the error that shows the errors of this script.
    pub fn refuse(&self, wrong: &[Diagnostic]) -> RequestError {
        refuse(&self.file, self.text.as_bytes(), wrong)
    }
}
