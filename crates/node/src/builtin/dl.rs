//! The deep-learning test of the GPUs, as a built-in test.

use std::ffi::OsString;

use clap::Parser;
use doctor_checks::{disturbance::RatesOf, document::Measurements};
use doctor_core::{
    observation::{FailureKind, ProbeFailure},
    time::Span,
};
use doctor_gpu::dl::{self, Options, negative_control::InjectedErrorKind};

use super::disturbance::Watch;
use crate::stop::Stop;

/// Arguments from the check, and further ones for manual use.
#[derive(Debug, Parser)]
#[command(name = "dl", no_binary_name = true)]
struct Arguments {
    /// Load the GPUs until they are warm, for at most this time; "0s" for the cold test only
    #[arg(long, default_value = "20s")]
    heat: Span,
    /// Plant one error of this kind into each product: zero, bit-flip, not-a-number or repeated
    #[arg(long, value_parser = kind)]
    inject: Option<InjectedErrorKind>,
    /// Plant this many errors of each kind after the test, and count those that are detected
    #[arg(long, default_value_t = 0)]
    trials: u64,
    /// Path of the CUDA driver, if the loader does not find it by name
    #[arg(long, env = "DOCTOR_CUDA", default_value = doctor_gpu::cuda::LIBRARY)]
    cuda: OsString,
    #[arg(long, env = "DOCTOR_NVML", default_value = doctor_gpu::nvml::LIBRARY)]
    nvml: OsString,
}

fn kind(name: &str) -> Result<InjectedErrorKind, String> {
    let known = || InjectedErrorKind::ALL.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
    InjectedErrorKind::from_name(name).ok_or_else(|| format!("expected one of {}", known()))
}

pub(super) fn run(args: Vec<OsString>) -> Result<Measurements, ProbeFailure> {
    let Arguments { heat, inject, trials, cuda, nvml } = Arguments::try_parse_from(args)
        .map_err(|error| ProbeFailure::new(FailureKind::Failed, error.to_string().trim().to_owned()))?;
    let options = Options { cuda, nvml, load_time: heat.to_std(), inject, trials };
    let watch = Watch::gpus(1, &Stop::never());
    let result = dl::run(&options, &|line| eprintln!("{line}"));
    watch.report(result, RatesOf::EachGpu)
}
