//! The two tools that move data: their server and client command lines, and how their output is read.

use std::{ffi::OsString, path::Path};

use doctor_checks::{
    fabric_params::{FabricParams, PINGPONG_BYTES, PINGPONG_ITERATIONS, WRITE_BYTES},
    perftest, pingpong,
};
use doctor_core::{
    observation::{Entity, FailureKind, Metric, ProbeFailure, Unit},
    time::Span,
};

use super::client_server::{CommandLines, PairOutput};
use crate::builtin::program::Program;

/// Where Amazon's installer puts libfabric's programs.
const AMAZON: &str = "/opt/amazon/efa/bin";

/// Both sides are on this machine.
const LOOPBACK_ADDRESS: &str = "127.0.0.1";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tool {
    /// `ib_write_bw`, for InfiniBand and RoCE.
    Write,
    /// `fi_pingpong`, for EFA.
    Pingpong,
}

/// A tool's result for one port.
#[derive(Debug, PartialEq)]
pub(super) enum ToolResult {
    Throughput {
        bits_per_second: f64,
        seconds: Option<f64>,
    },
    /// Messages did not arrive.
    Failed(String),
    /// The output says nothing about the port.
    NoResult(FailureKind, String),
}

impl Tool {
    pub(super) const ALL: &'static [Self] = &[Self::Write, Self::Pingpong];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Write => "ib_write_bw",
            Self::Pingpong => "fi_pingpong",
        }
    }

    /// Finds the installed program.
    ///
    /// # Errors
    /// If it is not installed.
    pub(super) fn find(self, params: &FabricParams) -> Result<Program, ProbeFailure> {
        let (program, also_in, package): (_, &[&Path], _) = match self {
            Self::Write => (&params.ib_write_bw, &[], "perftest"),
            Self::Pingpong => (&params.fi_pingpong, &[Path::new(AMAZON)], "libfabric-bin"),
        };
        Program::find(program, also_in).ok_or_else(|| {
            let text = format!("{program} is not installed; it is in the package `{package}`");
            ProbeFailure::new(FailureKind::NotInstalled, text)
        })
    }

    /// Builds the command lines of both sides for this device.
    pub(super) fn command_lines(self, params: &FabricParams, device: &str, port: &str, listen: u16) -> CommandLines {
        let args = |args: &[&str]| args.iter().map(OsString::from).collect::<Vec<_>>();
        let (server, client, environment) = match self {
            Self::Write => {
                let seconds = (params.duration.millis() / 1000).to_string();
                let (size, listen) = (WRITE_BYTES.to_string(), listen.to_string());
                // `-F`: no warning about the CPU frequency. `-D` with `-f 1`: measures without the first and the last
                // second.
                let mut both = args(&["-d", device, "-i", port, "-p", &listen, "-s", &size, "-F", "--report_gbits"]);
                both.extend(args(&["-D", &seconds, "-f", "1"]));
                if let Some(index) = params.gid_index {
                    both.extend(args(&["-x", &index.to_string()]));
                }
                let client = [both.clone(), args(&[LOOPBACK_ADDRESS])].concat();
                (both, client, None)
            }
            Self::Pingpong => {
                let (size, times, listen) =
                    (PINGPONG_BYTES.to_string(), PINGPONG_ITERATIONS.to_string(), listen.to_string());
                let domain = format!("{device}-rdm");
                let both = args(&["-p", "efa", "-e", "rdm", "-d", &domain, "-I", &times, "-S", &size]);
                let server = [both.clone(), args(&["-B", &listen])].concat();
                let client = [both, args(&["-P", &listen, LOOPBACK_ADDRESS])].concat();
                // Otherwise two processes on one machine would bypass the adapter.
                (server, client, Some(("FI_EFA_ENABLE_SHM_TRANSFER", "0")))
            }
        };
        CommandLines { server, client, listen, environment }
    }

    /// Returns how long the load itself lasts.
    pub(super) const fn load_time(self, params: &FabricParams) -> Span {
        match self {
            Self::Write => params.duration,
            Self::Pingpong => Span::ZERO,
        }
    }

    pub(super) fn parse_output(self, output: &PairOutput) -> ToolResult {
        let parsed = match self {
            Self::Write => perftest::parse(&output.stdout)
                .map(|written| ToolResult::Throughput { bits_per_second: written.bits_per_second, seconds: None })
                .map_err(|error| error.to_string()),
            Self::Pingpong => pingpong::parse(&output.stdout)
                .map(|result| ToolResult::Throughput {
                    bits_per_second: result.bits_per_second,
                    seconds: Some(result.seconds),
                })
                .map_err(|error| error.to_string()),
        };
        match (parsed, output.exit) {
            (Ok(throughput), Some(0)) => throughput,
            (Err(text), Some(0)) => ToolResult::NoResult(FailureKind::Unparseable, text),
            (_, None) => ToolResult::NoResult(FailureKind::Killed, format!("{} was killed by a signal", self.name())),
            (_, Some(code)) => {
                let complaint = |text: String| format!("{} ended with exit code {code}: {text}", self.name());
                let client = format!("{}\n{}", output.stdout, output.stderr);
                match self {
                    Self::Write => match perftest::classify_failure(&format!("{client}\n{}", output.server)) {
                        perftest::PerftestFailure::Traffic(text) => ToolResult::Failed(complaint(text)),
                        perftest::PerftestFailure::Other(text) => {
                            ToolResult::NoResult(FailureKind::Failed, complaint(text))
                        }
                    },
                    Self::Pingpong => match pingpong::classify_failure(&client, &output.server) {
                        pingpong::PingpongFailure::Traffic(text) => ToolResult::Failed(complaint(text)),
                        pingpong::PingpongFailure::Other(text) => {
                            ToolResult::NoResult(FailureKind::Failed, complaint(text))
                        }
                    },
                }
            }
        }
    }

    /// Returns the measurements under the names that rules and profiles use.
    pub(super) fn metrics(self, entity: &Entity, bits: f64, seconds: Option<f64>, rate: Option<f64>) -> Vec<Metric> {
        let metric = |name: &str, value, unit| Metric::new(name, entity.clone(), value, unit);
        match self {
            Self::Write => {
                let share = rate.filter(|rate| *rate > 0.0).map(|rate| bits * 100.0 / rate);
                let share = share.map(|share| metric("ib_write_percent_of_rate", share, Unit::Percent));
                [metric("ib_write_bits_per_s", bits, Unit::BitsPerSecond)].into_iter().chain(share).collect()
            }
            Self::Pingpong => {
                let latency = seconds.map(|seconds| metric("efa_pingpong_latency", seconds, Unit::Seconds));
                [metric("efa_pingpong_bits_per_s", bits, Unit::BitsPerSecond)].into_iter().chain(latency).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> FabricParams {
        FabricParams {
            devices: Vec::new(),
            duration: Span::from_secs(5),
            stall: Span::from_secs(30),
            gid_index: Some(3),
            ib_write_bw: "ib_write_bw".to_owned(),
            fi_pingpong: "fi_pingpong".to_owned(),
            timeout: Span::minutes(15),
        }
    }

    fn line(args: &[OsString]) -> String {
        args.iter().map(|arg| arg.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn both_sides_get_the_same_device_and_port() {
        let write = Tool::Write.command_lines(&params(), "mlx5_3", "2", 40_000);
        let both = "-d mlx5_3 -i 2 -p 40000 -s 8388608 -F --report_gbits -D 5 -f 1 -x 3";
        assert_eq!((line(&write.server), line(&write.client)), (both.to_owned(), format!("{both} 127.0.0.1")));
        let pingpong = Tool::Pingpong.command_lines(&params(), "rdmap79s0", "1", 40_000);
        let both = "-p efa -e rdm -d rdmap79s0-rdm -I 1000 -S 1048576";
        assert_eq!(line(&pingpong.server), format!("{both} -B 40000"));
        assert_eq!(line(&pingpong.client), format!("{both} -P 40000 127.0.0.1"));
        assert_eq!(pingpong.environment, Some(("FI_EFA_ENABLE_SHM_TRANSFER", "0")));
    }

    #[test]
    fn the_result_of_a_failed_run_does_not_count() {
        let row = "#bytes #iterations BW peak[Gb/sec] BW average[Gb/sec]\n 8388608 100 0.00 390.00\n";
        let output = |exit, stdout: &str| PairOutput { exit, stdout: stdout.to_owned(), ..PairOutput::default() };
        assert!(matches!(Tool::Write.parse_output(&output(Some(0), row)), ToolResult::Throughput { .. }));
        assert!(matches!(
            Tool::Write.parse_output(&output(Some(1), row)),
            ToolResult::NoResult(FailureKind::Failed, _)
        ));
        assert!(matches!(Tool::Write.parse_output(&output(None, row)), ToolResult::NoResult(FailureKind::Killed, _)));
        assert!(matches!(
            Tool::Write.parse_output(&output(Some(0), "")),
            ToolResult::NoResult(FailureKind::Unparseable, _)
        ));
        let error_output = " Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81\n";
        assert!(matches!(Tool::Write.parse_output(&output(Some(1), error_output)), ToolResult::Failed(_)));
    }
}
