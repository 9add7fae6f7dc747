//! The argument of `--disk`: the image file, and whether the guest may write to it.

use std::path::PathBuf;
use std::str::FromStr;

/// A disk in its requested form: `FILE` or `path=FILE`, each with `,ro` after it if the guest must
/// not change it. A plain file's name has no comma; `readonly=on` is other machines' name for `ro`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The image.
    pub path: PathBuf,
    /// Set if the guest may only read it.
    pub read_only: bool,
}

/// The argument is not in a disk's form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The option is unknown.
    #[error(
        "unknown option {0:?}: expected FILE or path=FILE, followed by `,ro` for a read-only disk"
    )]
    Option(String),
    /// The file is missing.
    #[error("no file: expected FILE or path=FILE")]
    NoFile,
    /// There is more than one file.
    #[error("more than one file: give --disk once for each disk")]
    SecondFile,
}

impl FromStr for Disk {
    type Err = DiskError;

    fn from_str(text: &str) -> Result<Self, DiskError> {
        let mut path = None;
        let mut read_only = false;
        for (index, word) in text.split(',').enumerate() {
            let named = word.split_once('=');
            let file = match named {
                Some(("path", file)) => file,
                Some(("readonly", "on")) => {
                    read_only = true;
                    continue;
                }
                Some(("readonly", "off")) => {
                    read_only = false;
                    continue;
                }
                None if index > 0 && word == "ro" => {
                    read_only = true;
                    continue;
                }
                None if index > 0 && word == "rw" => {
                    read_only = false;
                    continue;
                }
                // A file may have an equals sign in its name.
                _ if index == 0 => word,
                _ => return Err(DiskError::Option(word.to_owned())),
            };
            if file.is_empty() {
                return Err(DiskError::NoFile);
            }
            if path.replace(PathBuf::from(file)).is_some() {
                return Err(DiskError::SecondFile);
            }
        }
        let path = path.ok_or(DiskError::NoFile)?;
        Ok(Self { path, read_only })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        for (text, path, read_only) in [
            ("disk.img", "disk.img", false),
            ("disk.img,ro", "disk.img", true),
            ("path=disk.img", "disk.img", false),
            ("path=/a b/c.raw,ro", "/a b/c.raw", true),
            ("path=x,rw", "x", false),
            ("path=x,readonly=on", "x", true),
            ("readonly=on,path=x", "x", true),
            ("ro", "ro", false),
            ("a=b", "a=b", false),
        ] {
            let read = text.parse::<Disk>();
            let path = PathBuf::from(path);
            assert_eq!(read, Ok(Disk { path, read_only }), "{text}");
        }
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (text, said) in [
            ("", "no file"),
            ("path=", "no file"),
            ("readonly=on", "no file"),
            ("path=x,size=3", "\"size=3\""),
            ("path=x,", "\"\""),
            ("x,path=y", "more than one file"),
        ] {
            let message = text.parse::<Disk>().map_err(|error| error.to_string());
            assert!(
                matches!(&message, Err(message) if message.contains(said)),
                "{text}: {message:?}"
            );
        }
    }
}
