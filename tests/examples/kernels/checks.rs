//! The checks of a kernel, each named by the feature that a user would miss. They are tests of the
//! whole system, which compare with the guest's own results.

/// A line of the table.
pub struct Check {
    /// The feature that works or does not.
    pub name: &'static str,
    /// The tests that show it, as `module::test`; or all of a module's.
    pub tests: &'static [&'static str],
}

const fn check(name: &'static str, tests: &'static [&'static str]) -> Check {
    Check { name, tests }
}

/// The table's lines, except the symbols of the image, which need no guest.
pub const CHECKS: [Check; 19] = [
    check(
        "processes, threads, mappings, open files, against /proc",
        &["inspection::what_is_read_from_outside_is_what_the_guest_says"],
    ),
    check(
        "user stacks",
        &["inspection::user_stacks_reach_the_programs_start_through_every_call"],
    ),
    check(
        "kernel stacks by ORC, against /proc/PID/stack",
        &[
            "rich_kernel::stacks_by_orc_are_those_the_guest_prints",
            "rich_kernel::the_stack_of_whatever_runs_reaches_its_end",
            "rich_kernel::stacks_from_within_an_interrupt_lead_to_what_it_interrupted",
            "rich_kernel::stacks_reach_their_end_from_every_instruction_of_the_entries",
        ],
    ),
    check(
        "modules from the kernel's own package, their symbols and stacks",
        &[
            "rich_kernel::a_module_and_its_symbols_are_what_the_guest_tells",
            "rich_kernel::stacks_lead_through_the_modules_code",
            "guest_patches::modules_come_and_go_under_armed_probes",
        ],
    ),
    check(
        "the kernel found in memory alone",
        &["rich_kernel::the_kernel_found_in_memory_is_the_one_in_the_file"],
    ),
    check(
        "kprobe entries and returns, counted, under the guest's function tracers; text hash",
        &["guest_patches::function_tracers_over_armed_probes"],
    ),
    check(
        "the guest's own kprobes where ours stand; text hash",
        &["guest_patches::the_guests_own_probes_where_ours_stand"],
    ),
    check(
        "system calls",
        &["scripts::scripts_tell_what_a_program_calls"],
    ),
    check(
        "tracepoints with arguments, against tracefs",
        &[
            "tracepoints::the_tracepoints_are_those_of_the_image_and_of_tracefs",
            "tracepoints::what_the_guest_traces_is_seen_to_be_traced",
            "tracepoints::a_module_without_any_adds_none",
            "scripts::tracepoints_of_the_rich_kernel_run_scripts_with_their_arguments",
        ],
    ),
    check(
        "jump labels and static calls patched under armed probes",
        &["guest_patches_branches"],
    ),
    check(
        "functions of programs (uprobe)",
        &[
            "user_text::only_the_process_asked_for_is_traced",
            "user_text::children_are_traced_where_the_filter_follows_them",
            "user_text::a_page_that_was_not_in_memory_is_traced_from_its_first_instruction_on",
            "user_text::twenty_thousand_calls_are_twenty_thousand_events",
            "user_text::what_malloc_gives_is_what_free_gets",
        ],
    ),
    check("the guest's own uprobes and ours", &["guest_uprobes"]),
    check("static probes of programs (USDT)", &["usdt"]),
    check(
        "programs' text hidden from reads, copies and writes",
        &["user_text_hidden"],
    ),
    check("private copies of programs' text", &["user_text_copies"]),
    check("dt(4)", &["dt"]),
    check("trace(3)", &["trace_device"]),
    check("ptrace(3)", &["ptrace"]),
    check(
        "snapshot and restore",
        &[
            "shell::copies_of_one_snapshot_run_side_by_side_and_share_nothing",
            "shell::time_stands_still_between_save_and_restore_and_goes_on_after",
        ],
    ),
];

/// The tests of whole modules above that use guests other than the checked kernel, or need
/// something that the host lacks.
pub const LEFT_OUT: [&str; 1] = ["ptrace::nothing_hangs_when_the_machine_ends"];

/// Returns the modules, each once.
pub fn modules() -> Vec<&'static str> {
    let tests = CHECKS.iter().flat_map(|check| check.tests);
    let mut modules: Vec<_> = tests.map(|test| module(test)).collect();
    modules.sort_unstable();
    modules.dedup();
    modules
}

/// Returns the module of a test.
fn module(test: &'static str) -> &'static str {
    test.split_once("::").map_or(test, |(module, _)| module)
}
