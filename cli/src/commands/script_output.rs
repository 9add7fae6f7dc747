//! A script of `run -e`, on a thread of the machine's own process with its output to a file or a
//! stream.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::output_file::Output;
use crate::protocol::script::Counts;
use crate::report::show;
use crate::scripting::{Job, Rendered};
use crate::server::outbox::Outbox;
use crate::tracing::{Stop, Stopper, TracePanicked, TraceStartError};
use crate::vm::Vm;

/// A running script.
pub struct Running {
    stopper: Stopper,
    thread: JoinHandle<(Counts, io::Result<()>)>,
    exited: Arc<AtomicBool>,
}

impl Running {
    /// Starts to write the output of `job`, after `first`. When the script exits, or `output`
    /// fails, the machine is stopped.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn start(
        vm: Arc<Vm>,
        job: Job,
        first: Rendered,
        output: Output,
    ) -> Result<Self, TraceStartError> {
        let (stopper, stop) = Stopper::new(job.waiter());
        let exited = Arc::new(AtomicBool::new(false));
        let told = exited.clone();
        let thread = std::thread::Builder::new()
            .name("script".into())
            .spawn(move || {
                let ended = run(job, first, output, &stop, &told);
                vm.machine.stop();
                ended
            })?;
        Ok(Self {
            stopper,
            thread,
            exited,
        })
    }

    /// Checks whether the script has ended itself.
    pub fn has_exited(&self) -> bool {
        self.exited.load(Ordering::SeqCst)
    }

    /// Removes the probes, writes the remaining output, and returns the counts and the result of
    /// writing.
    ///
    /// # Errors
    /// If the thread panicked.
    pub fn finish(self) -> Result<(Counts, io::Result<()>), TracePanicked> {
        drop(self.stopper);
        self.thread.join().map_err(|_| TracePanicked)
    }
}

fn run(
    mut job: Job,
    first: Rendered,
    output: Output,
    stop: &Stop,
    exited: &AtomicBool,
) -> (Counts, io::Result<()>) {
    let mut outbox = match Outbox::new(output) {
        Ok(outbox) => outbox,
        Err(error) => return (job.finish().1, Err(error)),
    };
    let mut failed = put(&mut outbox, first);
    while !failed && !job.has_exited() {
        if stop.wait() {
            break;
        }
        job.take_up();
        // A slow reader loses output and delays nobody.
        match outbox.has_room() {
            Ok(true) => failed = put(&mut outbox, job.step()),
            Ok(false) => {}
            Err(_) => failed = true,
        }
    }
    exited.store(job.has_exited(), Ordering::SeqCst);
    let (rendered, counts) = job.finish();
    put(&mut outbox, rendered);
    (counts, outbox.finish())
}

/// Queues output and returns whether the output has ended.
fn put(outbox: &mut Outbox, Rendered { out, err }: Rendered) -> bool {
    show(&err);
    outbox.put(out).is_err()
}
