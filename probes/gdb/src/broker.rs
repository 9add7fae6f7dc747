//! Stands between the client and `gdbstub`, for what the protocol has and `gdbstub` lacks.
//!
//! All packets pass by. Requests about a child of the process are answered here: it is not debugged
//! and runs on. Reports of children and new programs are worded here. Conditions of breakpoints are
//! taken from their packets.

use crate::conditions;
use crate::fork_exec::{EventFeatures, OWN, StopEvent};
use crate::packets::{body, packet};

/// The way of a client's packet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To `gdbstub`, as it is.
    On,
    /// These bytes to `gdbstub` instead.
    Instead(Vec<u8>),
    /// Back, with these bytes.
    Back(Vec<u8>),
}

/// Stands between the client and `gdbstub`.
#[derive(Debug, Default)]
pub(crate) struct Broker {
    /// The events of a client that has just introduced itself.
    introduced: Option<EventFeatures>,
    /// Whether the client learns of new programs.
    execs: bool,
    /// Whether packets are not acknowledged.
    is_quiet: bool,
    /// Whether the client's requests are about a child.
    of_child: bool,
    /// The event behind the next report.
    stop_event: Option<StopEvent>,
    /// The conditions of breakpoints that the client has just set, by address.
    conditions: Vec<(u64, Vec<Vec<u8>>)>,
}

impl Broker {
    /// Returns the events that a client understands, once it has introduced itself.
    pub(crate) fn introduced(&mut self) -> Option<EventFeatures> {
        self.introduced.take()
    }

    /// Returns the conditions of breakpoints that the client has set since the last call.
    pub(crate) fn conditions(&mut self) -> Vec<(u64, Vec<Vec<u8>>)> {
        std::mem::take(&mut self.conditions)
    }

    /// Promises the client the events of new programs.
    pub(crate) fn promise_execs(&mut self) {
        self.execs = true;
    }

    /// Replaces the next report with one of an event.
    pub(crate) fn replace_report(&mut self, stop_event: Option<StopEvent>) {
        self.stop_event = stop_event;
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
            [b'z' | b'Z', ..] if self.of_child => Some("OK"),
            [b'Z', b'0' | b'1', ..] => {
                let Some(breakpoint) = conditions::of_packet(body) else {
                    return Way::On;
                };
                let plain = packet(breakpoint.plain);
                self.conditions
                    .push((breakpoint.address, breakpoint.conditions));
                return Way::Instead(plain);
            }
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
            Some([b'T', ..]) => match self.stop_event.take() {
                Some(stop_event) => packet(&stop_event.report()),
                None => piece,
            },
            Some(features) if features.starts_with(b"PacketSize=") => {
                let features = String::from_utf8_lossy(features);
                let execs = if self.execs { ";exec-events+" } else { "" };
                packet(&format!("{features};ConditionalBreakpoints+{execs}"))
            }
            _ => piece,
        }
    }
}

/// Returns the events in a client's list of features.
fn understood(features: &[u8]) -> EventFeatures {
    let has = |wanted: &str| {
        features
            .split(|byte| *byte == b';')
            .any(|feature| feature == wanted.as_bytes())
    };
    // Without numbers of processes a child cannot be told from a thread.
    let several = has("multiprocess+");
    EventFeatures {
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

#[cfg(test)]
mod tests {
    use super::*;

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
            ("Z2,401000,8", Way::On),
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
            let expected = EventFeatures { forks, execs };
            assert_eq!(broker.introduced(), Some(expected), "{features}");
            assert_eq!(broker.introduced(), None);
        }
    }

    #[test]
    fn reports_and_promises_are_the_protocols() {
        let mut broker = Broker::default();
        let features = packet("PacketSize=10000;multiprocess+");
        let promised = "PacketSize=10000;multiprocess+;ConditionalBreakpoints+";
        assert_eq!(broker.answer(features.clone()), packet(promised));
        broker.promise_execs();
        let promised = packet(&format!("{promised};exec-events+"));
        assert_eq!(broker.answer(features), promised);
        let child = |waits| StopEvent::Child {
            thread: 10,
            child: 31,
            waits,
        };
        let program = StopEvent::Program {
            thread: 10,
            path: b"/bin/ls".to_vec(),
        };
        for (stop_event, expected) in [
            (child(false), "T05fork:p1f.1f;thread:p1.a;"),
            (child(true), "T05vfork:p1f.1f;thread:p1.a;"),
            (program, "T05exec:2f62696e2f6c73;thread:p1.a;"),
        ] {
            broker.replace_report(Some(stop_event));
            assert_eq!(broker.answer(b"+".to_vec()), b"+");
            let reported = broker.answer(packet("T05thread:p1.a;library:;"));
            assert_eq!(reported, packet(expected));
            let next = packet("T05thread:p1.a;swbreak:;");
            assert_eq!(broker.answer(next.clone()), next);
        }
    }

    #[test]
    fn conditions_are_taken_from_breakpoints() {
        let mut broker = Broker::default();
        let plain = Way::Instead(packet("Z0,401000,1"));
        for (request, way, conditions) in [
            (
                "Z0,401000,1;X3,220127",
                plain,
                vec![vec![vec![0x22, 1, 0x27]]],
            ),
            (
                "Z0,401000,1",
                Way::Instead(packet("Z0,401000,1")),
                vec![vec![]],
            ),
            (
                "Z1,401000,1;X1,27X2,2827",
                Way::Instead(packet("Z1,401000,1")),
                vec![vec![vec![0x27], vec![0x28, 0x27]]],
            ),
            ("Z0,401000,1;X3,2201", Way::On, vec![]),
            ("Z0,401000,1;X1,2g", Way::On, vec![]),
            ("Z0,x,1;X1,27", Way::On, vec![]),
            ("Z2,401000,8", Way::On, vec![]),
        ] {
            assert_eq!(broker.request(&packet(request)), way, "{request}");
            let taken = broker.conditions();
            let conditions: Vec<_> = conditions.into_iter().map(|of| (0x40_1000, of)).collect();
            assert_eq!(taken, conditions, "{request}");
        }
    }
}
