//! Writes the seeds of the fuzz targets: `fuzz-seeds introspect/fuzz/seeds`. They are small valid
//! tables, made here, and parts of the tests' saved memory image.

#[path = "../tests/images/mod.rs"]
mod images;
#[allow(dead_code)]
#[path = "../src/kernel/kallsyms/test_tables.rs"]
mod test_tables;

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use introspect::core_file::{CoreFile, write_core};
use introspect::kernel::btf::Btf;
use introspect::kernel::cached::DecodedKernel;
// `test_tables` expects Layout here.
use introspect::kernel::kallsyms::{self, Layout};
use introspect::kernel::page_cache::PageCacheLayout;
use introspect::kernel::running::RunningKernel;
use introspect::system::{PausedSystem, System};
use introspect::user::build_id::BuildId;
use introspect::{Gpa, Gva, PausedMemory};
use test_tables::Variant;

/// The start of the fuzz targets' memory.
const START: u64 = 0xffff_8880_0000_0000;
const PAGE: usize = 4096;
/// The number of bytes of noise before the kallsyms tables that are made for tests.
const NOISE: usize = 4 * PAGE;

/// The number of symbols of the seeds.
const SYMBOLS: usize = 300;

struct Seeds(PathBuf);

impl Seeds {
    fn put(&self, target: &str, name: &str, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
        let folder = self.0.join(target);
        fs::create_dir_all(&folder)?;
        Ok(fs::write(folder.join(name), bytes)?)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: fuzz-seeds FOLDER")?;
    let seeds = Seeds(folder.into());
    for (name, layout) in [
        ("addresses-first", Layout::AddressesFirst),
        ("addresses-last", Layout::AddressesLast),
        ("addresses-from-entries", Layout::AddressesFromEntries),
    ] {
        let variant = Variant {
            layout,
            sequences: true,
            absolute_per_cpu: layout != Layout::AddressesFromEntries,
        };
        let symbols = test_tables::kernel_like(SYMBOLS, variant.absolute_per_cpu);
        let tables = test_tables::write_at(test_tables::BASE - NOISE as u64, &symbols, variant);
        let tables = tables.get(NOISE..).unwrap_or_default();
        let found = kallsyms::find(tables, kallsyms::standing_at(test_tables::BASE))?;
        seeds.put("kallsyms", name, tables)?;
        if layout == Layout::AddressesLast {
            let kernel = DecodedKernel {
                symbols: found.symbols(None)?,
                btf: Some(Btf::parse(&types())?),
                banner: Some("Linux version".to_owned()),
                panic_finder: None,
            };
            let block = kernel.to_bytes(b"key");
            seeds.put("kernel_tables", "symbols-and-types", &block)?;
        } else {
            found.symbols(None)?;
        }
    }
    Btf::parse(&types())?.member("task_struct.comm")?;
    seeds.put("btf", "task", &types())?;
    BuildId::in_notes(&notes(), 4).ok_or("no build id")?;
    seeds.put("notes", "build-id", &notes())?;
    seeds.put("orc", "functions", &orc())?;
    let damage: Vec<u16> = (0..256u16).map(|index| index.wrapping_mul(331)).collect();
    let damage: Vec<u8> = damage.iter().flat_map(|half| half.to_le_bytes()).collect();
    seeds.put("saved_image", "64-words", &damage)?;
    seeds.put("maple_tree", "two-levels", &maple_tree())?;
    seeds.put("xarray", "two-levels", &xarray())?;
    let mut core = Vec::new();
    let image = images::core();
    let memory: [(Gpa, &[u8]); 2] = [(Gpa(0x1000), b"some memory"), (Gpa(0x8000), b"more")];
    write_core(&mut core, image.cpus(), memory)?;
    CoreFile::parse(core.clone())?;
    seeds.put("core_file", "one-cpu", &core)?;
    of_image(&seeds, &image)
}

/// Writes the objects of a process, and a task.
fn of_image(seeds: &Seeds, image: &CoreFile) -> Result<(), Box<dyn Error>> {
    let btf = images::types();
    let cpu = image.cpus().first().ok_or("no CPU")?;
    let memory = PausedMemory::new(image);
    let mut kernel = RunningKernel::find(memory.view(cpu.address_space()), cpu, 0)?;
    kernel.types = Ok(btf.clone());
    let system = System::new(&kernel, &memory);
    let cache = PageCacheLayout::new(&btf, &kernel.symbols)?;
    let look: PausedSystem<'_> = system.look(&memory, image.cpus());
    let tasks = look.processes()?.items;
    let workers = tasks.iter().find(|task| task.name() == b"workers");
    let task = workers.ok_or("no process of workers")?;
    let view = look.process_view(task).ok_or("no memory")?;
    for area in look.maps(task)?.ok_or("no mappings")?.areas {
        if area.name == b"[vdso]" {
            let length = usize::try_from(area.area.end - area.area.start)?;
            seeds.put("elf", "vdso", &view.bytes(Gva(area.area.start), length)?)?;
        }
        if let Some(file) = area.area.file
            && area.name == b"/bin/workers"
        {
            let file = cache.open_file(look.kernel(), file)?;
            let mut bytes = vec![0; usize::try_from(file.size)?];
            for (number, page) in bytes.chunks_mut(PAGE).enumerate() {
                // The image has the required pages. Zeros suffice for the others.
                let offset = (number * PAGE) as u64;
                if cache.read(look.kernel(), &file, offset, page).is_err() {
                    page.fill(0);
                }
            }
            seeds.put("elf", "workers", &bytes)?;
        }
    }
    let mut bytes = vec![0; PAGE];
    look.kernel().read(task.address, &mut bytes)?;
    seeds.put("processes", "task", &bytes)?;
    seeds.put("processes", "circle", &words(&[START]))?;
    let spread: Vec<u64> = (0..512).map(|index| START + index * 24).collect();
    seeds.put("processes", "spread", &words(&spread))
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Builds BTF: an int, `list_head`, a pointer, an array, an unnamed union in `task_struct`, a
/// typedef, an enum, a function.
fn types() -> Vec<u8> {
    let strings = b"\0int\0list_head\0next\0prev\0task_struct\0pid\0comm\0a\0b\0vfs_read\0";
    let name = |text: &[u8]| {
        let found = strings.windows(text.len() + 2).position(|at| {
            at.first() == Some(&0) && at.last() == Some(&0) && at.get(1..=text.len()) == Some(text)
        });
        found.map_or(0, |at| at as u32 + 1)
    };
    // The numbers of kinds (`BTF_KIND_*`, include/uapi/linux/btf.h), placed as in a record.
    let [
        int,
        pointer,
        array,
        structure,
        union,
        enumeration,
        typedef,
        function,
        prototype,
    ] = [1, 2, 3, 4, 5, 6, 8, 12, 13].map(|kind: u32| kind << 24);
    let records: [&[u32]; 9] = [
        &[name(b"int"), int, 4, 32],
        // 2: the list, 3: a pointer to it.
        &[
            name(b"list_head"),
            structure | 2,
            16,
            name(b"next"),
            3,
            0,
            name(b"prev"),
            3,
            64,
        ],
        &[0, pointer, 2],
        // 4: 16 ints, 5: a union of an int and them.
        &[0, array, 0, 1, 1, 16],
        &[0, union | 2, 64, name(b"a"), 1, 0, name(b"comm"), 4, 0],
        &[
            name(b"task_struct"),
            structure | 2,
            68,
            name(b"pid"),
            1,
            0,
            0,
            5,
            32,
        ],
        &[name(b"b"), typedef, 6],
        &[name(b"a"), enumeration | 1, 4, name(b"b"), 7],
        // 9: its prototype. 10 follows.
        &[0, prototype | 2, 1, name(b"a"), 3, name(b"b"), 1],
    ];
    let mut types: Vec<u32> = records.concat();
    types.extend([name(b"vfs_read"), function | 1, 9]);
    let length = types.len() as u32 * 4;
    let head = [0x0001_eb9f, 24, 0, length, length, strings.len() as u32];
    let all = head.iter().chain(&types);
    let mut bytes: Vec<u8> = all.flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(strings);
    bytes
}

fn notes() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, name, text) in [(1u32, b"Linu", [0; 20]), (3, b"GNU\0", [0x5a; 20])] {
        for word in [4, text.len() as u32, kind] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(name);
        bytes.extend(text);
    }
    bytes
}

/// Builds eight functions of 64 bytes each: addresses, then records of Linux 6.1.
fn orc() -> Vec<u8> {
    let mut bytes = Vec::new();
    for index in 0..8i32 {
        bytes.extend((index * 60 - 0x10_0000).to_le_bytes());
    }
    for index in 0..8u8 {
        bytes.extend([8 * index, 0, 0xf0, 0xff, 0x15, index % 4]);
    }
    bytes
}

/// Builds a tree whose root has two leaves (`struct maple_range_64`: parent, 15 pivots, 16 slots).
fn maple_tree() -> Vec<u8> {
    const NODE: u64 = 256;
    const LEAF: u64 = 1 << 3;
    const RANGE: u64 = 2 << 3;
    // The tree itself: lock and flags, and the root at 8 or 16.
    let root = (START + NODE) | RANGE | 2;
    let mut tree = vec![0; 32];
    tree[1..3].fill(root);
    let node = |pivots: [u64; 3], slots: [u64; 4]| {
        let mut node = vec![0; 32];
        node[0] = START | 2;
        node[1..4].copy_from_slice(&pivots);
        node[16..20].copy_from_slice(&slots);
        // The number of the last slot, in the place of the last slot.
        node[31] = 3;
        node
    };
    let leaf = |index: u64| (START + NODE * index) | LEAF;
    tree.extend(node([0xfff, u64::MAX, 0], [leaf(2), leaf(3), 0, 0]));
    tree.extend(node([0x3ff, 0x7ff, 0xfff], [START + 8, 0, START + 16, 0]));
    tree.extend(node([0x1fff, 0x2fff, u64::MAX], [0, START + 24, 0, 0]));
    words(&tree)
}

/// Builds an array with a node of nodes (`struct xa_node`: shift, offset, counts, parent, array,
/// list, 64 slots).
fn xarray() -> Vec<u8> {
    const NODE: u64 = 0x240;
    let child = |index: u64| (START + NODE * index) | 2;
    let mut array = vec![child(1); (NODE / 8) as usize];
    for (index, shift) in [(1, 6), (2, 0)] {
        let mut node = vec![0; (NODE / 8) as usize];
        node[0] = shift;
        for place in 5..node.len() as u64 {
            node[place as usize] = match (index, place % 4) {
                (1, 0) => child(2),
                (2, 0 | 1) => START + place * 64,
                (2, 2) => place << 1 | 1,
                _ => 0,
            };
        }
        array.extend(node);
    }
    words(&array)
}
