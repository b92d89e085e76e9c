//! Defects that were seen in other systems, and the test that keeps each of them out of this one.
//!
//! The rows are those of our survey (November 2026): the defects of the four systems that this one follows, and the
//! complaints of users about these and others, by their number there. A defect of something that is not built yet names the
//! issue that builds it. A test holds that every test named here exists, and that no complaint is left out.

/// One defect and its answer.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The system, or the number of the complaint.
    pub of: &'static str,
    pub defect: &'static str,
    pub answer: Answer,
}

#[derive(Debug, Clone, Copy)]
pub enum Answer {
    /// Files and the tests in them.
    Tested(&'static [(&'static str, &'static str)]),
    /// The part that has it comes with this issue.
    Later(u8),
}

use Answer::{Later, Tested};

const fn row(of: &'static str, defect: &'static str, answer: Answer) -> Row {
    Row { of, defect, answer }
}

const DOCTOR: &str = "cluster_doctor";
const AWS: &str = "AWS health-check suite";
const VMSS: &str = "basic-vmss-cluster";
const AZNHC: &str = "AzNHC";

/// Where the tests are that were written for this list.
const HERE: &str = "crates/checks/tests/regressions.rs";

const DCGM: &str = "crates/checks/src/dcgm_diag.rs";
const NHC: &str = "crates/checks/src/nhc.rs";
const XID: &str = "crates/checks/src/gpu_xid/tests.rs";
const CHOOSING: &str = "crates/core/src/plan/tests/choosing.rs";
const RUNNING: &str = "crates/core/src/plan/tests/running.rs";
const HOLDS: &str = "crates/core/src/plan/tests/holds.rs";
const MODES: &str = "crates/core/src/plan/tests/modes.rs";
const EVENTS: &str = "crates/control/tests/store_suite/events.rs";
const CHECK: &str = "crates/node/src/check.rs";
const FLEET: &str = "crates/doctor/tests/cli/fleet.rs";
const HOOKS: &str = "crates/node/tests/slurm_hooks.rs";

/// In the order of the survey.
pub static REGRESSIONS: &[Row] = &[
    row(
        DOCTOR,
        "every result is written down as a pass",
        Tested(&[
            (
                "crates/core/src/classify.rs",
                "each_kind_of_observation_has_its_verdict_and_only_a_full_measurement_passes",
            ),
            ("crates/checks/tests/silence.rs", "a_check_that_may_not_look_says_so"),
        ]),
    ),
    row(
        DOCTOR,
        "a test passes whatever its programs' exit codes are",
        Tested(&[
            ("crates/checks/src/site.rs", "nagios_exit_codes_become_verdicts"),
            ("crates/checks/src/measurements.rs", "nothing_measured_is_said_and_never_passes"),
        ]),
    ),
    row(
        DOCTOR,
        "one result that is missing loses those that come after it",
        Tested(&[
            (CHECK, "the_worst_answer_decides_and_what_is_worth_watching_hides_nothing_that_nobody_knows"),
            ("crates/node/tests/commands.rs", "over_its_limit_a_job_signs_what_had_finished"),
        ]),
    ),
    row(
        DOCTOR,
        "nothing is held against a limit",
        Tested(&[("crates/core/src/classify.rs", "a_check_without_any_rule_is_never_a_pass")]),
    ),
    row(
        DOCTOR,
        "one fresh test hides that another is stale",
        Tested(&[(CHOOSING, "staleness_is_counted_per_test_with_a_cut_off_of_its_own")]),
    ),
    row(
        DOCTOR,
        "a node is taken for free without a second look",
        Tested(&[
            (CHOOSING, "only_free_nodes_are_chosen_and_every_other_says_why_not"),
            (RUNNING, "a_node_wanted_by_user_work_has_its_validation_cancelled_at_once"),
        ]),
    ),
    row(DOCTOR, "free nodes are told without regard to readiness, cordons and taints", Later(5)),
    row(
        DOCTOR,
        "a job that runs is never over its time",
        Tested(&[(RUNNING, "a_run_over_its_time_limit_is_cancelled_and_incomplete")]),
    ),
    row(
        DOCTOR,
        "databases on a network file system, with mixed journals",
        Tested(&[(
            "crates/control/src/store/db/sqlite.rs",
            "network_file_systems_are_known_by_their_number_and_local_ones_are_not_among_them",
        )]),
    ),
    row(DOCTOR, "test files stay on the shared file system", Later(4)),
    row(
        DOCTOR,
        "nobody has to say who they are",
        Tested(&[("crates/control/tests/agent_door.rs", "no_node_speaks_for_another")]),
    ),
    row(DOCTOR, "tests of several nodes and alerts are missing", Later(8)),
    row(
        AWS,
        "1: JSON of DCGM 4 with a failure is read as a pass",
        Tested(&[(DCGM, "json_of_dcgm_4_with_a_failure_is_not_read_as_a_pass_of_nothing")]),
    ),
    row(
        AWS,
        "1: every failure of DCGM 3 isolates the node",
        Tested(&[(DCGM, "each_shape_is_read_with_its_own_scale")]),
    ),
    row(
        AWS,
        "2: a later pass overwrites an earlier failure",
        Tested(&[
            (DCGM, "a_later_pass_takes_back_no_earlier_failure"),
            ("crates/core/src/classify.rs", "the_worst_finding_speaks_first_and_none_is_lost"),
        ]),
    ),
    row(AWS, "3: the name of a job is what a program printed", Later(5)),
    row(
        AWS,
        "4: the time limit of short checks kills the long test",
        Tested(&[
            (HERE, "no_check_is_killed_by_the_limit_of_another"),
            (
                "crates/checks/src/dcgm.rs",
                "an_order_is_what_the_parameters_say_and_the_run_lasts_longer_than_the_diagnosis",
            ),
        ]),
    ),
    row(
        AWS,
        "5: a warning takes the node out of service",
        Tested(&[
            (MODES, "what_is_only_worth_watching_is_never_marked"),
            (HOOKS, "a_prolog_keeps_a_job_from_an_isolated_node_only_while_the_breakers_permit_is_fresh"),
        ]),
    ),
    row(
        AWS,
        "6: an agent that restarts takes the mark from a bad node",
        Tested(&[
            (EVENTS, "an_old_event_neither_keeps_a_proved_node_out_nor_brings_it_back_and_a_new_one_does"),
            ("crates/core/src/lifecycle.rs", "a_node_that_is_out_returns_only_through_a_proof_or_an_operator"),
        ]),
    ),
    row(
        AWS,
        "7: an old Xid fails the node for ever",
        Tested(&[
            (XID, "an_old_xid_does_not_fail_a_node_for_ever"),
            (HERE, "an_xid_of_last_month_does_not_fail_today"),
        ]),
    ),
    row(
        AWS,
        "7: the rotation of a log heals the node",
        Tested(&[(EVENTS, "a_log_that_was_rotated_heals_no_node_and_a_boot_does_where_it_is_the_cure")]),
    ),
    row(
        AWS,
        "8: always the same first nodes are tested",
        Tested(&[(CHOOSING, "suspects_come_first_then_the_stalest_and_never_tested_is_oldest")]),
    ),
    row(
        AWS,
        "9: settings are read only at the start",
        Tested(&[(
            "crates/doctor/tests/cli/agents.rs",
            "a_bad_change_of_the_agents_settings_keeps_the_last_good_one_and_says_so",
        )]),
    ),
    row(
        AWS,
        "10: retired pages are asked of parts that have none, and exchanged rows of none",
        Tested(&[
            ("crates/checks/src/gpu_retired_pages.rs", "retired_pages_on_ampere_are_not_a_fault"),
            ("crates/checks/src/gpu_row_remap.rs", "each_trouble_is_found_on_its_gpu_and_on_no_other"),
        ]),
    ),
    row(
        AWS,
        "11: limits for collectives that no machine keeps",
        Tested(&[("crates/checks/src/collective.rs", "right_sums_pass_without_a_profile_and_slow_ones_fail_with_one")]),
    ),
    row(
        AWS,
        "12: without the cloud's word for the machine, counts pass",
        Tested(&[
            ("crates/checks/src/gpu_count.rs", "without_a_profile_a_count_does_not_pass"),
            (HERE, "without_a_machine_type_no_count_passes"),
        ]),
    ),
    row(
        AWS,
        "a test that cannot fail is not noticed (no negative control)",
        Tested(&[
            ("crates/node/tests/fabric.rs", "a_program_that_does_not_look_at_its_device_proves_nothing"),
            ("crates/node/tests/fabric.rs", "libfabrics_own_program_that_ignores_its_device_is_found_out"),
        ]),
    ),
    row(
        AWS,
        "HyperPod: a severity that is not expected becomes healthy",
        Tested(&[
            (DCGM, "a_severity_that_nobody_knows_is_not_healthy"),
            ("crates/checks/src/dcgm_health.rs", "incidents_are_rated_by_the_table_and_told_by_bus_id"),
        ]),
    ),
    row(
        VMSS,
        "the wrapper writes `passed` whatever AzNHC said",
        Tested(&[
            (NHC, "only_a_run_that_says_so_has_passed"),
            ("crates/node/tests/commands.rs", "test_aznhc_runs_it_and_finds_by_fault_code"),
        ]),
    ),
    row(
        VMSS,
        "a status that always says `passed` is believed by who reads it on all hosts",
        Tested(&[
            ("crates/control/src/fleet/status.rs", "a_wrapper_that_always_writes_passed_is_not_believed"),
            (FLEET, "the_health_of_hosts_is_read_from_their_logs_and_a_passed_without_a_check_is_unknown"),
        ]),
    ),
    row(
        VMSS,
        "gathering files ignores which; unknown hosts are trusted",
        Tested(&[
            (FLEET, "a_file_is_gathered_from_every_host_and_who_does_not_bring_it_is_named"),
            (FLEET, "hosts_that_refuse_hang_or_are_slow_hold_up_nobody_and_what_is_late_is_ended_there"),
        ]),
    ),
    row(
        VMSS,
        "a host that does not answer falls out of the host files without a word",
        Tested(&[(FLEET, "the_host_files_are_made_kept_in_order_and_a_silent_host_stays_in_them")]),
    ),
    row(
        AZNHC,
        "a machine type that is not supported ends with 0",
        Tested(&[(NHC, "a_machine_that_aznhc_does_not_support_is_not_healthy_although_it_ends_with_0")]),
    ),
    row(
        AZNHC,
        "throttling is written down and never fails",
        Tested(&[("crates/checks/src/gpu_throttle.rs", "throttling_has_a_way_to_fail")]),
    ),
    row(
        AZNHC,
        "Xids 94 and 95 are not looked for, and all others have one code",
        Tested(&[(HERE, "xids_94_and_95_are_found_and_each_has_its_own_code")]),
    ),
    row(
        AZNHC,
        "a field is read by its place in the answer, from one too far",
        Tested(&[(HERE, "fields_are_read_by_name_and_not_by_place")]),
    ),
    row(AZNHC, "a check sets right what it should report", Tested(&[(HERE, "no_check_changes_what_it_looks_at")])),
    row(AZNHC, "the distributed form breaks above 300 nodes", Later(7)),
    row(
        "2",
        "what somebody else cordoned is taken back into service",
        Tested(&[
            (HOLDS, "a_foreign_mark_on_a_node_of_ours_makes_it_theirs_until_the_mark_is_gone"),
            (HOLDS, "our_mark_removed_by_somebody_is_not_put_back"),
        ]),
    ),
    row(
        "3",
        "nodes stay cordoned because nothing leads back",
        Tested(&[
            ("crates/core/src/lifecycle.rs", "every_state_can_be_left"),
            ("crates/core/src/plan/tests/ladder.rs", "a_policy_that_lists_no_way_back_hands_the_node_to_a_person"),
        ]),
    ),
    row(
        "4",
        "a condition never clears, or clears because an agent was restarted",
        Tested(&[
            (MODES, "a_suspicion_ends_when_its_cause_is_gone_or_nothing_new_supports_it"),
            ("crates/node/src/agent/spool/tests.rs", "reports_come_back_in_order_after_a_restart_and_numbers_go_on"),
        ]),
    ),
    row(
        "5",
        "a later pass overwrites an earlier error",
        Tested(&[(DCGM, "a_later_pass_takes_back_no_earlier_failure")]),
    ),
    row(
        "6",
        "no way to call a node healthy by hand, with its history kept",
        Tested(&[
            (EVENTS, "an_operator_who_releases_a_node_ends_its_old_events"),
            ("crates/core/src/plan/tests/proof.rs", "a_released_node_is_proved_before_it_returns"),
        ]),
    ),
    row(
        "7",
        "several remedies at once, and no climbing when a fault returns",
        Tested(&[
            (MODES, "the_worst_confirmed_finding_sets_the_rung"),
            ("crates/core/src/plan/tests/ladder.rs", "memory_lifts_a_case_and_never_lowers_it"),
        ]),
    ),
    row(
        "8",
        "alarms of InfiniBand ports that stay, or that are false",
        Tested(&[
            ("crates/checks/src/ib_flaps.rs", "three_returns_are_flapping_and_one_drop_raises_no_sticky_alarm"),
            ("crates/checks/src/ib_count.rs", "one_port_less_is_missed"),
        ]),
    ),
    row(
        "10",
        "a flood of records is a flood of events",
        Tested(&[
            ("crates/checks/src/nic_log.rs", "a_flood_of_refused_registers_is_one_finding_and_hides_no_other"),
            (XID, "a_flood_is_one_event_with_a_key"),
        ]),
    ),
    row(
        "11",
        "the table of errors leaves some out, and those are healthy",
        Tested(&[
            ("crates/checks/src/tables.rs", "every_sxid_and_every_dcgm_error_stands_once"),
            (HERE, "an_error_that_no_table_knows_is_not_healthy"),
        ]),
    ),
    row(
        "12",
        "a fabric manager that is down for weeks is not seen",
        Tested(&[("crates/checks/src/fabric_manager.rs", "a_fabric_manager_that_does_not_run_is_found")]),
    ),
    row(
        "12",
        "IMEX where nobody uses it makes nodes ill",
        Tested(&[
            ("crates/checks/src/imex.rs", "imex_where_it_is_unused_never_fails"),
            ("crates/checks/src/dcgm_health.rs", "imex_that_nobody_uses_isolates_no_node"),
        ]),
    ),
    row(
        "13",
        "false alarms while a machine comes up",
        Tested(&[
            (CHECK, "in_the_first_minutes_after_a_boot_nothing_measured_fails"),
            ("crates/checks/src/efa_devices.rs", "late_initialisation_of_p5en_is_no_false_alarm_at_bootstrap"),
        ]),
    ),
    row(
        "14",
        "a new version of a tool breaks its parser without a word",
        Tested(&[
            (DCGM, "a_summary_that_failed_alone_and_a_new_status_are_not_passed_over"),
            ("crates/checks/src/nvidia_smi.rs", "a_log_that_is_not_whole_is_no_log"),
            ("crates/checks/src/document.rs", "a_newer_schema_is_refused_by_its_name_and_not_as_malformed"),
        ]),
    ),
    row(
        "14",
        "a thermal violation of DCGM takes a node out of service",
        Tested(&[(HERE, "a_thermal_violation_of_dcgm_is_worth_watching_and_no_more")]),
    ),
    row(
        "17",
        "a check that could not run ends with 0",
        Tested(&[
            ("crates/node/tests/commands.rs", "check_exits_as_nagios_reads_it"),
            (CHECK, "where_nothing_applies_nobody_is_told_that_all_is_well"),
        ]),
    ),
    row(
        "20",
        "checks that hang drain nodes, and nobody sees which it was",
        Tested(&[
            (
                "crates/node/tests/runner.rs",
                "what_cannot_be_killed_is_left_behind_once_and_tried_again_when_it_is_free",
            ),
            (HOOKS, "a_prolog_keeps_a_job_from_an_isolated_node_only_while_the_breakers_permit_is_fresh"),
            (NHC, "a_check_that_could_not_run_is_no_verdict_and_hides_no_other"),
        ]),
    ),
    row("21", "states of Slurm with suffixes, and new ones", Later(6)),
    row(
        "24",
        "an Xid of an application takes the GPU away",
        Tested(&[(XID, "an_xid_of_an_application_is_no_fault_of_the_node")]),
    ),
    row("24", "a site cannot rate an Xid otherwise", Tested(&[(HERE, "a_site_rates_an_xid_as_it_wants")])),
];
