//! The answers of a VM to commands on its control socket.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use introspect::memory_budget::{self, Purpose};
use probes::engine::{Engine, SessionCost};

use crate::protocol::control::{
    Answer, Command, Info, MemoryCount, SessionCount, SiteCount, Stat, Unknown,
};
use crate::protocol::cost::{Budget, Cost};
use crate::protocol::error::{ErrorKind, RequestError};
use crate::server::{control as server, saving};
use crate::tracing::listing::list;
use crate::vm::Vm;

fn info(vm: &Vm) -> Info {
    Info {
        name: vm.name.to_string(),
        pid: std::process::id(),
        memory: vm.machine.ram().size(),
        cpus: vm.machine.vcpus(),
        kernel: match &vm.reference {
            Some(kernel) => kernel.path.display().to_string(),
            None => "unknown".into(),
        },
        running_s: vm.started.elapsed().as_secs(),
        overlays: vm.machine.overlays(),
    }
}

fn stat(vm: &Vm, hash: bool) -> Stat {
    let stats = vm.machine.stats();
    let [unknown_ports, unknown_memory] = [stats.ports, stats.memory].map(|bus| {
        let unknown = bus.unknown.into_iter().map(|u| Unknown {
            address: u.address,
            reads: u.reads,
            writes: u.writes,
        });
        unknown.collect()
    });
    let symbols = vm.engine.get().map(|engine| &engine.view().kernel.symbols);
    let sites = vm.machine.traps().stats().into_iter().map(|site| {
        let symbol = symbols
            .filter(|_| !site.user)
            .and_then(|s| s.resolve(site.address.0));
        SiteCount {
            address: site.address.0,
            symbol: match symbol {
                Some((symbol, 0)) => symbol.name.to_owned(),
                Some((symbol, offset)) => format!("{}+{offset:#x}", symbol.name),
                None => String::new(),
            },
            hits: site.hits,
            stepped: site.stepped,
            suspended: site.suspended,
            given_up: site.given_up,
        }
    });
    Stat {
        text: hash.then(|| match vm.text_hash() {
            Ok(hash) => hash.to_string(),
            Err(why) => why.to_string(),
        }),
        restored_memory: vm.checks.as_ref().map(|checks| (&checks.stats()).into()),
        sites: sites.collect(),
        engine: vm.engine.get().map(engine_counts).unwrap_or_default(),
        cost: vm
            .engine
            .get()
            .map(|engine| Cost::of(engine.cost(), engine.tsc_hz())),
        budget: vm.budget,
        sessions: vm.engine.get().map(session_counts).unwrap_or_default(),
        name: vm.name.to_string(),
        port_exits: stats.port_exits,
        mmio_exits: stats.mmio_exits,
        traps: stats.traps,
        guest_int3: stats.guest_int3,
        syscalls_repaired: stats.syscalls_repaired,
        changes: stats.changes,
        completed: stats.completed,
        refused: stats.refused,
        virtio: stats.virtio.iter().map(Into::into).collect(),
        memory: MemoryCount {
            guest: vm.machine.ram().size(),
            held: Purpose::ALL
                .map(|p| (p.name().to_owned(), p.held()))
                .to_vec(),
            most: memory_budget::LIMIT,
        },
        history: vm.keeper.counts(),
        unknown_ports,
        unknown_memory,
    }
}

fn session_counts(engine: &Engine) -> Vec<SessionCount> {
    let costs = engine.session_costs().into_iter();
    let count = |session: SessionCost| SessionCount {
        number: session.number,
        label: session.label,
        cost: Cost::of(session.cost, engine.tsc_hz()),
        budget: session.budget.map(Budget),
        probes: session.probes,
        resting: session.resting,
    };
    costs.map(count).collect()
}

fn engine_counts(engine: &Engine) -> Vec<(String, u64)> {
    let stats = engine.stats();
    let counts = [
        ("returns unpaired", stats.unpaired_returns),
        ("returns lost", stats.lost_returns),
        ("calls without return", stats.without_return),
        ("calls waiting", stats.waiting_returns),
        ("hits without process", stats.unknown_task),
        ("traps out of the way", stats.suspended),
        (
            "traps in programs out of the way",
            stats.suspended_in_programs,
        ),
        (
            "traps in programs suspended now",
            stats.suspended_now_in_programs,
        ),
        ("traps in freed text", stats.freed),
        ("pages waited for", stats.waiting_pages),
        ("hidden bytes", stats.hidden),
        ("ticks joined", stats.joined_ticks),
        ("without arguments", stats.without_arguments),
        ("traps given up", stats.given_up),
    ];
    counts
        .map(|(name, count)| (name.to_owned(), count))
        .to_vec()
}

impl server::Machine for Arc<Vm> {
    fn stream(&self, command: Command, stream: UnixStream) {
        let served = match command {
            Command::Trace(request) => crate::server::trace::serve(self, &request, stream),
            Command::Script(request) => crate::server::script::serve(self, &request, stream),
            Command::Gdb { process, write } => {
                crate::server::gdb::serve(self, process.as_ref(), write, stream)
            }
            _ => Ok(()),
        };
        if let Err(error) = served {
            log::debug!("trace: the client has disconnected: {error}");
        }
    }

    fn save(
        &self,
        descriptors: Vec<OwnedFd>,
        ago: Option<Duration>,
        client: &UnixStream,
    ) -> Answer {
        let saved = saving::save(self, descriptors, ago, client);
        answer(saved, |saved| Answer::Saved {
            bytes: self.machine.ram().size(),
            paused_us: u64::try_from(saved.paused.as_micros()).unwrap_or(u64::MAX),
            ago_ms: u64::try_from(saved.ago.as_millis()).unwrap_or(u64::MAX),
        })
    }

    fn answer(&self, command: Command) -> Answer {
        match command {
            Command::Info => Answer::Info(info(self)),
            Command::Stat { hash } => Answer::Stat(Box::new(stat(self, hash))),
            Command::Ps { threads } => answer(self.inspection().ps(threads), Answer::Ps),
            Command::Pid { process } => {
                answer(self.inspection().pid(&process), |pid| Answer::Pid { pid })
            }
            Command::Maps { process } => answer(self.inspection().maps(&process), Answer::Maps),
            Command::Sym {
                what,
                process,
                symfs,
            } => {
                let found = self.inspection().sym(&what, process.as_ref(), symfs);
                answer(found, Answer::Sym)
            }
            Command::Stack { process, symfs } => {
                let found = self.inspection().stack(&process, symfs);
                answer(found, Answer::Stack)
            }
            Command::List { pattern } => {
                let listed = self
                    .kernel_view()
                    .and_then(|view| list(&self.traceable(&view), &pattern));
                answer(listed, |probes| Answer::Probes { probes })
            }
            // Answered elsewhere.
            Command::Trace(_)
            | Command::Script(_)
            | Command::Gdb { .. }
            | Command::Snapshot
            | Command::Rewind { .. } => {
                let why = "a trace is a stream, and a snapshot needs files";
                Answer::Error(RequestError::new(ErrorKind::Invalid, why))
            }
            Command::PowerButton => match self.machine.press_power_button() {
                true => Answer::Pressed,
                false => {
                    let why = "the machine has no power button, since its kernel knows no ACPI; \
                               `exotrace stop` ends it all the same";
                    Answer::Error(RequestError::new(ErrorKind::Other, why))
                }
            },
            Command::Stop => {
                self.machine.stop();
                Answer::Stopping
            }
        }
    }
}

fn answer<T>(found: Result<T, RequestError>, answer: impl FnOnce(T) -> Answer) -> Answer {
    found.map_or_else(Answer::Error, answer)
}
