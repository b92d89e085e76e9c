//! Tests of the built program: its output and exit codes, as users see them.

mod access;
mod agent_tls;
mod agents;
mod alerts;
mod api;
mod azure;
mod azure_node;
mod changing;
mod control_loop;
mod deployment;
#[cfg(feature = "dstack-bed")]
mod dstack;
mod fleet;
mod fleet_steps;
mod hostile_share;
#[cfg(feature = "kubernetes-bed")]
mod kubernetes;
#[cfg(feature = "kubernetes-bed")]
mod kubernetes_agents;
#[cfg(feature = "kubernetes-bed")]
mod kubernetes_flows;
#[cfg(feature = "kubernetes-bed")]
mod kubernetes_several;
mod metrics;
mod out_of_the_box;
mod posted_results;
mod read_only;
mod reading;
#[cfg(feature = "kubernetes-bed")]
mod real_kubelet;
mod refused_settings;
mod rejudging;
mod remote;
mod reports;
mod settings;
mod simulated;
mod slurm_flows;
mod slurm_hooks;
mod slurm_several;
mod ssh_flows;
mod ssh_several;
mod ssh_silent;
mod status_table;
mod this_machine;
mod traces;
mod units;
mod upgrades;
mod workdir;
