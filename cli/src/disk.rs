//! The argument of `--disk`: the image file, and its options.

use std::path::PathBuf;

use vmm::machine::{DiskConfig, ImageFormat, Overlay};

/// The argument is not in a disk's form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The option is unknown.
    #[error(
        "unknown option {0:?}: expected FILE or path=FILE, followed by `,ro`, `,overlay`, `,overlay=FILE`, \
         `,format=raw`, `,format=qcow2` or `,backing=FILE`"
    )]
    Option(String),
    /// The file is missing.
    #[error("no file: expected FILE or path=FILE")]
    NoFile,
    /// An option's file is missing.
    #[error("no file in {0:?}: expected {0}FILE")]
    NoOptionFile(&'static str),
    /// There is more than one file.
    #[error("more than one file: give --disk once for each disk")]
    SecondFile,
    /// The guest cannot write to a read-only disk.
    #[error("`ro` and `overlay`: the guest does not write to a read-only disk; give one of them")]
    ReadOnlyOverlay,
}

/// Reads a disk in its requested form: `FILE` or `path=FILE`, and options after commas. A plain
/// file's name has no comma; `readonly=on` is other machines' name for `ro`.
///
/// # Errors
/// If it has no file or more than one, or an option is unknown.
pub fn parse(text: &str) -> Result<DiskConfig, DiskError> {
    let mut path = None;
    let mut disk = DiskConfig::default();
    for (index, word) in text.split(',').enumerate() {
        let file = match word.split_once('=') {
            Some(("path", file)) => file,
            Some(("readonly", "on")) => {
                disk.read_only = true;
                continue;
            }
            Some(("readonly", "off")) => {
                disk.read_only = false;
                continue;
            }
            Some(("format", "raw")) => {
                disk.format = Some(ImageFormat::Raw);
                continue;
            }
            Some(("format", "qcow2")) => {
                disk.format = Some(ImageFormat::Qcow2);
                continue;
            }
            Some(("backing", file)) if index > 0 => {
                disk.backing = Some(option_file("backing=", file)?);
                continue;
            }
            Some(("overlay", file)) if index > 0 => {
                disk.overlay = Some(Overlay::Kept(option_file("overlay=", file)?));
                continue;
            }
            None if index > 0 && word == "overlay" => {
                disk.overlay = Some(Overlay::Temporary);
                continue;
            }
            None if index > 0 && word == "ro" => {
                disk.read_only = true;
                continue;
            }
            None if index > 0 && word == "rw" => {
                disk.read_only = false;
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
    disk.path = path.ok_or(DiskError::NoFile)?;
    match disk.read_only && disk.overlay.is_some() {
        true => Err(DiskError::ReadOnlyOverlay),
        false => Ok(disk),
    }
}

fn option_file(option: &'static str, file: &str) -> Result<PathBuf, DiskError> {
    match file {
        "" => Err(DiskError::NoOptionFile(option)),
        file => Ok(PathBuf::from(file)),
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
            ("overlay=b", "overlay=b", false),
        ] {
            assert_eq!(parse(text), Ok(DiskConfig::new(path, read_only)), "{text}");
        }
    }

    #[test]
    fn options_are_read() {
        let disk = |format, backing: Option<&str>, overlay| DiskConfig {
            format,
            backing: backing.map(PathBuf::from),
            overlay,
            ..DiskConfig::new("x", false)
        };
        let raw = Some(ImageFormat::Raw);
        let kept = || Some(Overlay::Kept(PathBuf::from("y=z")));
        for (text, expected) in [
            ("x,format=raw", disk(raw, None, None)),
            ("x,overlay", disk(None, None, Some(Overlay::Temporary))),
            ("x,overlay=y=z,format=raw", disk(raw, None, kept())),
            (
                "format=qcow2,path=x,backing=b",
                disk(Some(ImageFormat::Qcow2), Some("b"), None),
            ),
        ] {
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (text, said) in [
            ("", "no file"),
            ("path=", "no file"),
            ("readonly=on", "no file"),
            ("x,overlay=", "no file in \"overlay=\""),
            ("path=x,size=3", "\"size=3\""),
            ("x,format=vmdk", "\"format=vmdk\""),
            ("path=x,", "\"\""),
            ("x,path=y", "more than one file"),
            ("x,ro,overlay", "give one of them"),
        ] {
            let message = parse(text).map_err(|error| error.to_string());
            assert!(
                matches!(&message, Err(message) if message.contains(said)),
                "{text}: {message:?}"
            );
        }
    }
}
