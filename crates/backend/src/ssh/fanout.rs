//! Runs the same work on many hosts with bounded concurrency. A slow or dead host occupies one worker and delays no other.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls `work` for each host and returns the results in the order of the hosts. Calls `done` with the number completed so far.
pub fn run_on_each<H: Sync, T: Send>(
    hosts: &[H],
    at_once: usize,
    work: impl Fn(&H) -> T + Sync,
    done: impl Fn(usize) + Sync,
) -> Vec<T> {
    let (next, count) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let worker = || {
        let mut results = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(host) = hosts.get(index) else { return results };
            results.push((index, work(host)));
            done(count.fetch_add(1, Ordering::Relaxed) + 1);
        }
    };
    let mut results: Vec<(usize, T)> = std::thread::scope(|scope| {
        let workers = at_once.clamp(1, hosts.len().max(1));
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        // Propagate a worker's panic to the caller.
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Condvar, Mutex};

    #[test]
    fn answers_come_in_the_order_asked_and_no_more_work_at_once_than_allowed() {
        let (working, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let progress = Mutex::new(Vec::new());
        let numbers: Vec<usize> = (0..50).collect();
        let work = |number: &usize| {
            most.fetch_max(working.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            working.fetch_sub(1, Ordering::SeqCst);
            number * 2
        };
        let results = run_on_each(&numbers, 4, work, |done| progress.lock().unwrap().push(done));
        assert_eq!(results, numbers.iter().map(|number| number * 2).collect::<Vec<_>>());
        assert!(most.load(Ordering::SeqCst) <= 4);
        let mut progress = progress.into_inner().unwrap();
        progress.sort_unstable();
        assert_eq!(progress, (1..=50).collect::<Vec<_>>());
        assert_eq!(run_on_each(&[] as &[u8], 4, |_| 0, |_| {}), [0; 0]);
    }

    #[test]
    fn a_slow_host_does_not_delay_the_others() {
        let (others, arrived) = (Mutex::new(0), Condvar::new());
        let work = |number: &u32| {
            let mut count = others.lock().unwrap();
            if *number == 0 {
                // It ends after all the others.
                drop(arrived.wait_while(count, |count| *count < 9).unwrap());
            } else {
                *count += 1;
                arrived.notify_all();
            }
        };
        assert_eq!(run_on_each(&(0..10).collect::<Vec<u32>>(), 2, work, |_| {}).len(), 10);
    }
}
