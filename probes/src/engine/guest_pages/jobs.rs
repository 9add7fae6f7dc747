//! The kernel functions that are watched for changes to pages. Compilers inline functions and
//! kernels rename them. So each job lists several places, of which the first that a kernel has is
//! watched.

use introspect::Gva;
use introspect::kernel::symbols::Symbols;

use super::watch::Event;

/// A function and the event it is watched for; `None` if its arguments are not known.
type CalledFunction = (&'static str, Option<Event>);

/// Returns the addresses to watch with their events. `position` returns the position of a parameter
/// among a function's arguments, by its name.
pub(super) fn found(
    symbols: &Symbols,
    position: impl Fn(&str, &str) -> Option<usize>,
) -> Vec<(Gva, Event)> {
    let found = jobs(position).into_iter().filter_map(|(needed, places)| {
        let names: Vec<&str> = places.iter().map(|(name, _)| *name).collect();
        let found = places.into_iter().find_map(|(name, event)| {
            let address = symbols.address_of(name)?;
            Some((Gva(address), event?))
        });
        if needed && found.is_none() {
            log::warn!(
                "this kernel has no {} to be watched: it may see traps in the text of its programs",
                names.join(", no ")
            );
        }
        found
    });
    found.collect()
}

/// Returns the jobs. The flag marks those that every kernel with page cache and programs does.
fn jobs(position: impl Fn(&str, &str) -> Option<usize>) -> [(bool, Vec<CalledFunction>); 15] {
    let page_of_file = |function: &'static str, event: fn(usize, usize) -> Event| {
        let folio = position(function, "folio").or_else(|| position(function, "page"));
        let places = position(function, "mapping").zip(folio);
        (
            function,
            places.map(|(mapping, folio)| event(mapping, folio)),
        )
    };
    let leaves =
        |function| page_of_file(function, |mapping, folio| Event::Leaves { mapping, folio });
    let moves = |function| page_of_file(function, |mapping, folio| Event::Moves { mapping, folio });
    let write = |offset, length| Some(Event::Write { offset, length });
    let write_back = |function: &'static str, folio| {
        let folio = position(function, folio);
        (function, folio.map(|folio| Event::WriteBack { folio }))
    };
    let peek = position("__access_remote_vm", "mm").map(|mm| Event::Peek { mm });
    let own_copy = |page_is_known| Some(Event::OwnCopy { page_is_known });
    let at = |name, event| (name, Some(event));
    let one = |name, event| vec![at(name, event)];
    [
        (
            true,
            vec![
                leaves("filemap_unaccount_folio"),
                leaves("unaccount_page_cache_page"),
            ],
        ),
        (
            false,
            vec![
                moves("__folio_migrate_mapping"),
                moves("folio_migrate_mapping"),
                moves("migrate_page_move_mapping"),
            ],
        ),
        // Since Linux 6.11 the bytes of a moving page are copied earlier.
        (false, vec![write_back("folio_mc_copy", "src")]),
        // The last step of a move: the new page has the bytes and its place in the file.
        (
            false,
            vec![
                at("folio_migrate_flags", Event::Moved),
                at("migrate_page_states", Event::Moved),
            ],
        ),
        (true, one("clear_inode", Event::FileGoes)),
        (true, one("filemap_map_pages", Event::Maps)),
        (true, one("finish_fault", Event::Maps)),
        (true, one("copy_page_to_iter", Event::Read)),
        (false, one("splice_direct_to_actor", Event::Splice)),
        // Up to Linux 5.10 this argument follows the task.
        (false, vec![("__access_remote_vm", peek)]),
        (
            true,
            vec![
                ("wp_page_copy", own_copy(true)),
                ("do_wp_page", own_copy(false)),
            ],
        ),
        (
            true,
            vec![
                ("copy_page_from_iter_atomic", write(1, 2)),
                ("copy_folio_from_iter_atomic", write(1, 2)),
                ("iov_iter_copy_from_user_atomic", write(2, 3)),
            ],
        ),
        (
            false,
            vec![
                at("__folio_start_writeback", Event::WriteBack { folio: 0 }),
                at("__test_set_page_writeback", Event::WriteBack { folio: 0 }),
            ],
        ),
        (
            false,
            vec![
                at("folio_end_writeback", Event::WrittenBack),
                at("end_page_writeback", Event::WrittenBack),
            ],
        ),
        // Shared memory that goes to swap. Since Linux 7.3 the folio follows another argument.
        (
            false,
            vec![
                at("shmem_writepage", Event::WriteBack { folio: 0 }),
                write_back("shmem_writeout", "folio"),
            ],
        ),
    ]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::kernel::symbols::SymbolsBuilder;

    use super::*;

    /// Functions of three of Debian's kernels, with the parameters in their types.
    const LINUX_5_10: [&str; 9] = [
        "unaccount_page_cache_page(mapping, page)",
        "migrate_page_move_mapping(mapping, newpage, page, extra_count)",
        "migrate_page_states(newpage, page)",
        "__access_remote_vm(tsk, mm, addr, buf, len, gup_flags)",
        "wp_page_copy(vmf)",
        "do_wp_page(vmf)",
        "iov_iter_copy_from_user_atomic()",
        "__test_set_page_writeback(page, keep_write)",
        "end_page_writeback(page)",
    ];
    const LINUX_6_12: [&str; 11] = [
        "filemap_unaccount_folio(mapping, folio)",
        "__folio_migrate_mapping(mapping, newfolio, folio, expected_count)",
        "folio_migrate_mapping(mapping, newfolio, folio, extra_count)",
        "folio_mc_copy(dst, src)",
        "folio_migrate_flags(newfolio, folio)",
        "__access_remote_vm(mm, addr, buf, len, gup_flags)",
        "do_wp_page(vmf)",
        "copy_page_from_iter_atomic(page, offset, bytes, i)",
        "folio_end_writeback(folio)",
        "end_page_writeback(page)",
        "shmem_writepage(page, wbc)",
    ];
    const LINUX_7_3: [&str; 3] = [
        "do_wp_page(vmf)",
        "copy_folio_from_iter_atomic(folio, offset, bytes, i)",
        "shmem_writeout(ctx, folio, folio_list)",
    ];

    /// Returns the places found in a kernel, by the functions' names.
    fn of(kernel: &[&'static str]) -> Vec<(&'static str, Event)> {
        let mut builder = SymbolsBuilder::default();
        let parts = |line: &'static str| line.trim_end_matches(')').split_once('(').unwrap();
        for (address, line) in (0x1000..).zip(kernel) {
            builder
                .push(parts(line).0.as_bytes(), address, b't', false)
                .unwrap();
        }
        let symbols = builder.finish(None);
        let position = |function: &str, name: &str| {
            let line = kernel.iter().find(|line| parts(line).0 == function)?;
            parts(line)
                .1
                .split(", ")
                .position(|parameter| parameter == name)
        };
        let found = found(&symbols, position).into_iter();
        found
            .map(|(address, event)| (parts(kernel[address.0 as usize - 0x1000]).0, event))
            .collect()
    }

    #[test]
    fn each_kernel_is_watched_where_it_does_the_job() {
        let leaves = |mapping, folio| Event::Leaves { mapping, folio };
        let moves = |mapping, folio| Event::Moves { mapping, folio };
        let own_copy = |page_is_known| Event::OwnCopy { page_is_known };
        let write = |offset, length| Event::Write { offset, length };
        assert_eq!(
            of(&LINUX_5_10),
            [
                ("unaccount_page_cache_page", leaves(0, 1)),
                ("migrate_page_move_mapping", moves(0, 2)),
                ("migrate_page_states", Event::Moved),
                ("__access_remote_vm", Event::Peek { mm: 1 }),
                ("wp_page_copy", own_copy(true)),
                ("iov_iter_copy_from_user_atomic", write(2, 3)),
                ("__test_set_page_writeback", Event::WriteBack { folio: 0 }),
                ("end_page_writeback", Event::WrittenBack),
            ]
        );
        assert_eq!(
            of(&LINUX_6_12),
            [
                ("filemap_unaccount_folio", leaves(0, 1)),
                ("__folio_migrate_mapping", moves(0, 2)),
                ("folio_mc_copy", Event::WriteBack { folio: 1 }),
                ("folio_migrate_flags", Event::Moved),
                ("__access_remote_vm", Event::Peek { mm: 0 }),
                ("do_wp_page", own_copy(false)),
                ("copy_page_from_iter_atomic", write(1, 2)),
                ("folio_end_writeback", Event::WrittenBack),
                ("shmem_writepage", Event::WriteBack { folio: 0 }),
            ]
        );
        assert_eq!(
            of(&LINUX_7_3),
            [
                ("do_wp_page", own_copy(false)),
                ("copy_folio_from_iter_atomic", write(1, 2)),
                ("shmem_writeout", Event::WriteBack { folio: 1 }),
            ]
        );
    }
}
