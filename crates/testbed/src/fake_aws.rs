//! A fake AWS: moto serves EC2 on loopback, and the `aws` program talks to it as to the real service.
//!
//! moto plays neither throttling nor instances that take time to start. A test that needs those serves its own replies.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use crate::{kubernetes::from_script, ports, skip};

/// How long moto may take to listen. On a busy machine, Python needs long to import a hundred modules.
const PATIENCE: Duration = Duration::from_secs(300);

#[derive(Debug, thiserror::Error)]
pub enum FakeAwsError {
    /// moto is not on this machine and cannot be installed.
    #[error("{0}")]
    Unsupported(String),
    #[error("{0}")]
    Failed(String),
}

impl FakeAwsError {
    /// Reports by name and reason that a test did not run.
    ///
    /// # Panics
    /// Panics in CI, where a skipped test is a failure, and everywhere if moto is installed but fails.
    pub fn skip_tests(&self, what: &str) {
        skip::skip_tests(what, self, matches!(self, Self::Unsupported(_)));
    }
}

/// A running EC2 endpoint for one region. Dropping it stops the server.
#[derive(Debug)]
pub struct FakeAws {
    programs: PathBuf,
    url: String,
    server: Child,
}

impl Drop for FakeAws {
    fn drop(&mut self) {
        // The server may have exited already.
        let _gone = self.server.kill();
        let _ended = self.server.wait();
    }
}

impl FakeAws {
    /// Starts moto and waits until it listens.
    ///
    /// # Errors
    /// Returns what is missing on this machine, or an error if the server does not listen in time.
    pub fn start() -> Result<Self, FakeAwsError> {
        let programs = from_script("scripts/cloud.sh", &[]).map_err(FakeAwsError::Unsupported)?;
        let failed = |error: std::io::Error| FakeAwsError::Failed(format!("starting moto_server: {error}"));
        let free = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::reserve_one().map_err(failed)?));
        let mut command = Command::new(programs.join("moto_server"));
        command.args(["-H", "127.0.0.1", "-p", &free.port().to_string()]);
        let server = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(failed)?;
        let cloud = Self { programs, url: format!("http://{free}"), server };
        let began = Instant::now();
        while std::net::TcpStream::connect(free).is_err() {
            if began.elapsed() > PATIENCE {
                return Err(FakeAwsError::Failed(format!("moto_server does not answer at {free}")));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(cloud)
    }

    /// Returns the `env` command that points a program at this endpoint. Put it before the program's own arguments.
    pub fn command_prefix(&self) -> Vec<String> {
        environment(&self.programs, &self.url)
    }

    /// As [`Self::command_prefix`], for another server that plays the cloud.
    pub fn command_prefix_at(&self, url: &str) -> Vec<String> {
        environment(&self.programs, url)
    }

    /// Runs `aws` with these arguments and returns its output.
    ///
    /// # Panics
    /// Panics if `aws` fails.
    pub fn aws(&self, args: &[&str]) -> String {
        let before = self.command_prefix();
        let Output { status, stdout, stderr } =
            Command::new(&before[0]).args(&before[1..]).arg("aws").args(args).output().expect("env is there");
        assert!(status.success(), "aws {args:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8_lossy(&stdout).trim().to_owned()
    }
}

fn environment(programs: &Path, url: &str) -> Vec<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    [
        "env".to_owned(),
        format!("PATH={}:{path}", programs.display()),
        format!("AWS_ENDPOINT_URL={url}"),
        "AWS_ACCESS_KEY_ID=testing".to_owned(),
        "AWS_SECRET_ACCESS_KEY=nothing".to_owned(),
        "AWS_DEFAULT_REGION=us-east-1".to_owned(),
        "AWS_MAX_ATTEMPTS=1".to_owned(),
        // The developer's own AWS account must stay out of reach.
        "AWS_CONFIG_FILE=/dev/null".to_owned(),
        "AWS_SHARED_CREDENTIALS_FILE=/dev/null".to_owned(),
    ]
    .to_vec()
}
