//! Runs a site's own command for operations that only the site can perform: replacing a machine, closing a host to users.
//!
//! The command runs without a shell, and only if no other user could change its program ([`trusted_file`]). Placeholders in braces are filled in, and environment variables name the node. Its run time
//! and its output are limited. The exit code decides what follows: 0 is success; 75 (`EX_TEMPFAIL`), or a throttling message of a
//! cloud in the output, is a temporary failure; any other code is permanent.

use std::{
    io,
    path::Path,
    process::Command,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use doctor_host::trusted_file;

use crate::{
    BackendError, Effect, deadline,
    process::{self, Limits, ProcessEnd, TailBuffer},
};

/// `EX_TEMPFAIL` of sysexits.h: a temporary failure.
const EX_TEMPFAIL: i32 = 75;
/// How much of the end of the output is kept, in bytes.
const MAX_OUTPUT: usize = 64 * 1024;
/// How long output is read after the command has ended, if another process holds the pipe open.
const DRAIN: Duration = Duration::from_secs(5);
/// How clouds and their command-line tools report a temporary failure.
const RETRYABLE_TEXTS: [&str; 10] = [
    "Throttling",
    "RequestLimitExceeded",
    "TooManyRequests",
    "Too Many Requests",
    "rate exceeded",
    "rateLimitExceeded",
    "ServiceUnavailable",
    "InternalError",
    "Could not connect to the endpoint",
    "timed out",
];

/// The values that a hook receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookParams<'a> {
    /// Each replaces `{NAME}` in the command's words and is set as the environment variable `DOCTOR_NAME`.
    pub values: Vec<(&'a str, String)>,
}

/// Runs a hook and waits at most `limit` for its end.
///
/// # Errors
/// With the last line of its output, and whether to retry.
pub fn run(
    operation: &'static str,
    command: &[String],
    params: &HookParams<'_>,
    limit: Duration,
) -> Result<(), BackendError> {
    let refuse = |text: String| BackendError { operation, text, effect: Effect::NotAppliedPermanent };
    let args = command.iter().map(|arg| filled(arg, params)).collect::<Result<Vec<_>, _>>().map_err(refuse)?;
    let Some((program, arguments)) = args.split_first() else { return Err(refuse("the hook is empty".to_owned())) };
    let path = trusted_file::program(Path::new(program));
    let path = path.map_err(|error| refuse(format!("{program} cannot be started: {error}")))?;
    let mut started = Command::new(path);
    started.args(arguments);
    for (name, value) in &params.values {
        started.env(format!("DOCTOR_{}", name.to_uppercase()), value);
    }
    // Within a call to a backend, the call may have less time left.
    let limit = deadline::time_left(limit);
    let tail = Arc::new(Mutex::new(TailBuffer::with_capacity(MAX_OUTPUT)));
    let limits = Limits { drain: Some(DRAIN), ..Limits::new(limit) };
    let ran = process::run(&mut started, Vec::new(), limits, (Arc::clone(&tail), Arc::clone(&tail)));
    let (ended, ..) = ran.map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => BackendError { operation, text: error.to_string(), effect: Effect::NotAppliedRetry },
        _ => refuse(format!("{program} cannot be started: {error}")),
    })?;
    let text = tail.lock().unwrap_or_else(PoisonError::into_inner).text().trim().to_owned();
    match ended {
        ProcessEnd::Exited(status) if status.success() => Ok(()),
        ProcessEnd::Exited(status) => {
            let later =
                status.code() == Some(EX_TEMPFAIL) || RETRYABLE_TEXTS.iter().any(|phrase| text.contains(phrase));
            let effect = if later { Effect::NotAppliedRetry } else { Effect::NotAppliedPermanent };
            Err(BackendError {
                operation,
                text: format!("{program} ended with {status}{}", last_output_line(&text)),
                effect,
            })
        }
        ProcessEnd::TimedOut | ProcessEnd::OutputLimit => {
            let text = format!("{program} did not end within {} s{}", limit.as_secs(), last_output_line(&text));
            Err(BackendError { operation, text, effect: Effect::Unknown })
        }
    }
}

/// Fills in the placeholders. An unknown or empty one is refused: a hook must not act on an incomplete command.
fn filled(arg: &str, params: &HookParams<'_>) -> Result<String, String> {
    let (mut out, mut rest) = (String::new(), arg);
    while let Some(open) = rest.find('{') {
        out.push_str(&rest[..open]);
        let inside = &rest[open + 1..];
        let close = inside.find('}').ok_or_else(|| format!("`{arg}` has a `{{` without its `}}`"))?;
        let name = &inside[..close];
        match params.values.iter().find(|(known, _)| *known == name) {
            Some((_, value)) if value.is_empty() => {
                return Err(format!("the node has no {name}, which `{arg}` needs"));
            }
            Some((_, value)) => out.push_str(value),
            None => {
                let known =
                    params.values.iter().map(|(known, _)| format!("{{{known}}}")).collect::<Vec<_>>().join(", ");
                return Err(format!("`{arg}` has the unknown placeholder `{{{name}}}`; use {known}"));
            }
        }
        rest = &inside[close + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

fn last_output_line(text: &str) -> String {
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.map_or_else(String::new, |line| format!(": {}", line.trim()))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn hook_params() -> HookParams<'static> {
        HookParams {
            values: vec![("node", "gpu-1".to_owned()), ("instance", "i-0abc".to_owned()), ("zone", String::new())],
        }
    }

    fn hook(args: &[&str], limit: Duration) -> Result<(), BackendError> {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        run("replace", &args, &hook_params(), limit)
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn arguments_are_expanded_and_the_environment_names_the_node() {
        hook(&["test", "{node}/{instance}", "=", "gpu-1/i-0abc"], LONG).unwrap();
        hook(&["sh", "-c", "test \"$DOCTOR_NODE\" = gpu-1"], LONG).unwrap();
        let error = hook(&["true", "{pool}"], LONG).unwrap_err();
        assert!(error.text.contains("use {node}, {instance}, {zone}"), "{error}");
        assert_eq!(error.effect, Effect::NotAppliedPermanent);
        assert!(hook(&["true", "{zone}"], LONG).unwrap_err().text.contains("the node has no zone"));
        assert!(hook(&["true", "{zone"], LONG).is_err() && hook(&[], LONG).is_err());
    }

    #[test]
    fn the_exit_status_determines_the_effect() {
        for (script, effect) in [
            ("exit 75", Effect::NotAppliedRetry),
            ("echo 'An error occurred (RequestLimitExceeded)' >&2; exit 254", Effect::NotAppliedRetry),
            ("echo 'An error occurred (InvalidInstanceID.NotFound)' >&2; exit 254", Effect::NotAppliedPermanent),
            ("exit 1", Effect::NotAppliedPermanent),
        ] {
            let error = hook(&["sh", "-c", script], LONG).unwrap_err();
            assert_eq!(error.effect, effect, "{script}: {error}");
        }
        assert!(hook(&["/no/such/program"], LONG).unwrap_err().text.contains("cannot be started"));
    }

    #[test]
    fn a_program_that_another_user_could_change_is_not_started() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("replace");
        std::fs::write(&path, "#!/bin/sh\nexit 0\n").unwrap();
        let mode = |mode| std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        mode(0o755);
        hook(&[path.to_str().unwrap()], LONG).unwrap();
        mode(0o777);
        let error = hook(&[path.to_str().unwrap()], LONG).unwrap_err();
        assert_eq!(error.effect, Effect::NotAppliedPermanent);
        assert!(error.text.contains("chmod go-w"), "{error}");
    }

    #[test]
    fn a_hook_that_times_out_is_killed_with_its_children_and_its_effect_is_unknown() {
        let began = Instant::now();
        let error = hook(&["sh", "-c", "echo begun; sleep 600 & wait"], Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.effect, Effect::Unknown);
        assert!(error.text.contains("begun") && began.elapsed() < LONG, "{error}");
    }

    #[test]
    fn a_hook_with_endless_output_is_killed_at_the_limit() {
        let error = hook(&["yes"], Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.effect, Effect::Unknown);
    }

    #[test]
    fn long_hook_output_is_read_and_discarded() {
        let error = hook(&["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last; exit 1"], LONG);
        assert!(error.unwrap_err().text.ends_with(": last"));
    }
}
