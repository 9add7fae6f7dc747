//! Prints every process's VMAs from a core file of a guest: `core-maps CORE VMLINUX`. The format is
//! that of `/proc/PID/maps`, except that a file is named by its device and inode. It also prints
//! the length and a checksum of each mapped file as far as it is in memory.

mod saved_guest;

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Instant;

use introspect::PausedMemory;
use introspect::kernel::page_cache::{CachedPage, PageCacheLayout};
use introspect::kernel::task_list::TaskListLayout;
use introspect::kernel::vma::VmaLayout;
use introspect::x86_64::PAGE;
use saved_guest::SavedGuest;

/// The maximum number of pages of a file that are read: 4 GiB.
const MAX_PAGES: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let guest = SavedGuest::of_arguments()?;
    let (btf, symbols) = (&guest.types, &guest.kernel.symbols);
    let paused = PausedMemory::new(&guest.core);
    let view = paused.view(guest.kernel.space);
    let start = Instant::now();
    let vma_layout = VmaLayout::new(btf, symbols)?;
    let cache_layout = PageCacheLayout::new(btf, symbols)?;
    eprintln!("layouts in {:?}", start.elapsed());
    let tasks = TaskListLayout::new(btf, symbols)?.processes(view);
    let mut files = BTreeMap::new();
    let (mut areas, mut spent) = (0, std::time::Duration::ZERO);
    for task in tasks.items {
        let Some(mm) = task.mm else {
            continue;
        };
        println!("== {}", task.tgid);
        let start = Instant::now();
        let bounds = vma_layout.bounds(view, mm)?;
        let walk = vma_layout.vmas(view, mm);
        let gate = vma_layout.gate(view, &bounds)?;
        spent += start.elapsed();
        for vma in walk.items.iter().chain(&gate) {
            areas += 1;
            let line = vma_layout.maps_line(view, &bounds, vma, |_| b"FILE".to_vec())?;
            println!("{}", String::from_utf8_lossy(&line));
            for address in [vma.start, vma.end - 1] {
                let found = vma_layout.find(view, mm, address)?;
                if found != Some(*vma) && gate != Some(*vma) {
                    return Err(format!("{address:#x} is found in {found:?}, not {vma:?}").into());
                }
            }
            if let Some(file) = vma.file {
                files.insert(vma_layout.identity(view, file)?.inode, file);
            }
        }
        if let Some(error) = walk.error {
            println!("{error}");
        }
    }
    if let Some(error) = tasks.error {
        println!("{error}");
    }
    eprintln!("{areas} areas in {spent:?}");
    for (inode, file) in files {
        let file = cache_layout.open_file(view, file)?;
        let start = Instant::now();
        let (mut present, mut sum, mut other) = (0, 0u32, 0);
        for index in 0..file.size.div_ceil(PAGE).min(MAX_PAGES) {
            match cache_layout.page(view, &file, index)? {
                CachedPage::Present { .. } => present += 1,
                CachedPage::Absent => continue,
                CachedPage::Filling { .. } | CachedPage::Value(_) => {
                    other += 1;
                    continue;
                }
            }
            let length = (file.size - index * PAGE).min(PAGE);
            let mut bytes = vec![0; usize::try_from(length)?];
            cache_layout.read(view, &file, index * PAGE, &mut bytes)?;
            sum = bytes.iter().fold(sum, |sum, byte| {
                sum.wrapping_mul(31).wrapping_add(u32::from(*byte))
            });
        }
        println!(
            "inode {inode}: {} bytes, {present} pages in memory, {other} otherwise, sum {sum:#010x}",
            file.size
        );
        eprintln!("inode {inode} in {:?}", start.elapsed());
    }
    Ok(())
}
