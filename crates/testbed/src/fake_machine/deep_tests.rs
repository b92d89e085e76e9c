//! The machine under the deep tests: the rates and faults of its GPUs, and the command that tests them.

use std::process::Command;

use super::{FakeMachine, Field, InstalledMachine};

impl FakeMachine {
    /// Sets what the GPU reports while it multiplies.
    pub fn gpu_under_load(mut self, n: usize, field: &str, value: f64) -> Self {
        self.gpus[n].load.insert(field.to_owned(), Field::Number(value));
        self
    }

    /// Sets a rate of the GPU in CUDA and NCCL, by the name of the metric: `gemm_bf16_flop_per_s`.
    pub fn gpu_rate(mut self, n: usize, metric: &str, rate: f64) -> Self {
        assert!(self.gpus[n].cuda.contains_key(metric), "no such rate: {metric}");
        self.gpus[n].cuda.insert(metric.to_owned(), Field::Number(rate));
        self
    }

    /// Makes the GPU compute wrong, slowly or not at all. The stand-in's page lists the faults and their words:
    /// `("wrong_product", "fp16 77 123 12")`.
    pub fn gpu_fault(mut self, n: usize, fault: &str, words: &str) -> Self {
        self.gpus[n].cuda.insert(fault.to_owned(), Field::Text(words.to_owned()));
        self
    }
}

impl InstalledMachine {
    /// Returns the command `doctor-node test` with these arguments, not yet started. The stand-in is its driver, CUDA
    /// and NCCL.
    pub fn test(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("test").arg("--root").arg(self.path("root")).arg("--state").arg(self.path("state"));
        command.arg("--policy").arg(self.path("policy.toml")).arg("--nvml").arg(&self.library).args(arguments);
        command.env("DOCTOR_CUDA", &self.library).env("DOCTOR_NCCL", &self.library);
        command.env("DOCTOR_FAKE_NVIDIA", self.path("nvml.toml"));
        command
    }
}
