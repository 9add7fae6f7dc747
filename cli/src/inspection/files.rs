//! Files of the guest by their paths, for scripts that print them.

use std::collections::HashMap;

use bt::value::FileContent;
use introspect::Gpa;
use introspect::system::{GuestFile, PausedSystem, ProcessFile};

use super::{Guest, Inspection, MOST_BYTES};

impl Inspection<'_> {
    /// Reads files of the guest, as its first process sees them: each of `wanted` is a path and the
    /// greatest number of its bytes. The guest is paused once for all of them. Those behind
    /// [`MOST_BYTES`] are lost.
    #[must_use]
    pub fn files(&self, wanted: HashMap<Vec<u8>, usize>) -> HashMap<Vec<u8>, FileContent> {
        if wanted.is_empty() {
            return HashMap::new();
        }
        let read = self.look(|look| {
            let mut room = MOST_BYTES;
            let file = |(path, most): (&Vec<u8>, &usize)| {
                let file = match room {
                    0 => lost(&format!("more than {MOST_BYTES} bytes of files at once")),
                    room => self.file(&look, path, room.min(*most)),
                };
                room -= file.bytes.len();
                (path.clone(), file)
            };
            wanted.iter().map(file).collect()
        });
        read.unwrap_or_else(|error| {
            let lost = |path| (path, lost(&error));
            wanted.into_keys().map(lost).collect()
        })
    }

    fn file(&self, look: &PausedSystem<'_>, path: &[u8], most: usize) -> FileContent {
        match look.guest_file(path, most) {
            Ok(GuestFile::Text(mut bytes)) => {
                bytes.truncate(most);
                FileContent {
                    bytes: bytes.into(),
                    lost: None,
                }
            }
            Ok(GuestFile::Cached(file)) => self.cached(&file, most),
            Err(error) => lost(&error),
        }
    }

    /// Reads a file of the page cache, without the breakpoints of traces in it.
    fn cached(&self, file: &ProcessFile<'_>, most: usize) -> FileContent {
        let wanted = usize::try_from(file.file.size).map_or(most, |size| size.min(most));
        let mut bytes = vec![0; wanted];
        let read = file.read(0, &mut bytes, &|gpa, part| self.read(gpa, part));
        bytes.truncate(read);
        let lost = (read < wanted).then(|| {
            format!("the page at {read:#x} is neither in the guest's memory nor on a disk of it")
        });
        FileContent {
            bytes: bytes.into(),
            lost,
        }
    }

    fn read(&self, gpa: Gpa, part: &mut [u8]) -> bool {
        let read = match self.guest {
            Guest::Machine(machine, _) => machine.traps().read_unpatched(gpa, part),
            Guest::Saved(saved) => saved.memory.read_physical(gpa, part),
        };
        read.is_ok()
    }
}

fn lost(reason: &dyn std::fmt::Display) -> FileContent {
    FileContent {
        bytes: [].into(),
        lost: Some(reason.to_string()),
    }
}
