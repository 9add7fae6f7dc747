//! The destination of a stream: standard output, or a file that may be rotated by size.
//!
//! Each file is complete: it has whole records, and the format's beginning and end. A slow pipe is
//! waited for until the end is requested. A pipe without a reader is reported, also while there is
//! nothing to write.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::client::streams::shape::Shape;
use crate::listener::{has_gone, takes_more};
use crate::output_file::{self, OutputFile};
use crate::report::{Failure, Harmless};

/// The interval of checks for a requested end while a pipe accepts nothing.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The bytes that a pipe accepts at once if it accepts any.
const PIECE: usize = 4096;
/// The number of bytes collected before a write.
const BATCH: usize = 64 << 10;

/// A request for the end. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Requests the end.
    pub fn ask(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Checks whether the end is requested.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// The rules of file rotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rotation {
    /// The size of a file in bytes.
    pub size: u64,
    /// The number of older files kept.
    pub keep: u32,
}

/// A maker of a file's shape.
pub type MakeShape = Box<dyn Fn() -> Result<Box<Shape>, String>>;

/// The destination of a stream.
pub struct Sink {
    output: Output,
    stop: Stop,
    make: MakeShape,
    shape: Box<Shape>,
    /// The bytes not written yet.
    waiting: Vec<u8>,
    /// The bytes of records accepted for the file, and the bytes made of them.
    taken: u64,
    made: u64,
    rotation: Option<Rotation>,
    /// Set when the output could not be written further.
    is_cut_off: bool,
}

struct Output {
    file: File,
    /// The name for the user.
    name: String,
    /// Set if the output is a terminal.
    is_terminal: bool,
    path: PathBuf,
}

impl Sink {
    /// Opens standard output as a sink.
    ///
    /// # Errors
    /// If there is no such shape, or this process is out of descriptors.
    pub fn to_output(stop: Stop, make: MakeShape) -> Result<Self, Failure> {
        let stdout = io::stdout();
        let output = Output {
            file: File::from(stdout.as_fd().try_clone_to_owned()?),
            name: "standard output".into(),
            is_terminal: stdout.is_terminal(),
            path: PathBuf::new(),
        };
        Self::new(output, stop, make, None)
    }

    /// Opens a file as a sink and discards its old contents.
    ///
    /// # Errors
    /// If there is no such shape, or the file cannot be written, or is to be rotated and is not a
    /// regular file.
    pub fn to_file(
        path: &Path,
        mut opened: OutputFile,
        rotation: Option<Rotation>,
        stop: Stop,
        make: MakeShape,
    ) -> Result<Self, Failure> {
        let file = opened.writer()?;
        if rotation.is_some() && !file.metadata()?.is_file() {
            let why = "expected a regular file for --rotate; omit --rotate";
            return Err(Failure::Usage(format!("{}: {why}", path.display())));
        }
        let output = Output {
            file,
            name: format!("output {}", path.display()),
            is_terminal: false,
            path: path.to_path_buf(),
        };
        let sink = Self::new(output, stop, make, rotation)?;
        opened.keep()?;
        Ok(sink)
    }

    fn new(
        output: Output,
        stop: Stop,
        make: MakeShape,
        rotation: Option<Rotation>,
    ) -> Result<Self, Failure> {
        Ok(Self {
            output,
            stop,
            shape: make().map_err(Failure::new)?,
            make,
            waiting: Vec::new(),
            taken: 0,
            made: 0,
            rotation,
            is_cut_off: false,
        })
    }

    /// Accepts one record.
    ///
    /// # Errors
    /// If the output cannot be written, or its reader has gone.
    pub fn record(&mut self, record: &[u8]) -> Result<(), Failure> {
        let length = record.len() as u64;
        if let Some(Rotation { size, .. }) = &self.rotation
            && self.taken > 0
            && (self.taken + length > *size || self.made >= *size)
        {
            self.begin_anew()?;
        }
        let before = self.waiting.len();
        self.shape.record(record, &mut self.waiting)?;
        self.taken += length;
        self.made += (self.waiting.len() - before) as u64;
        match self.waiting.len() >= BATCH {
            true => self.flush(),
            false => Ok(()),
        }
    }

    /// Writes the pending bytes.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub fn flush(&mut self) -> Result<(), Failure> {
        let waiting = std::mem::take(&mut self.waiting);
        let written = self.output.write(&waiting, &self.stop);
        written.map_err(|error| self.cut_off(self.output.failed(&error)))
    }

    /// Ends a file that cannot be written further, and adds to the failure the number of records
    /// that it lacks.
    fn cut_off(&mut self, failure: Failure) -> Failure {
        let (Failure::Failed(why), Ok(file)) = (&failure, self.output.file.try_clone()) else {
            return failure;
        };
        self.is_cut_off = true;
        match output_file::cut_off(file, |intact| self.shape.cut_off(intact)) {
            Some(lost) => Failure::Failed(format!("{why}; {lost} records are not in it")),
            None => failure,
        }
    }

    /// Checks that the output still has a reader, while there is nothing to write.
    ///
    /// # Errors
    /// If it has none.
    pub fn check(&self) -> Result<(), Failure> {
        match has_gone(&self.output.file) {
            Ok(true) => Err(Failure::OutputClosed),
            _ => Ok(()),
        }
    }

    /// Writes the rest and closes the output.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub fn finish(mut self) -> Result<(), Failure> {
        match self.is_cut_off {
            true => Ok(()),
            false => self.end_shape(),
        }
    }

    fn end_shape(&mut self) -> Result<(), Failure> {
        self.shape.finish(&mut self.waiting)?;
        self.flush()
    }

    fn begin_anew(&mut self) -> Result<(), Failure> {
        self.end_shape()?;
        if let Some(rotation) = &self.rotation {
            let path = &self.output.path;
            let anew = shift(path, rotation.keep).and_then(|()| begin(path));
            self.output.file = anew.map_err(|error| self.output.failed(&error))?;
        }
        self.shape = (self.make)().map_err(Failure::new)?;
        (self.taken, self.made) = (0, 0);
        Ok(())
    }
}

/// Makes the next file. Anything put at its name meanwhile, a link too, is not written to.
fn begin(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    output_file::create(path)
}

/// Renames `FILE.1` to `FILE.2` and so on, and removes the oldest.
fn shift(path: &Path, keep: u32) -> io::Result<()> {
    for number in (0..keep).rev() {
        match fs::rename(numbered(path, number), numbered(path, number + 1)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    match number {
        0 => path.to_path_buf(),
        number => {
            let mut name = OsString::from(path);
            name.push(format!(".{number}"));
            name.into()
        }
    }
}

impl Output {
    fn failed(&self, error: &io::Error) -> Failure {
        Failure::of_output(&self.name, error)
    }

    fn write(&mut self, bytes: &[u8], stop: &Stop) -> io::Result<()> {
        if self.is_terminal {
            // A guest's names must not move the cursor.
            return Harmless(&self.file).write_all(bytes);
        }
        for piece in bytes.chunks(PIECE) {
            wait_for_room(&self.file, stop)?;
            self.file.write_all(piece)?;
        }
        Ok(())
    }
}

/// Waits until a pipe accepts bytes. One that accepts none after the end is requested is treated as
/// closed by its reader.
fn wait_for_room(output: impl AsFd, stop: &Stop) -> io::Result<()> {
    let mut stopped = stop.is_asked();
    loop {
        if takes_more(&output, LOOK_INTERVAL)? {
            return Ok(());
        }
        // One more try after the request: the reader may only be slow.
        if std::mem::replace(&mut stopped, stop.is_asked()) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read;
    use std::os::fd::OwnedFd;

    use trace_devices::render::Render;

    use super::*;

    /// A shape with a beginning, an end and as many letters as records.
    struct Bracketed {
        begun: bool,
    }

    impl Render<[u8]> for Bracketed {
        fn record(&mut self, record: &[u8], out: &mut dyn Write) -> io::Result<()> {
            if !std::mem::replace(&mut self.begun, true) {
                out.write_all(b"<")?;
            }
            out.write_all(record)
        }

        fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
            out.write_all(b">")
        }
    }

    /// A shape that writes everything at the end.
    struct Late(Vec<u8>);

    impl Render<[u8]> for Late {
        fn record(&mut self, record: &[u8], _: &mut dyn Write) -> io::Result<()> {
            self.0.extend(record);
            Ok(())
        }

        fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
            out.write_all(&self.0)
        }
    }

    fn bracketed() -> MakeShape {
        Box::new(|| Ok(Box::new(Bracketed { begun: false })))
    }

    /// Returns the contents of the file and the older ones after `records` of two bytes.
    fn rotated(records: &[&[u8; 2]], size: u64, keep: u32, make: MakeShape) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        fs::write(&path, "what was there before").unwrap();
        let opened = OutputFile::open(&path).unwrap();
        let rotation = Some(Rotation { size, keep });
        let mut sink = Sink::to_file(&path, opened, rotation, Stop::default(), make).unwrap();
        for record in records {
            sink.record(*record).unwrap();
        }
        sink.finish().unwrap();
        let files = (0..9).map(|number| fs::read_to_string(numbered(&path, number)));
        let files: Vec<String> = files.map_while(Result::ok).collect();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), files.len());
        files
    }

    #[test]
    fn files_are_begun_anew_with_whole_records_and_the_oldest_go() {
        let records = [b"ab", b"cd", b"ef", b"gh", b"ij"];
        for (size, keep, expected) in [
            (4, 5, vec!["<ij>", "<efgh>", "<abcd>"]),
            (5, 5, vec!["<ij>", "<efgh>", "<abcd>"]),
            (1, 2, vec!["<ij>", "<gh>", "<ef>"]),
            (4, 0, vec!["<ij>"]),
            (4, 1, vec!["<ij>", "<efgh>"]),
            (100, 5, vec!["<abcdefghij>"]),
        ] {
            let found = rotated(&records, size, keep, bracketed());
            assert_eq!(found, expected, "{size} {keep}");
        }
        let late = rotated(&records, 4, 5, Box::new(|| Ok(Box::new(Late(Vec::new())))));
        assert_eq!(late, ["ij", "efgh", "abcd"]);
    }

    #[test]
    fn what_is_no_file_is_not_begun_anew() {
        let path = Path::new("/dev/null");
        let rotation = Some(Rotation { size: 1, keep: 1 });
        let opened = OutputFile::open(path).unwrap();
        let made = Sink::to_file(path, opened, rotation, Stop::default(), bracketed());
        match made.err().unwrap() {
            Failure::Usage(why) => assert!(why.contains("regular file"), "{why}"),
            other => panic!("{other:?}"),
        }
    }

    fn pipe() -> (io::PipeReader, Sink, Stop) {
        let (reader, writer) = io::pipe().unwrap();
        let output = Output {
            file: File::from(OwnedFd::from(writer)),
            name: "pipe".into(),
            is_terminal: false,
            path: PathBuf::new(),
        };
        let stop = Stop::default();
        let sink = Sink::new(output, stop.clone(), bracketed(), None).unwrap();
        (reader, sink, stop)
    }

    #[test]
    fn a_reader_that_has_gone_is_noticed_with_and_without_something_to_write() {
        let (reader, mut sink, _) = pipe();
        sink.check().unwrap();
        drop(reader);
        assert!(matches!(sink.check(), Err(Failure::OutputClosed)));
        sink.record(b"a").unwrap();
        assert!(matches!(sink.flush(), Err(Failure::OutputClosed)));
    }

    #[test]
    fn a_slow_reader_gets_all_and_one_that_does_not_read_is_given_up_at_the_end() {
        let (mut reader, mut sink, stop) = pipe();
        let taking = std::thread::spawn(move || {
            let mut taken = vec![0; 1 << 20];
            reader.read_exact(&mut taken).unwrap();
            (reader, taken)
        });
        for _ in 0..1 << 10 {
            sink.record(&[b'x'; 1 << 10]).unwrap();
        }
        sink.record(b"yz").unwrap();
        sink.flush().unwrap();
        let (_reader, taken) = taking.join().unwrap();
        assert_eq!(
            taken.iter().filter(|byte| **byte == b'x').count(),
            (1 << 20) - 1
        );
        let ending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            stop.ask();
        });
        let full = (0..1 << 10).find_map(|_| sink.record(&[b'x'; 1 << 10]).err());
        assert!(matches!(full, Some(Failure::OutputClosed)), "{full:?}");
        ending.join().unwrap();
    }
}
