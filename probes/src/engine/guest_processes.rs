//! Watches the start and end of processes, for filters that follow them. The kernel functions are
//! `wake_up_new_task` (a new thread is about to run for the first time) and `release_task` (the
//! last step of an ended one).

use std::sync::{Arc, Mutex, PoisonError};

use introspect::Gva;
use introspect::kernel::task::TaskLayout;
use introspect::x86_64::paging::AddressSpace;

use super::hit::{Hit, HitPath};
use super::processes::Followed;
use super::watch::Watch;
use crate::kernel_view::KernelView;

/// The process sets of the filters that follow.
pub(super) type Followers = Arc<Mutex<Vec<Followed>>>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    Made,
    Ended,
}

/// Returns the watches with the functions to put them on.
pub(super) fn watches(view: &KernelView, followers: &Followers) -> Vec<(Gva, Arc<dyn Watch>)> {
    let Ok(tasks) = view.tasks else {
        return Vec::new();
    };
    let events = [
        ("wake_up_new_task", Event::Made),
        ("release_task", Event::Ended),
    ];
    let watches = events.into_iter().filter_map(|(name, event)| {
        let address = view.kernel.symbols.address_of(name)?;
        let watch: Arc<dyn Watch> = Arc::new(ProcessWatch {
            event,
            tasks,
            space: view.kernel.space,
            followers: followers.clone(),
        });
        Some((Gva(address), watch))
    });
    watches.collect()
}

struct ProcessWatch {
    event: Event,
    tasks: TaskLayout,
    space: AddressSpace,
    followers: Followers,
}

impl Watch for ProcessWatch {
    fn on_entry(&self, _: &HitPath, hit: &Hit<'_>) -> bool {
        let [address, ..] = hit.arguments();
        let Ok(task) = self.tasks.task(hit.memory, self.space, Gva(address)) else {
            return false;
        };
        // A new thread of an existing process changes nothing.
        if task.pid != task.tgid {
            return false;
        }
        let process = task.tgid.cast_unsigned();
        let followers = self
            .followers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match (self.event, hit.current.identity().pid) {
            (Event::Made, Some(parent)) => followers.iter().for_each(|f| f.made(parent, process)),
            (Event::Made, None) => {}
            (Event::Ended, _) => followers.iter().for_each(|f| f.ended(process)),
        }
        false
    }
}
