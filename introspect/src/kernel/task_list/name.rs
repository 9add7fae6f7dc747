//! The long names of kernel threads, which do not fit in `comm`.

use super::TaskInfo;
use crate::MemoryView;
use crate::kernel::btf::{Btf, Kind};
use crate::kernel::layout::{first_offset, offset};
use crate::kernel::structure::{Structure, StructureError};

/// The maximum length in bytes of a name that the kernel prints (`proc_task_name`,
/// fs/proc/array.c).
const MAX_NAME: usize = 63;
/// The sizes in bytes of a worker's description with its NUL: 24, or 32 since Linux 6.9.
const DESCRIPTIONS: [u64; 2] = [24, 32];

/// The location of long names. Kernels without a member have only short names of that kind.
#[derive(Debug, Clone)]
pub(super) struct NameLayout {
    /// Offset in `task_struct` of the pointer to a kernel thread's `struct kthread`.
    kthread: Option<u64>,
    /// Offset of `kthread.full_name`, since Linux 5.17.
    full_name: Option<u64>,
    worker: Option<WorkerLayout>,
}

#[derive(Debug, Clone)]
struct WorkerLayout {
    /// Offset of `kthread.data`: the `struct worker` of a workqueue's thread.
    data: u64,
    /// Offsets in `struct worker`.
    pool: u64,
    current_work: u64,
    description: (u64, usize),
    /// Whether the long name applies to workers as well: since Linux 6.10.
    full_name: bool,
}

impl NameLayout {
    pub(super) fn new(btf: &Btf) -> Self {
        // Before Linux 5.17 the pointer was in a member that only user threads need.
        let kthread = ["task_struct.worker_private", "task_struct.set_child_tid"];
        Self {
            kthread: first_offset(btf, &kthread, 8).ok(),
            full_name: offset(btf, "kthread.full_name", 8).ok(),
            worker: WorkerLayout::new(btf),
        }
    }

    /// Reads the name as the kernel prints it.
    pub(super) fn read(
        &self,
        view: MemoryView<'_>,
        task: &TaskInfo,
    ) -> Result<Vec<u8>, StructureError> {
        let short = task.name().to_vec();
        let Some(place) = self.kthread.filter(|_| task.is_kernel_thread()) else {
            return Ok(short);
        };
        let it = Structure::at(view, "task_struct", task.address)?;
        let Some(kthread) = it.follow(place, "kthread")? else {
            return Ok(short);
        };
        let long = || match self.full_name {
            Some(place) => kthread.string(place, "kthread.full_name", MAX_NAME),
            None => Ok(None),
        };
        match self.worker.as_ref().filter(|_| task.is_worker()) {
            Some(worker) => {
                let name = if worker.full_name { long()? } else { None };
                worker.describe(&kthread, name.unwrap_or(short))
            }
            None => Ok(long()?.unwrap_or(short)),
        }
    }
}

impl WorkerLayout {
    fn new(btf: &Btf) -> Option<Self> {
        let description = DESCRIPTIONS.into_iter().find_map(|length| {
            let offset = offset(btf, "worker.desc", length).ok()?;
            Some((offset, usize::try_from(length).ok()?))
        });
        Some(Self {
            data: offset(btf, "kthread.data", 8).ok()?,
            pool: offset(btf, "worker.pool", 8).ok()?,
            current_work: offset(btf, "worker.current_work", 8).ok()?,
            description: description?,
            full_name: btf.find("format_worker_id", &[Kind::Function]).is_some(),
        })
    }

    /// Appends the worker's current (`+`) or last (`-`) work.
    fn describe(
        &self,
        kthread: &Structure<'_>,
        mut name: Vec<u8>,
    ) -> Result<Vec<u8>, StructureError> {
        let Some(worker) = kthread.follow(self.data, "worker")? else {
            return Ok(name);
        };
        if worker.pointer(self.pool)?.is_some() {
            let (place, length) = self.description;
            let text = worker.text(place, length)?;
            if !text.is_empty() {
                let busy = worker.pointer(self.current_work)?.is_some();
                name.push(if busy { b'+' } else { b'-' });
                name.extend(text);
            }
        }
        name.truncate(MAX_NAME);
        Ok(name)
    }
}
