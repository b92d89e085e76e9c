//! Posts the result document to the controller, so that no shared directory is needed.
//!
//! A repeated post is harmless: the first one counts. A job that is asked to stop gives up within seconds, because its
//! node is wanted. How the document is sent is the caller's: this module knows no addresses.

use std::{
    fmt, io,
    time::{Duration, Instant},
};

use super::log::Log;
use crate::stop::Stop;

/// How long a post is repeated while the document has another way.
const PATIENCE: Duration = Duration::from_secs(20);
/// And after the job was asked to stop or exceeded its limit.
const PATIENCE_AFTER_STOP: Duration = Duration::from_secs(5);
/// Limit of one exchange. The controller answers once the document is durable, for which it allows twenty seconds.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const MAX_WAIT: Duration = Duration::from_secs(15);

/// Sends a document within a time limit.
pub type SendDocument = Box<dyn Fn(&[u8], Duration) -> io::Result<PostReply>>;

/// Where the result document is posted.
pub struct ResultPost {
    /// The controller's address, for the log.
    pub address: String,
    pub send: SendDocument,
}

impl fmt::Debug for ResultPost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResultPost").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The controller's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PostReply {
    pub status: u16,
    pub retry_after: Option<Duration>,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PostOutcome {
    /// The controller has it.
    Accepted,
    /// It will never accept it.
    Rejected,
    /// It did not answer, or could not store it, in time.
    Unanswered,
}

/// What one exchange says about the next.
enum Exchange {
    Over(PostOutcome, String),
    Repeat { wait: Duration, why: String },
}

impl ResultPost {
    /// Posts the document for a while.
    pub(super) fn send_soon(&self, document: &[u8], stop: &Stop, log: &Log) -> PostOutcome {
        self.repeat(document, PATIENCE, stop, log)
    }

    /// Posts the document until the job's limit.
    pub(super) fn send_until_stopped(&self, document: &[u8], stop: &Stop, log: &Log) -> PostOutcome {
        self.repeat(document, Duration::MAX, stop, log)
    }

    fn repeat(&self, document: &[u8], patience: Duration, stop: &Stop, log: &Log) -> PostOutcome {
        let began = Instant::now();
        let (mut pause, mut stopped, mut last_failure) = (FIRST_WAIT, None::<Instant>, String::new());
        loop {
            stopped = stopped.or_else(|| stop.requested().map(|_| Instant::now()));
            let after_stop = stopped.map_or(Duration::MAX, |at| PATIENCE_AFTER_STOP.saturating_sub(at.elapsed()));
            let left = patience.saturating_sub(began.elapsed()).min(after_stop);
            if left.is_zero() {
                log.line("job", "the result was not posted in time");
                return PostOutcome::Unanswered;
            }
            match self.exchange(document, left.min(EXCHANGE_TIMEOUT)) {
                Exchange::Over(outcome, text) => {
                    log.line("job", &text);
                    return outcome;
                }
                Exchange::Repeat { wait, why } => {
                    if why != last_failure {
                        log.line("job", &why);
                        last_failure = why;
                    }
                    let wait = wait.max(pause).min(left);
                    match stopped {
                        Some(_) => std::thread::sleep(wait),
                        None => {
                            let _seen_next = stop.requested_within(wait);
                        }
                    }
                    pause = (pause * 2).min(MAX_WAIT);
                }
            }
        }
    }

    fn exchange(&self, document: &[u8], limit: Duration) -> Exchange {
        let address = &self.address;
        let reply = match (self.send)(document, limit) {
            Ok(reply) => reply,
            Err(error) => {
                return Exchange::Repeat { wait: Duration::ZERO, why: format!("{address} does not answer: {error}") };
            }
        };
        let PostReply { status, retry_after, text } = reply;
        match status {
            200..=299 => Exchange::Over(PostOutcome::Accepted, format!("{address} has the result")),
            408 | 429 | 500..=599 => Exchange::Repeat {
                wait: retry_after.unwrap_or_default().min(MAX_WAIT),
                why: format!("{address} is busy ({status}: {text})"),
            },
            _ => Exchange::Over(
                PostOutcome::Rejected,
                format!("{address} does not accept the result ({status}: {text})"),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::VecDeque, rc::Rc};

    use super::*;

    /// A controller that gives these answers, in order, and then does not answer. Returns also the number of posts.
    fn controller(answers: &[u16]) -> (ResultPost, Rc<RefCell<usize>>) {
        let posts = Rc::new(RefCell::new(0));
        let answers: RefCell<VecDeque<u16>> = RefCell::new(answers.iter().copied().collect());
        let count = Rc::clone(&posts);
        let send: SendDocument = Box::new(move |document, _| {
            assert_eq!(document, b"DOCUMENT");
            *count.borrow_mut() += 1;
            let status = answers.borrow_mut().pop_front().ok_or(io::ErrorKind::ConnectionRefused)?;
            Ok(PostReply { status, retry_after: Some(Duration::ZERO), text: String::new() })
        });
        (ResultPost { address: "http://ctl".to_owned(), send }, posts)
    }

    fn send(post: &ResultPost, patience: Duration, stop: &Stop) -> PostOutcome {
        post.repeat(b"DOCUMENT", patience, stop, &Log::to_output())
    }

    const LONG: Duration = Duration::from_secs(240);

    #[test]
    fn a_result_is_posted_again_until_the_controller_has_it() {
        let (post, posts) = controller(&[503, 202]);
        assert_eq!((send(&post, LONG, &Stop::never()), *posts.borrow()), (PostOutcome::Accepted, 2));
        let (post, posts) = controller(&[200]);
        assert_eq!((send(&post, LONG, &Stop::never()), *posts.borrow()), (PostOutcome::Accepted, 1));
    }

    #[test]
    fn a_result_that_is_never_accepted_is_posted_once() {
        for status in [301, 400, 403, 404, 410, 411, 413, 422] {
            let (post, posts) = controller(&[status]);
            assert_eq!((send(&post, LONG, &Stop::never()), *posts.borrow()), (PostOutcome::Rejected, 1), "{status}");
        }
    }

    #[test]
    fn a_job_at_its_limit_does_not_wait_for_an_absent_controller() {
        let began = Instant::now();
        let stop = Stop::never().after(Duration::ZERO);
        let (post, posts) = controller(&[]);
        assert_eq!(send(&post, Duration::MAX, &stop), PostOutcome::Unanswered);
        assert!(began.elapsed() < LONG && *posts.borrow() >= 1);
    }
}
