//! The lines of the benchmarks: each is a program of the micro guest and the probe that it hits.

use std::error::Error;
use std::sync::Arc;

use introspect::kernel::image::KernelImage;
use introspect::kernel::page_cache::CachedFile;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::{Gpa, Gva};
use probes::engine::{Capture, Engine, EngineLimits, Filter, Match, RingSize};
use probes::kernel_view::KernelView;
use probes::name::ProbeName;
use probes::probe::{Moment, Target, UserText};
use vmm::Machine;
use vmm::trap::Trap;
use vmm::{StoppedVcpu, TrapSink};

use super::{Line, Probe};
use crate::MicroGuest;

/// The number of frames of the recorded stack.
const FRAMES: usize = 20;

/// A sink that accepts a trap and does nothing.
struct Nothing;

impl TrapSink for Nothing {
    fn trap(&self, _: &Trap, _: &StoppedVcpu<'_>) {}
}

/// Returns the lines of the table, in its order.
#[must_use]
pub fn lines(guest: &MicroGuest) -> Vec<Line> {
    let nobody = Filter {
        pids: Match::In(vec![1]),
        ..Filter::default()
    };
    let elsewhere = Filter {
        spaces: Match::In(vec![Gpa(0xffff_f000)]),
        ..Filter::default()
    };
    let plain = Capture::default;
    let stack = Capture {
        kernel_stack: FRAMES,
        ..plain()
    };
    let all = Filter::default;
    let entry = Session {
        guest,
        function: "micro_leaf",
        moments: &[Moment::Entry],
    };
    let both = Session {
        moments: &[Moment::Entry, Moment::Return],
        ..entry
    };
    let deep = Session {
        function: "micro_timed_deep_leaf",
        ..entry
    };
    let step = Session {
        function: "micro_timed_step_leaf",
        ..entry
    };
    let user = Session {
        function: "micro_user_timed_leaf",
        ..entry
    };
    vec![
        Line::kernel(
            "kernel trap, nothing done",
            "tcall",
            trap(guest.address("micro_leaf")),
        ),
        Line::kernel("kernel entry", "tcall", entry.kernel(all(), plain())),
        Line::kernel(
            "  filtered out by pid",
            "tcall",
            entry.kernel(nobody, plain()),
        ),
        Line {
            hits: 2,
            ..Line::kernel("  with its return", "tcall", both.kernel(all(), plain()))
        },
        Line::kernel("  with 20 frames", "tnested", deep.kernel(all(), stack)),
        Line::kernel("  stepped", "tstep", step.kernel(all(), plain())),
        Line::user(
            "user trap, nothing done",
            "tucall",
            user_trap(guest.address("micro_user_timed_leaf")),
        ),
        Line::user("user entry", "tucall", user.user(all(), plain())),
        Line::user(
            "  of another process",
            "tucall",
            user.user(elsewhere, plain()),
        ),
    ]
}

/// Returns a probe that traps kernel code and does nothing at a hit.
fn trap(address: Gva) -> Probe {
    Box::new(move |machine, space| {
        machine.set_sink(Some(Box::new(Nothing)));
        machine.traps().arm_kernel_by(address, space)?;
        Ok(Box::new(()))
    })
}

/// Returns a probe that traps a program's code and does nothing at a hit.
fn user_trap(address: Gva) -> Probe {
    Box::new(move |machine, space| {
        machine.set_sink(Some(Box::new(Nothing)));
        machine.hold_user_traps()?;
        machine.traps().arm_user(address, space)?;
        Ok(Box::new(()))
    })
}

/// A session of the probe engine on a function of the micro guest. Its rings have room for every
/// event.
#[derive(Clone, Copy)]
struct Session<'g> {
    guest: &'g MicroGuest,
    function: &'static str,
    moments: &'static [Moment],
}

impl Session<'_> {
    fn kernel(self, filter: Filter, capture: Capture) -> Probe {
        let address = self.guest.address(self.function);
        self.probe(filter, capture, move |_, _, moment| {
            Ok(Target::Kernel { address, moment })
        })
    }

    fn user(self, filter: Filter, capture: Capture) -> Probe {
        let address = self.guest.address(self.function);
        self.probe(filter, capture, move |machine, space, moment| {
            let physical = translate(machine.ram(), space, address)?.gpa;
            let mut code = vec![0; 15];
            machine.traps().read_unpatched(physical, &mut code)?;
            let text = UserText {
                path: String::new(),
                file: CachedFile {
                    mapping: Gva(0),
                    inode: Gva(0),
                    size: 0,
                },
                offset: physical.0,
                physical: Some(physical),
                code,
            };
            Ok(Target::User { text, moment })
        })
    }

    fn probe(
        self,
        filter: Filter,
        capture: Capture,
        target: impl Fn(&Machine, AddressSpace, Moment) -> Result<Target, Box<dyn Error>> + 'static,
    ) -> Probe {
        let elf = self.guest.kernel().shared_elf();
        let Self {
            function, moments, ..
        } = self;
        Box::new(move |machine, space| {
            let symbols = KernelImage::parse(elf.clone())?.symbols()?;
            let view = Arc::new(KernelView::without_types(symbols, space).with_lasting_space());
            let engine = Engine::new(machine.handle(), view, &EngineLimits::default());
            let mut session = engine.session(RingSize::for_capture(4096, &capture))?;
            for moment in moments {
                let probe = probes::probe::Probe {
                    name: ProbeName::new("micro", "", function, moment.name()),
                    signature: None,
                    target: target(machine, space, *moment)?,
                };
                session.enable(&probe, filter.clone(), capture.clone())?;
            }
            Ok(Box::new(session))
        })
    }
}
