//! The built-in checks, one file per check, and the pure code that they share.
//!
//! A check lists the probes that it needs ([`probe`]), interprets their output ([`Check::interpret`]) and carries the
//! default rules that classify the result. It performs no I/O, so each check is tested on captured output. Adding a
//! check means adding its file and its name to [`CHECKS`].

pub mod access;
pub mod catalogue;
pub mod check_params;
#[cfg(test)]
mod classify_fixture;
pub mod collective_links;
pub mod collective_params;
pub mod collective_rank_reports;
pub mod collective_report;
pub mod coverage_of_other_tools;
pub mod cpu_list;
pub mod credential;
pub mod dcgm_diag;
pub mod dcgm_health_report;
pub mod dcgm_params;
pub mod dcgm_text_output;
mod default_rules;
pub mod differing_devices;
pub mod disturbance;
pub mod document;
pub mod drain_permit;
pub mod fabric_counters;
pub mod fabric_params;
pub mod files;
pub mod fio;
pub mod gpu;
pub mod gpu_query;
pub mod host_processes;
pub mod job_file;
pub mod key_fingerprint;
pub mod kmsg;
pub mod load_counters;
pub mod measurements;
pub mod mount_table;
pub mod nccl_log;
pub mod nccl_tests;
pub mod nhc;
pub mod nvidia_smi;
pub mod pci;
pub mod perftest;
pub mod pingpong;
pub mod probe;
pub mod proc_stat;
pub mod process_owner;
pub mod profiles;
pub mod rdma;
pub mod report_schema;
pub mod result_transport;
pub mod site_checks;
pub mod site_profiles;
pub mod sockets;
mod software;
pub mod spec;
pub mod storage_params;
pub mod sxid_record;
pub mod tables;
pub mod uptime;
pub mod user_mounts;
pub mod xid_record;

pub use catalogue::{Catalogue, Suite};
pub use gpu_libraries::LIBRARY_DIRS as LIBRARY_PLACES;
pub use measurements::interpret_measurements;
pub use spec::{Check, Depth, Params, Spec, page_of};

/// Declares the module of each check and collects the checks into `CHECKS`.
macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        $(mod $name;)*
        /// All checks built into this program.
        pub static CHECKS: &[Check] = &[$($name::CHECK),*];
    };
}

checks![
    aznhc,
    clock_source,
    collective,
    cpu_count,
    cpu_governor,
    cpu_online,
    cpu_throttle,
    dcgm,
    dcgm_health,
    disk_errors,
    disk_space,
    dl,
    edac,
    efa_count,
    efa_counters,
    efa_devices,
    efa_provider,
    fabric,
    fabric_manager,
    fs_errors,
    gpu_clocks,
    gpu_compute_mode,
    gpu_count,
    gpu_driver,
    gpu_ecc_corrected,
    gpu_ecc_mode,
    gpu_ecc_sram,
    gpu_ecc_volatile,
    gpu_fabric,
    gpu_inforom,
    gpu_libraries,
    gpu_memory_size,
    gpu_memory_temperature,
    gpu_mig,
    gpu_pcie,
    gpu_pcie_replay,
    gpu_persistence,
    gpu_power_brake,
    gpu_power_limit,
    gpu_presence,
    gpu_processes,
    gpu_recovery_action,
    gpu_retired_pages,
    gpu_row_remap,
    gpu_temperature,
    gpu_throttle,
    gpu_versions,
    gpu_xid,
    host_pressure,
    ib_count,
    ib_counters,
    ib_firmware,
    ib_flaps,
    ib_pkey,
    ib_ports,
    ib_rate,
    imex,
    job_ends,
    kernel_log,
    kernel_modules,
    kernel_settings,
    limits,
    memlock,
    memory,
    memory_fragmentation,
    mounts,
    net_link,
    nic_log,
    nvlink_count,
    nvlink_crc,
    nvlink_errors,
    nvlink_state,
    nvlink_topology,
    nvme_count,
    nvme_health,
    nvme_state,
    nvswitch,
    nvswitch_sxid,
    oom,
    pcie_acs,
    pcie_aer,
    pcie_link,
    peermem,
    processes_stuck,
    raid,
    roce,
    services,
    storage,
    time_sync,
    zombies,
];
