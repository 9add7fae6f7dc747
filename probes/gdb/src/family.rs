//! Children of the process and programs that it executes, as the client learns of them: "fork
//! Events" and "exec Events" of the protocol (GDB manual, "Stop Reply Packets" of appendix E).
//!
//! `gdbstub` knows one process, and no event of a new program. So all packets pass by a [`Broker`].
//! It answers the client's requests about a child, which is not debugged and runs on. It also
//! replaces the reports of such events with what the protocol has for them.

use std::fmt::Write as _;

use introspect::stack::frames::SavedRegisters;

use crate::packets::{body, packet};

/// The number by which `gdbstub` calls the process.
const OWN: u64 = 1;
/// The system calls that make a process (arch/x86/entry/syscalls/syscall_64.tbl).
const CLONE: u64 = 56;
const VFORK: u64 = 58;
const CLONE3: u64 = 435;
/// The flag of a clone whose parent waits for the child's program or end
/// (include/uapi/linux/sched.h).
const CLONE_VFORK: u64 = 0x4000;

/// Events that a client understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Understood {
    pub(crate) forks: bool,
    pub(crate) execs: bool,
}

/// An event of the process, behind a report for which `gdbstub` has no words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    /// A thread has made a process.
    Child {
        thread: i32,
        child: i32,
        /// Whether the thread waits until the child has a program of its own.
        waits: bool,
    },
    /// A thread has executed the program at a path.
    Program { thread: i32, path: Vec<u8> },
}

impl News {
    /// Returns the report's body.
    fn report(&self) -> String {
        match self {
            Self::Child {
                thread,
                child,
                waits,
            } => {
                let kind = if *waits { "vfork" } else { "fork" };
                format!("T05{kind}:p{child:x}.{child:x};thread:p{OWN:x}.{thread:x};")
            }
            Self::Program { thread, path } => {
                let mut report = "T05exec:".to_owned();
                for byte in path {
                    // Writing to a text does not fail.
                    let _ = write!(report, "{byte:02x}");
                }
                let _ = write!(report, ";thread:p{OWN:x}.{thread:x};");
                report
            }
        }
    }
}

/// The way of a client's packet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To `gdbstub`.
    On,
    /// Back, with these bytes.
    Back(Vec<u8>),
}

/// Stands between the client and `gdbstub`.
#[derive(Debug, Default)]
pub(crate) struct Broker {
    /// The events of a client that has just introduced itself.
    introduced: Option<Understood>,
    /// Whether the client learns of new programs.
    execs: bool,
    /// Whether packets are not acknowledged.
    is_quiet: bool,
    /// Whether the client's requests are about a child.
    of_child: bool,
    /// The event behind the next report.
    news: Option<News>,
}

impl Broker {
    /// Returns the events that a client understands, once it has introduced itself.
    pub(crate) fn introduced(&mut self) -> Option<Understood> {
        self.introduced.take()
    }

    /// Promises the client the events of new programs.
    pub(crate) fn promise_execs(&mut self) {
        self.execs = true;
    }

    /// Replaces the next report with one of an event.
    pub(crate) fn replace_report(&mut self, news: Option<News>) {
        self.news = news;
    }

    /// Returns the way of the client's bytes.
    pub(crate) fn request(&mut self, piece: &[u8]) -> Way {
        let Some(body) = body(piece) else {
            return Way::On;
        };
        if let Some(features) = body.strip_prefix(b"qSupported:") {
            self.introduced = Some(understood(features));
        }
        let answer = match body {
            b"QStartNoAckMode" => {
                self.is_quiet = true;
                return Way::On;
            }
            [b'D', b';', pid @ ..] => {
                self.of_child = false;
                is_child(pid).then_some("OK")
            }
            [b'H', _, rest @ ..] => {
                self.of_child = rest.strip_prefix(b"p").is_some_and(is_child);
                self.of_child.then_some("OK")
            }
            // The child has a copy of the process's memory without its traps.
            [b'z' | b'Z', ..] => self.of_child.then_some("OK"),
            _ => None,
        };
        match answer {
            None => Way::On,
            Some(answer) => {
                let mut bytes = packet(answer);
                if !self.is_quiet {
                    bytes.insert(0, b'+');
                }
                Way::Back(bytes)
            }
        }
    }

    /// Returns the bytes that the client gets for an answer of `gdbstub`.
    pub(crate) fn answer(&mut self, piece: Vec<u8>) -> Vec<u8> {
        match body(&piece) {
            Some([b'T', ..]) => match self.news.take() {
                Some(news) => packet(&news.report()),
                None => piece,
            },
            Some(features) if self.execs && features.starts_with(b"PacketSize=") => {
                let features = String::from_utf8_lossy(features);
                packet(&format!("{features};exec-events+"))
            }
            _ => piece,
        }
    }
}

/// Returns the events in a client's list of features.
fn understood(features: &[u8]) -> Understood {
    let has = |wanted: &str| {
        features
            .split(|byte| *byte == b';')
            .any(|feature| feature == wanted.as_bytes())
    };
    // Without numbers of processes a child cannot be told from a thread.
    let several = has("multiprocess+");
    Understood {
        forks: several && has("fork-events+") && has("vfork-events+"),
        execs: several && has("exec-events+"),
    }
}

/// Checks whether a process in hexadecimal digits, alone or as `PID.TID`, is not the debugged one.
fn is_child(id: &[u8]) -> bool {
    let process = id.split(|byte| *byte == b'.').next().unwrap_or_default();
    let process = std::str::from_utf8(process).ok();
    let process = process.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    // 0 is any.
    process.is_some_and(|process| process > OWN)
}

/// Checks whether a thread with these registers waits in its system call for a child's program.
/// `read` reads a word of its memory.
pub(crate) fn waits_for_child(
    saved: &SavedRegisters,
    read: impl FnOnce(u64) -> Option<u64>,
) -> bool {
    let first = saved.general.rdi;
    let flags = match saved.orig_rax {
        VFORK => return true,
        CLONE => Some(first),
        CLONE3 => read(first),
        _ => None,
    };
    flags.is_some_and(|flags| flags & CLONE_VFORK != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use introspect::x86_64::GeneralRegisters;

    #[test]
    fn requests_about_a_child_are_answered_and_others_passed_on() {
        let mut broker = Broker::default();
        let back = |text: &str| Way::Back(text.as_bytes().to_vec());
        for (request, expected) in [
            ("Hgp1.5", Way::On),
            ("z0,401000,1", Way::On),
            ("Hgp1f.1f", back("+$OK#9a")),
            ("z0,401000,1", back("+$OK#9a")),
            ("m401000,4", Way::On),
            ("Hgp0.0", Way::On),
            ("Z0,401000,1", Way::On),
            ("QStartNoAckMode", Way::On),
            ("D;1f", back("$OK#9a")),
            ("D;1", Way::On),
            ("D", Way::On),
            ("Hc-1", Way::On),
            ("Hg1f", Way::On),
            ("Hgpzz.1", Way::On),
        ] {
            assert_eq!(broker.request(&packet(request)), expected, "{request}");
        }
        assert_eq!(broker.request(b"+"), Way::On);
    }

    #[test]
    fn a_client_is_told_of_events_that_it_understands() {
        for (features, forks, execs) in [
            (
                "multiprocess+;fork-events+;vfork-events+;exec-events+",
                true,
                true,
            ),
            ("multiprocess+;fork-events+;vfork-events+", true, false),
            ("fork-events+;vfork-events+;exec-events+", false, false),
            ("multiprocess+;xmlRegisters=i386", false, false),
        ] {
            let mut broker = Broker::default();
            assert_eq!(broker.introduced(), None);
            let request = packet(&format!("qSupported:{features}"));
            assert_eq!(broker.request(&request), Way::On);
            let expected = Understood { forks, execs };
            assert_eq!(broker.introduced(), Some(expected), "{features}");
            assert_eq!(broker.introduced(), None);
        }
    }

    #[test]
    fn reports_and_promises_are_the_protocols() {
        let mut broker = Broker::default();
        let features = packet("PacketSize=10000;multiprocess+");
        assert_eq!(broker.answer(features.clone()), features);
        broker.promise_execs();
        let promised = packet("PacketSize=10000;multiprocess+;exec-events+");
        assert_eq!(broker.answer(features), promised);
        let child = |waits| News::Child {
            thread: 10,
            child: 31,
            waits,
        };
        let program = News::Program {
            thread: 10,
            path: b"/bin/ls".to_vec(),
        };
        for (news, expected) in [
            (child(false), "T05fork:p1f.1f;thread:p1.a;"),
            (child(true), "T05vfork:p1f.1f;thread:p1.a;"),
            (program, "T05exec:2f62696e2f6c73;thread:p1.a;"),
        ] {
            broker.replace_report(Some(news));
            assert_eq!(broker.answer(b"+".to_vec()), b"+");
            let reported = broker.answer(packet("T05thread:p1.a;library:;"));
            assert_eq!(reported, packet(expected));
            let next = packet("T05thread:p1.a;swbreak:;");
            assert_eq!(broker.answer(next.clone()), next);
        }
    }

    #[test]
    fn a_parent_waits_if_it_says_so() {
        for (orig_rax, rdi, there, expected) in [
            (VFORK, 0, None, true),
            (57, CLONE_VFORK, None, false),
            (CLONE, CLONE_VFORK | 0x11, None, true),
            (CLONE, 0x120_0011, None, false),
            (CLONE3, 0x1000, Some(CLONE_VFORK), true),
            (CLONE3, 0x1000, Some(0), false),
            (CLONE3, 0x1000, None, false),
        ] {
            let general = GeneralRegisters {
                rdi,
                ..GeneralRegisters::default()
            };
            let saved = SavedRegisters {
                general,
                cs: 0x33,
                orig_rax,
            };
            assert_eq!(
                waits_for_child(&saved, |_| there),
                expected,
                "{orig_rax} {rdi:#x}"
            );
        }
    }
}
