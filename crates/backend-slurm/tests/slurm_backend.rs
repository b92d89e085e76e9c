//! Tests the Slurm backend on real Slurms of both generations, with real `doctor-node job` processes: the contract, runs on
//! drained nodes, and the priority of users.

use doctor_backend::contract_tests;

#[path = "slurm_backend/killed.rs"]
mod killed;
#[path = "slurm_backend/node_ops.rs"]
mod node_ops;
#[path = "slurm_backend/reads.rs"]
mod reads;
#[path = "slurm_backend/stage.rs"]
mod stage;
#[path = "slurm_backend/users.rs"]
mod users;

use doctor_testbed::slurm::Generation;

use stage::Stage;

/// Declares a test that runs on both generations.
macro_rules! on_both {
    ($($name:ident,)+) => {
        mod debian12 {
            $(#[test]
            fn $name() {
                super::$name(super::Generation::Debian12);
            })+
        }

        mod debian13 {
            $(#[test]
            fn $name() {
                super::$name(super::Generation::Debian13);
            })+
        }
    };
}

on_both! {
    the_contract_is_kept,
    a_requalification_run_on_a_drained_node_never_opens_it_to_users,
    a_reboot_keeps_the_node_closed_and_is_done_when_it_is_back,
    a_node_that_does_not_come_back_from_a_reboot_stays_closed,
    a_reset_runs_on_the_drained_node_and_leaves_it_drained,
    a_node_that_is_set_down_is_drained_too,
    the_users_come_first,
    what_slurm_forgets_is_told_by_the_claim,
    an_outage_of_the_controller_is_an_error_and_nothing_is_doubled,
    a_controller_that_hangs_costs_one_deadline_for_each_call,
    a_run_on_a_node_that_is_removed_can_be_ended,
    several_nodes_are_one_job,
    results_are_shown_on_the_node,
    slurmrestd_tells_the_same,
    a_node_that_is_powered_down_is_left_asleep,
    killed_anywhere_the_node_is_never_open_to_users,
}

fn the_contract_is_kept(generation: Generation) {
    let Some(stage) = Stage::new("the contract of backends", generation) else { return };
    let backend = stage.open();
    assert_eq!(contract_tests::violations(&backend, &stage), [], "broken rules");
}

use killed::killed_anywhere_the_node_is_never_open_to_users;
use node_ops::{
    a_node_that_does_not_come_back_from_a_reboot_stays_closed, a_node_that_is_set_down_is_drained_too,
    a_reboot_keeps_the_node_closed_and_is_done_when_it_is_back,
    a_requalification_run_on_a_drained_node_never_opens_it_to_users,
    a_reset_runs_on_the_drained_node_and_leaves_it_drained, results_are_shown_on_the_node,
};
use reads::{a_node_that_is_powered_down_is_left_asleep, slurmrestd_tells_the_same};
use users::{
    a_controller_that_hangs_costs_one_deadline_for_each_call, a_run_on_a_node_that_is_removed_can_be_ended,
    an_outage_of_the_controller_is_an_error_and_nothing_is_doubled, several_nodes_are_one_job, the_users_come_first,
    what_slurm_forgets_is_told_by_the_claim,
};
