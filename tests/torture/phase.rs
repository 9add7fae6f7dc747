//! A phase with a guest: its clients run side by side, and then the initial state must be restored.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use support::Host;
use support::victims::VICTIMS;

use crate::guest::{Guest, Settled};
use crate::options::Options;
use crate::{clients, counts, kills, rounds, saves};

/// The time limit for the text to be as it was: the kernel removes its own probes some time after
/// the request.
const SETTLE_LIMIT: Duration = Duration::from_secs(600);
/// The time limit for a newly restored machine to have all its threads.
const START_LIMIT: Duration = Duration::from_secs(3);
/// The client that counts: there is always one, which has the guest's shell.
const COUNTS: &str = "counts";
/// The least number of exact counts in a phase.
const SHARE_OF_COUNTS: u64 = 2;
/// The time for which a client rests that has done its share.
const REST: Duration = Duration::from_secs(1);
/// The interval at which a long phase reports its progress.
const TELL_INTERVAL: Duration = Duration::from_secs(60);
/// The time limit for victims to end. A loop's last round may be one of many processes, and nothing
/// has priority.
const VICTIMS_LIMIT: Duration = Duration::from_secs(1200);

/// One part of a run, with its own machines.
#[derive(Debug, Clone, Copy)]
pub enum Phase {
    /// A guest with this many vCPUs and everything at once.
    Crowd(u8),
    /// Machines that are killed.
    Kills,
}

/// The least time, rounds and kills of a phase with a guest.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    /// The least time.
    pub least: Duration,
    /// The number of times that probes are armed and removed.
    pub rounds: u64,
    /// The number of killed clients.
    pub client_kills: u64,
}

/// State shared by the client threads of a phase.
pub struct Crowd<'g> {
    /// The guest's machine.
    pub guest: &'g Guest,
    failed: AtomicBool,
    share: Share,
    began: Instant,
    figures: Mutex<BTreeMap<&'static str, u64>>,
}

impl Phase {
    /// Returns the phase's name in the output.
    pub fn name(self) -> String {
        match self {
            Self::Crowd(1) => "everything_at_once_on_1_vcpu".to_owned(),
            Self::Crowd(cpus) => format!("everything_at_once_on_{cpus}_vcpus"),
            Self::Kills => "killed_machines_leave_nothing".to_owned(),
        }
    }

    /// Runs the phase.
    ///
    /// # Panics
    /// If anything is not as it should be.
    pub fn run(self, host: &Host, options: &Options) {
        match self {
            Self::Crowd(cpus) => crowd(host, cpus, options),
            Self::Kills => kills::run(host, options.seed(), options.machine_kills),
        }
    }
}

impl Crowd<'_> {
    /// Adds to a figure, which is printed at the end.
    pub fn count(&self, what: &'static str, number: u64) {
        let mut figures = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        *figures.entry(what).or_default() += number;
    }

    /// Prints the figures each minute until `is_over` returns true.
    fn tell_until(&self, is_over: impl Fn() -> bool) {
        let mut told = Instant::now();
        while !is_over() {
            thread::sleep(Duration::from_millis(100));
            if told.elapsed() >= TELL_INTERVAL {
                told = Instant::now();
                self.tell();
            }
        }
    }

    fn tell(&self) {
        let seconds = self.began.elapsed().as_secs();
        let figures = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        eprintln!("torture: {seconds} s: {figures:?}");
    }

    fn figure(&self, what: &str) -> u64 {
        let figures = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        figures.get(what).copied().unwrap_or(0)
    }

    /// Returns whether the phase goes on.
    pub fn goes_on(&self) -> bool {
        let figures = [
            rounds::FIGURE,
            clients::KILLED,
            saves::FIGURE,
            counts::FIGURE,
        ];
        let reached = figures.iter().all(|figure| self.is_done(figure));
        !reached && !self.failed.load(Ordering::Relaxed)
    }

    /// Lets a client rest that has done its share, so that the guest gets on with the others'.
    pub fn pace(&self, figure: &'static str) {
        let until = Instant::now() + REST;
        while self.is_done(figure) && self.goes_on() && Instant::now() < until {
            thread::sleep(REST / 10);
        }
    }

    /// Returns whether the share of a figure is reached, and the least time is over.
    fn is_done(&self, figure: &str) -> bool {
        let share = match figure {
            rounds::FIGURE => self.share.rounds,
            clients::KILLED => self.share.client_kills,
            counts::FIGURE => SHARE_OF_COUNTS,
            _ => 1,
        };
        self.began.elapsed() >= self.share.least && self.figure(figure) >= share
    }
}

/// A guard that ends the other threads of a phase when one has panicked.
struct Alarm<'c, 'g>(&'c Crowd<'g>);

impl Drop for Alarm<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.failed.store(true, Ordering::Relaxed);
        }
    }
}

/// A thread of a phase.
type Work<'c> = Box<dyn FnOnce() + Send + 'c>;

fn crowd(host: &Host, cpus: u8, options: &Options) {
    let (guest, mut shell) = Guest::start(host, cpus);
    let idle = guest.settle(START_LIMIT, |_| false);
    // Each thread has its own random numbers, so that they do not depend on the threads' speeds.
    let seed = options
        .seed()
        .wrapping_mul(256)
        .wrapping_add(u64::from(cpus) * 16);
    let random = |thread: u64| fastrand::Rng::with_seed(seed.wrapping_add(thread));
    let chosen = options.victims.clone();
    let chosen = chosen.unwrap_or_else(|| VICTIMS.map(str::to_owned).to_vec());
    shell.succeed(&format!("victims {}", chosen.join(" ")));
    let crowd = Crowd {
        guest: &guest,
        failed: AtomicBool::new(false),
        share: options.share(),
        began: Instant::now(),
        figures: Mutex::default(),
    };
    let on = &crowd;
    let shell_at_work = &mut shell;
    let works: [(&str, Work<'_>); 8] = [
        (
            COUNTS,
            Box::new(move || counts::run(on, shell_at_work, random(2))),
        ),
        ("rounds", Box::new(move || rounds::run(on, random(0)))),
        ("rounds", Box::new(move || rounds::run(on, random(1)))),
        ("killed", Box::new(move || clients::killed(on, random(3)))),
        ("garbage", Box::new(move || clients::garbage(on, random(4)))),
        ("stalled", Box::new(move || clients::stalled(on, random(5)))),
        ("curious", Box::new(move || clients::curious(on, random(6)))),
        ("saves", Box::new(move || saves::run(on, random(7)))),
    ];
    let wanted = |name: &str| {
        let chosen = options.clients.as_ref();
        name == COUNTS || chosen.is_none_or(|chosen| chosen.iter().any(|one| one == name))
    };
    let works = works.into_iter().filter(|(name, _)| wanted(name));
    thread::scope(|scope| {
        let works = works.map(|(_, work)| {
            scope.spawn(move || {
                let _alarm = Alarm(on);
                work();
            })
        });
        let works: Vec<_> = works.collect();
        on.tell_until(|| works.iter().all(|work| work.is_finished()));
    });
    crowd.tell();

    let told = shell.within("victims_stop", VICTIMS_LIMIT);
    assert_eq!(told.status, 0, "{told:?}");
    let victims = shell.victims();
    eprintln!("torture: {victims:?}");
    let mut wrong = shell.complaints();
    wrong.extend(shell.kernel_complaints());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        victims.len() == chosen.len() && victims.values().all(|&rounds| rounds > 0),
        "{victims:?}"
    );
    let is_settled = |now: &Settled| {
        now.sites == 0
            && now.text == idle.text
            && now.descriptors <= idle.descriptors
            && now.threads <= idle.threads
    };
    let left = guest.settle(SETTLE_LIMIT, is_settled);
    eprintln!("torture: before {idle:?}, after {left:?}");
    assert!(is_settled(&left), "before {idle:?}, after {left:?}");
    assert!(left.held <= left.most, "{left:?}");
    guest.stop(shell);
}
