//! A cloud that is not there: moto plays EC2 on loopback, and the program `aws` talks to it as to the real one.
//!
//! What it does not play: throttling, and instances that take time. A test that needs those answers for itself.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use crate::{excuse, kubernetes::from_script};

/// Long on a busy machine: an interpreter starts and reads a hundred modules.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum CloudError {
    /// It is not on this machine and cannot be brought here.
    #[error("{0}")]
    NotThere(String),
    #[error("{0}")]
    Failed(String),
}

impl CloudError {
    /// Says that a test did not run, by name and reason.
    ///
    /// # Panics
    /// In CI, where that is a failure; and anywhere if there is a cloud that does not do what it should.
    pub fn not_run(&self, what: &str) {
        excuse::not_run(what, self, matches!(self, Self::NotThere(_)));
    }
}

/// A running EC2 of one region. It ends with this value.
#[derive(Debug)]
pub struct Cloud {
    programs: PathBuf,
    url: String,
    server: Child,
}

impl Drop for Cloud {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _gone = self.server.kill();
        let _ended = self.server.wait();
    }
}

impl Cloud {
    /// # Errors
    /// With what is missing on this machine, or if it does not begin to answer.
    pub fn start() -> Result<Self, CloudError> {
        let programs = from_script("scripts/cloud.sh", &[]).map_err(CloudError::NotThere)?;
        let failed = |error: std::io::Error| CloudError::Failed(format!("starting moto_server: {error}"));
        // Whoever takes the port in between makes the server fail, which is said.
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map_err(failed)?;
        let mut command = Command::new(programs.join("moto_server"));
        command.args(["-H", "127.0.0.1", "-p", &free.port().to_string()]);
        let server = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(failed)?;
        let cloud = Self { programs, url: format!("http://{free}"), server };
        let began = Instant::now();
        while std::net::TcpStream::connect(free).is_err() {
            if began.elapsed() > PATIENCE {
                return Err(CloudError::Failed(format!("moto_server does not answer at {free}")));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(cloud)
    }

    /// What makes a program talk to this cloud: words to put before its own.
    pub fn before(&self) -> Vec<String> {
        environment(&self.programs, &self.url)
    }

    /// The same for another server that plays the cloud.
    pub fn before_at(&self, url: &str) -> Vec<String> {
        environment(&self.programs, url)
    }

    /// Runs `aws` with these words and gives back what it printed.
    ///
    /// # Panics
    /// If it fails.
    pub fn aws(&self, words: &[&str]) -> String {
        let before = self.before();
        let Output { status, stdout, stderr } =
            Command::new(&before[0]).args(&before[1..]).arg("aws").args(words).output().expect("env is there");
        assert!(status.success(), "aws {words:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8_lossy(&stdout).trim().to_owned()
    }
}

fn environment(programs: &Path, url: &str) -> Vec<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    [
        "env".to_owned(),
        format!("PATH={}:{path}", programs.display()),
        format!("AWS_ENDPOINT_URL={url}"),
        "AWS_ACCESS_KEY_ID=nobody".to_owned(),
        "AWS_SECRET_ACCESS_KEY=nothing".to_owned(),
        "AWS_DEFAULT_REGION=us-east-1".to_owned(),
        "AWS_MAX_ATTEMPTS=1".to_owned(),
        // It must not find an account of whoever runs the tests.
        "AWS_CONFIG_FILE=/dev/null".to_owned(),
        "AWS_SHARED_CREDENTIALS_FILE=/dev/null".to_owned(),
    ]
    .to_vec()
}
