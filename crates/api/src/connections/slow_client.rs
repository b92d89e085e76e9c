//! Streams and bodies that fail when the client is too slow, so that it cannot hold a connection.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::body::{Body, Bytes};
use hyper::body::{Frame, Incoming, SizeHint};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

use super::registry::RequestInProgress;

/// A client that accepts no data for this long is disconnected.
const STALL_TIMEOUT: Duration = Duration::from_secs(20);

/// A stream that fails when the client accepts no data.
#[derive(Debug)]
pub(super) struct StallTimeout<S> {
    stream: S,
    within: Duration,
    /// Runs while data is pending and cannot be sent.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> StallTimeout<S> {
    pub(super) const fn new(stream: S) -> Self {
        Self { stream, within: STALL_TIMEOUT, stalled: None }
    }

    /// Returns the result of a write, or a timeout if there was no progress for too long.
    fn check_stall<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if sent.is_ready() {
            self.stalled = None;
            return sent;
        }
        let within = self.within;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(within)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check_stall(context, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.check_stall(context, sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_flush(context);
        self.check_stall(context, sent)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_shutdown(context);
        self.check_stall(context, sent)
    }
}

/// How fast the body of a request has to arrive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyDeadlines {
    /// Between two pieces.
    pub(crate) piece: Duration,
    /// For the whole body, from the moment it is read.
    pub(crate) whole: Duration,
}

/// Whether a body failed because it did not arrive in time or not to its end; otherwise it is longer than its reader allows.
pub(crate) fn did_not_arrive(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| error.is::<io::Error>())
}

/// The body of a request, which fails when it arrives too slowly. Time counts only while the handler reads: a client is not late while
/// its request waits for us.
#[derive(Debug)]
pub(super) struct TimedBody<B> {
    body: B,
    deadlines: BodyDeadlines,
    began: Option<Instant>,
    /// Runs while a piece is awaited.
    late: Option<Pin<Box<Sleep>>>,
}

impl<B> TimedBody<B> {
    pub(super) const fn new(body: B, deadlines: BodyDeadlines) -> Self {
        Self { body, deadlines, began: None, late: None }
    }
}

impl<B> hyper::body::Body for TimedBody<B>
where
    B: hyper::body::Body<Data = Bytes, Error = hyper::Error> + Unpin,
{
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let late = || Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, "the body arrives too slowly"))));
        let deadlines = self.deadlines;
        let elapsed = self.began.get_or_insert_with(Instant::now).elapsed();
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(Ok(_))) if elapsed >= deadlines.whole => late(),
            Poll::Ready(frame) => {
                self.late = None;
                Poll::Ready(frame.map(|frame| frame.map_err(io::Error::other)))
            }
            Poll::Pending => {
                let wait = deadlines.piece.min(deadlines.whole.saturating_sub(elapsed));
                let timer = self.late.get_or_insert_with(|| Box::pin(sleep(wait)));
                if timer.as_mut().poll(context).is_ready() { late() } else { Poll::Pending }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a request as the server receives it.
pub(super) type RequestBody = TimedBody<Incoming>;

/// The body of a response, whose request is in progress until it was sent.
#[derive(Debug)]
pub(super) struct ResponseBody {
    pub(super) body: Body,
    pub(super) _request: RequestInProgress,
}

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
    }

    #[test]
    fn a_stalled_client_times_out_and_a_slow_one_does_not() {
        runtime().block_on(async {
            let (near, mut far) = duplex(8);
            let mut sent = StallTimeout { within: Duration::from_millis(20), ..StallTimeout::new(near) };
            sent.write_all(b"12345678").await.unwrap();
            let stalled = sent.write_all(b"9").await;
            assert_eq!(stalled.unwrap_err().kind(), io::ErrorKind::TimedOut);
            // The timeout counts from the last accepted byte, so it starts again.
            let mut patient = StallTimeout { within: Duration::from_secs(600), ..sent };
            patient.stalled = None;
            let reading = async {
                let mut taken = [0; 9];
                far.read_exact(&mut taken).await.map(|_| taken)
            };
            let (written, read) = futures_util::future::join(patient.write_all(b"9"), reading).await;
            written.unwrap();
            assert_eq!(&read.unwrap(), b"123456789");
        });
    }

    /// A body whose pieces are given, and that never ends.
    struct Pieces(Vec<&'static [u8]>);

    impl hyper::body::Body for Pieces {
        type Data = Bytes;
        type Error = hyper::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
            match self.0.pop() {
                Some(piece) => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(piece))))),
                None => Poll::Pending,
            }
        }
    }

    async fn next(body: &mut TimedBody<Pieces>) -> io::Result<Frame<Bytes>> {
        let frame = std::future::poll_fn(|context| hyper::body::Body::poll_frame(Pin::new(&mut *body), context));
        frame.await.expect("the body never ends")
    }

    #[test]
    fn a_body_that_does_not_arrive_is_not_taken_for_one_that_is_too_long() {
        let deadlines = BodyDeadlines { piece: Duration::from_millis(20), whole: Duration::from_secs(600) };
        runtime().block_on(async {
            let body = || Body::new(TimedBody::new(Pieces(vec![b"abc"]), deadlines));
            let late = axum::body::to_bytes(body(), 3).await.unwrap_err();
            assert!(did_not_arrive(&late), "{late}");
            let too_long = axum::body::to_bytes(body(), 2).await.unwrap_err();
            assert!(!did_not_arrive(&too_long), "{too_long}");
        });
    }

    #[test]
    fn a_body_that_stops_or_drips_times_out() {
        let deadlines = |piece: u64, whole: u64| BodyDeadlines {
            piece: Duration::from_millis(piece),
            whole: Duration::from_millis(whole),
        };
        runtime().block_on(async {
            for deadlines in [deadlines(20, 600_000), deadlines(600_000, 20)] {
                let mut body = TimedBody::new(Pieces(vec![b"a"]), deadlines);
                next(&mut body).await.unwrap();
                assert_eq!(next(&mut body).await.unwrap_err().kind(), io::ErrorKind::TimedOut, "{deadlines:?}");
            }
            let mut dripping = TimedBody::new(Pieces(vec![b"b", b"a"]), deadlines(600_000, 0));
            assert!(next(&mut dripping).await.is_err(), "pieces do not extend the deadline of the whole body");
        });
    }
}
