//! The speed of reading a guest: `cargo bench-introspect`.
//!
//! The first part measures a kernel's image: its symbols (kallsyms) and types (BTF), decoded, and
//! both read back from their saved form. The second measures a running guest: its pause for a list
//! of its processes as the command makes it, and the time for the stack of a thread in user mode.
//! Each part has a baseline measured in the same run, which does the least that is possible with
//! the same bytes. The second column is relative to it. Figures are medians; targets are those of
//! the development machine.

use std::error::Error;
use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use guest::Terminal;
use guest::build::debian;
use introspect::PausedMemory;
use introspect::kernel::cached::DecodedKernel;
use introspect::kernel::image::KernelImage;
use introspect::kernel::shared_bytes::SharedBytes;
use introspect::kernel::task_list::TaskInfo;
use introspect::stack::frames::SavedRegisters;
use introspect::stack::user::DEFAULT_FRAMES;
use introspect::system::{PausedSystem, System};
use support::second_opinion::DEBIAN_VERSIONS;
use support::shell::COMMAND_LIMIT;
use support::{Host, Linux, Shell};
use vmm::boot::KernelFile;

/// The number of runs of which each figure is the median.
const RUNS: usize = 31;
/// The number of started processes: copies of the shell that wait to open a pipe. With the kernel's
/// threads they are more than 100.
const WAITING: usize = 80;
/// A program whose threads wait in system calls, each 25 calls deep.
const WORKERS: &str = "workers 2 25";
/// The program's name, and the least number of frames of its threads' stacks.
const DEEP: (&[u8], usize) = (b"workers", 20);
/// The limit with which the command reads.
const MOST_ARGUMENTS: usize = 4096;
/// The time that the guest runs between two reads.
const PAUSE: Duration = Duration::from_millis(5);
const KEY: &[u8] = b"bench";

type Failure = Box<dyn Error>;

/// Returns the median time of the runs.
fn median<T>(mut run: impl FnMut() -> Result<T, Failure>) -> Result<Duration, Failure> {
    median_of(|| {
        let start = Instant::now();
        let result = black_box(run()?);
        let time = start.elapsed();
        // The result's drop is not part of the time that it takes to make it.
        drop(result);
        Ok(time)
    })
}

/// Returns the median of times that the runs measure themselves.
fn median_of(mut run: impl FnMut() -> Result<Duration, Failure>) -> Result<Duration, Failure> {
    let mut times = (0..RUNS).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    Ok(times.get(RUNS / 2).copied().unwrap_or_default())
}

/// A printer of figures beside a baseline.
struct Part {
    base: Duration,
}

impl Part {
    fn new(title: &str, baseline: &str, base: Duration) -> Self {
        println!("{title}");
        let part = Self { base };
        part.show(&format!("baseline: {baseline}"), base, None);
        part
    }

    fn show(&self, name: &str, time: Duration, target: Option<Duration>) {
        let target = target.map_or(String::new(), |target| {
            format!("   target {:8.3} ms", milliseconds(target))
        });
        let ratio = time.as_secs_f64() / self.base.as_secs_f64();
        println!(
            "  {name:<56} {:9.3} ms {ratio:9.2}{target}",
            milliseconds(time)
        );
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Measures the image of one of Debian's kernels.
fn image(version: &str) -> Result<(), Failure> {
    let kernel = debian::cloud_kernel(&support::host::cache(), Some(version), &Terminal::new())?;
    let image = KernelImage::parse(KernelFile::open(&kernel.image)?.shared_elf())?;
    let decoded = DecodedKernel {
        symbols: image.symbols()?,
        btf: Some(image.btf()?),
        banner: image.banner().map(str::to_owned),
        panic_finder: None,
    };
    let bytes = decoded.to_bytes(KEY);

    let part = Part::new(
        &format!(
            "{}: {} symbols, {} types, {:.1} MB",
            kernel.release,
            decoded.symbols.len(),
            decoded.btf.as_ref().map_or(0, |btf| btf.len()),
            image.bytes().len() as f64 / 1e6
        ),
        "the image copied",
        median(|| Ok(image.bytes().to_vec()))?,
    );
    let target = Some(Duration::from_millis(50));
    part.show("symbols decoded", median(|| Ok(image.symbols()?))?, target);
    part.show("types decoded", median(|| Ok(image.btf()?))?, target);

    let folder = tempfile::tempdir()?;
    let path = folder.path().join("kept");
    fs::write(&path, &bytes)?;
    let part = Part::new(
        &format!(
            "  both kept in a file of {:.1} MB",
            bytes.len() as f64 / 1e6
        ),
        "the file read",
        median(|| Ok(fs::read(&path)?))?,
    );
    // One millisecond for each of the two.
    let target = Some(Duration::from_millis(2));
    let read = || {
        Ok(DecodedKernel::from_bytes(
            KEY,
            SharedBytes::new(fs::read(&path)?),
        )?)
    };
    part.show("taken up from the file, read whole", median(read)?, target);
    let shared = SharedBytes::new(bytes);
    let mapped = || Ok(DecodedKernel::from_bytes(KEY, shared.clone())?);
    part.show(
        "taken up from memory, as from a mapped file",
        median(mapped)?,
        target,
    );
    Ok(())
}

/// A guest that can be read.
struct Guest<'l> {
    linux: &'l Linux,
    system: System,
}

impl Guest<'_> {
    /// Reads while the guest is paused. Returns the length of the pause, as the command reports it,
    /// and the result.
    fn look<T>(
        &self,
        ask: impl FnOnce(PausedSystem<'_>) -> Result<T, Failure>,
    ) -> Result<(Duration, T), Failure> {
        std::thread::sleep(PAUSE);
        let since = Instant::now();
        let paused = self.linux.machine().pause();
        let cpus = self.linux.cpus(&paused);
        let memory = PausedMemory::new(self.linux.machine().ram());
        let seen = ask(self.system.look(&memory, &cpus))?;
        drop(paused);
        Ok((since.elapsed(), seen))
    }
}

/// Reads a process as the command shows it, and returns the number of bytes.
fn describe(look: &PausedSystem<'_>, task: &TaskInfo) -> Result<usize, Failure> {
    let name = look.name(task);
    let program = look.program(task, MOST_ARGUMENTS)?.transpose()?;
    let program = program.map_or(0, |program| {
        program.arguments.strings().map(<[u8]>::len).sum::<usize>()
            + program.path.map_or(0, |path| path.len())
    });
    Ok(name.len() + program)
}

/// Reads all processes, and returns their number.
fn processes(look: &PausedSystem<'_>) -> Result<usize, Failure> {
    let tasks = look.processes()?.complete()?;
    for task in &tasks {
        black_box(describe(look, task)?);
    }
    Ok(tasks.len())
}

/// Returns a thread with a deep stack in user mode, and its registers there.
fn deep_thread(look: &PausedSystem<'_>) -> Result<(TaskInfo, SavedRegisters), Failure> {
    let (name, most) = DEEP;
    let kernel = look.kernel_unwinder(&look.modules()?.complete()?)?;
    for process in look.processes()?.complete()? {
        if process.name() != name {
            continue;
        }
        let objects = look.objects(&process, None)?;
        for thread in look.threads_of(&process)?.complete()? {
            let stack = look.stack(&thread, &kernel, &mut objects.unwinder());
            let deep = stack
                .user
                .is_some_and(|stack| stack.frames.len() > most && stack.is_reliable());
            if deep && look.cpu_of(&thread).is_none() {
                let registers = kernel.entry_registers(look.kernel(), thread.address);
                let registers = registers.map_err(|end| end.to_string())?;
                return Ok((thread, registers.ok_or("not in a system call")?));
            }
        }
    }
    Err(format!("no thread of {} has {most} frames", name.escape_ascii()).into())
}

fn user_stack(look: &PausedSystem<'_>) -> Result<(), Failure> {
    let (thread, registers) = deep_thread(look)?;
    let view = look.process_view(&thread).ok_or("no memory")?;
    let objects = look.objects(&thread, None)?;
    let mut warm = objects.unwinder();
    let frames = warm.walk(view, &registers, DEFAULT_FRAMES).frames.len();
    let words = || {
        let mut sum = 0u64;
        for word in 0..frames as u64 {
            let at = introspect::Gva(registers.general.rsp + 8 * word);
            sum = sum.wrapping_add(view.u64(at)?);
        }
        Ok(sum)
    };
    let part = Part::new(
        &format!("a user stack of {frames} frames"),
        "as many words of it read",
        median(words)?,
    );
    let walk = || Ok(warm.walk(view, &registers, DEFAULT_FRAMES));
    part.show(
        "rules known (warm)",
        median(walk)?,
        Some(Duration::from_micros(200)),
    );
    let walk = || Ok(objects.unwinder().walk(view, &registers, DEFAULT_FRAMES));
    part.show("objects known, rules not", median(walk)?, None);
    let walk = || {
        let objects = look.objects(&thread, None)?;
        Ok(objects.unwinder().walk(view, &registers, DEFAULT_FRAMES))
    };
    part.show("nothing known (cold)", median(walk)?, None);
    Ok(())
}

fn running(host: &Host) -> Result<(), Failure> {
    let shell = Shell::new(host);
    let start = format!(
        "mkfifo /tmp/never; for i in $(seq {WAITING}); do {{ read word < /tmp/never; }} & done; \
         {WORKERS} > /tmp/workers & while ! grep -q workers /tmp/workers; do sleep 1; done"
    );
    let started = shell.start(&start).answer(4 * COMMAND_LIMIT);
    if started.status != 0 {
        return Err(format!("{start}: {started:?}").into());
    }
    let view = shell.linux.view();
    let machine = shell.linux.machine();
    let (first, system) = {
        let since = Instant::now();
        let paused = machine.pause();
        let memory = PausedMemory::new(machine.ram());
        let system = System::new(&view.kernel, &memory);
        drop(paused);
        (since.elapsed(), system)
    };
    let guest = Guest {
        linux: &shell.linux,
        system,
    };
    let (_, count) = guest.look(|look| processes(&look))?;
    let part = Part::new(
        &format!("{count} processes listed: how long the guest is paused"),
        "stopped and let go, nothing read",
        median_of(|| Ok(guest.look(|_| Ok(()))?.0))?,
    );
    part.show("once before the first: the readers made", first, None);
    // The target is for 100.
    let target = Duration::from_millis(5).mul_f64(count as f64 / 100.0);
    let list = || Ok(guest.look(|look| processes(&look))?.0);
    part.show(
        "numbers, states, arguments and paths",
        median_of(list)?,
        Some(target),
    );
    let bare = || Ok(guest.look(|look| Ok(look.processes()?.complete()?))?.0);
    part.show("numbers and states alone", median_of(bare)?, None);
    guest.look(|look| user_stack(&look))?;
    Ok(())
}

fn main() -> Result<(), Failure> {
    for version in DEBIAN_VERSIONS {
        image(version)?;
    }
    if let Some(host) = support::host() {
        running(host)?;
    }
    println!("(second column: relative to the baseline above; medians of {RUNS} runs)");
    Ok(())
}
