//! The command `exotrace image`: what is on an image of a disk, and what it boots.
//!
//! Names and titles come from the image, so they are shown without what a terminal acts on.

use std::io::{self, Write};

use image::{Entry, Image, Volume};
use serde::Serialize;

use crate::args;
use crate::guest_image;
use crate::report::{Failure, ToOutput, printable, printable_lines};

/// Runs the command.
pub fn image(args: &args::Image) -> Result<(), Failure> {
    let image = guest_image::open(&args.file)?;
    let mut out = io::stdout().lock();
    match args.json {
        true => {
            let json = serde_json::to_string_pretty(&Contents::of(&image))?;
            writeln!(out, "{json}").to_output()?;
        }
        false => write!(out, "{}", printable_lines(&text(&image))).to_output()?,
    }
    // The list says what there is; the status says that nothing of it boots.
    image.default_entry().map(drop).map_err(Failure::from)
}

/// Returns the list for people.
fn text(image: &Image) -> String {
    let mut out = format!("{}\n", image.table());
    let rows = image.volumes().iter().map(volume_row);
    out.push_str(&aligned(&rows.collect::<Vec<_>>()));
    let rows = image.entries().iter().map(|entry| entry_row(image, entry));
    out.push_str(&aligned(&rows.collect::<Vec<_>>()));
    for trouble in image.troubles() {
        out.push_str(&format!("note: {}\n", printable(trouble)));
    }
    if let Ok(entry) = image.default_entry() {
        out.push_str(&format!("boots:\n{}\n", image.chosen(entry)));
    }
    out
}

fn volume_row(volume: &Volume) -> Vec<String> {
    let part = volume.partition.as_ref();
    let kind = match (&volume.trouble, volume.is_read()) {
        (Some(trouble), _) => format!("{} ({trouble})", volume.kind),
        (None, true) => volume.kind.to_string(),
        (None, false) => format!("{} (not read)", volume.kind),
    };
    let note = match volume.needs_recovery {
        true => "not shut down; its journal is not read",
        false => "",
    };
    vec![
        format!(" {}", volume.name()),
        part.map(|part| size(part.length)).unwrap_or_default(),
        kind,
        part.and_then(image::Partition::type_name)
            .unwrap_or_default()
            .to_owned(),
        volume.uuid.clone().unwrap_or_default(),
        volume.label.clone().unwrap_or_default(),
        note.to_owned(),
    ]
}

/// Returns a size in the largest unit of which there is one, with a digit behind the point.
fn size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >> shift > 0) {
        // The shift leaves room for the factor.
        Some((shift, unit)) => {
            let tenths = (bytes >> (shift - 10)) * 10 / 1024;
            format!("{}.{} {unit}", tenths / 10, tenths % 10)
        }
        None => format!("{bytes} bytes"),
    }
}

fn entry_row(image: &Image, entry: &Entry) -> Vec<String> {
    let mark = if entry.is_default { "*" } else { " " };
    let volume = entry.source.volume.and_then(|at| image.volumes().get(at));
    let source = match volume {
        Some(volume) => format!("{} on {}", entry.source.path, volume.name()),
        None => entry.source.path.clone(),
    };
    vec![
        format!("{mark}{}", entry.title),
        entry.kernel.path.clone(),
        format!("{} ({source})", entry.origin),
        entry.trouble.clone().unwrap_or_default(),
    ]
}

/// Returns rows as lines, their columns below one another.
fn aligned(rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| printable(cell)).collect())
        .collect();
    let mut widths: Vec<usize> = Vec::new();
    for row in &rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |row: &Vec<String>| {
        // A column that is empty everywhere is left out.
        let cells = row.iter().zip(&widths).filter(|(_, width)| **width > 0);
        let cells = cells.map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        format!("{}\n", line.trim_end())
    };
    rows.iter().map(line).collect()
}

/// The contents of an image as JSON.
#[derive(Debug, Serialize)]
struct Contents {
    table: String,
    volumes: Vec<VolumeRecord>,
    entries: Vec<EntryRecord>,
    troubles: Vec<String>,
}

#[derive(Debug, Serialize)]
struct VolumeRecord {
    partition: Option<u32>,
    offset: u64,
    bytes: Option<u64>,
    type_id: Option<String>,
    name: Option<String>,
    partuuid: Option<String>,
    kind: String,
    uuid: Option<String>,
    label: Option<String>,
    is_read: bool,
    needs_recovery: bool,
    trouble: Option<String>,
}

#[derive(Debug, Serialize)]
struct EntryRecord {
    title: String,
    id: String,
    origin: String,
    source: FileRecord,
    kernel: FileRecord,
    initramfs: Vec<FileRecord>,
    command_line: String,
    is_default: bool,
    trouble: Option<String>,
}

/// A file, and the number of its partition.
#[derive(Debug, Serialize)]
struct FileRecord {
    partition: Option<u32>,
    path: String,
}

impl Contents {
    fn of(image: &Image) -> Self {
        let file = |place: &image::Place| FileRecord {
            partition: place
                .volume
                .and_then(|at| image.volumes().get(at))
                .and_then(Volume::number),
            path: place.path.clone(),
        };
        let volumes = image.volumes().iter().map(|volume| {
            let part = volume.partition.as_ref();
            VolumeRecord {
                partition: volume.number(),
                offset: part.map_or(0, |part| part.start),
                bytes: part.map(|part| part.length),
                type_id: part.map(|part| part.type_id.clone()),
                name: part.and_then(|part| part.name.clone()),
                partuuid: part.map(|part| part.uuid.clone()),
                kind: volume.kind.to_string(),
                uuid: volume.uuid.clone(),
                label: volume.label.clone(),
                is_read: volume.is_read(),
                needs_recovery: volume.needs_recovery,
                trouble: volume.trouble.clone(),
            }
        });
        let entries = image.entries().iter().map(|entry| EntryRecord {
            title: entry.title.clone(),
            id: entry.id.clone(),
            origin: entry.origin.to_string(),
            source: file(&entry.source),
            kernel: file(&entry.kernel),
            initramfs: entry.initrds.iter().map(file).collect(),
            command_line: entry.options.clone(),
            is_default: entry.is_default,
            trouble: entry.trouble.clone(),
        });
        Self {
            table: image.table().to_string(),
            volumes: volumes.collect(),
            entries: entries.collect(),
            troubles: image.troubles().to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_digit_behind_the_point() {
        for (bytes, wanted) in [
            (512, "512 bytes"),
            (1024, "1.0 KiB"),
            (1_609_547_264, "1.4 GiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(size(bytes), wanted);
        }
    }

    #[test]
    fn columns_stand_below_one_another_and_empty_ones_are_left_out() {
        let rows = [["a", "", "long", "x"], ["bb\x1b", "", "y", ""]];
        let rows: Vec<Vec<String>> = rows
            .iter()
            .map(|row| row.map(str::to_owned).into())
            .collect();
        assert_eq!(aligned(&rows), "a    long  x\nbb?  y\n");
    }
}
