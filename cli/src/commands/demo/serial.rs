//! The demo guest's serial port: its output is kept, and lines are typed at its shell.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// The number of output bytes kept; the guest prints a few lines.
const MOST: usize = 1 << 20;
/// The line that the guest's init prints before it starts the shell.
const READY: &str = "exotrace: ready";
/// The shell's prompt.
const PROMPT: &str = "$ ";

/// The guest's output: its first megabyte. Clones share it.
#[derive(Clone, Default)]
pub struct Serial(Arc<Mutex<Vec<u8>>>);

impl Serial {
    /// Checks whether the shell waits for its first line.
    pub fn shell_waits(&self) -> bool {
        let text = self.text();
        text.find(READY)
            .is_some_and(|at| text.get(at..).is_some_and(|rest| rest.ends_with(PROMPT)))
    }

    /// Returns the last line printed, for messages; control characters are escaped.
    pub fn last_line(&self) -> String {
        let text = self.text();
        let last = text.lines().map(str::trim).rfind(|line| !line.is_empty());
        last.unwrap_or("nothing").escape_debug().to_string()
    }

    fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Write for Serial {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let room = MOST.saturating_sub(kept.len());
        kept.extend(bytes.iter().take(room));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_shell_waits_once_its_prompt_stands_alone() {
        let mut serial = Serial::default();
        for (printed, waits) in [
            ("booting $ ", false),
            ("\r\nexotrace: ready\r\n", false),
            ("$ ", true),
            ("fsload\r\n", false),
            ("$ ", true),
        ] {
            serial.write_all(printed.as_bytes()).unwrap();
            assert_eq!(serial.shell_waits(), waits, "after {printed:?}");
        }
        assert_eq!(serial.last_line(), "$");
        serial.write_all(&vec![b'x'; 2 * MOST]).unwrap();
        assert_eq!(serial.0.lock().unwrap().len(), MOST);
    }
}
