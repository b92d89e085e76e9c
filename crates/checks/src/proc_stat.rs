//! Parses a line of `/proc/PID/stat`, enough to identify a process.
//!
//! A pid alone is reused; together with the start time in ticks it is unique within one boot.

/// The fields of the line that are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcStat {
    pub pid: u32,
    /// `R`, `S`, `D`, `Z` and so on.
    pub state: char,
    pub parent: u32,
    /// The process group.
    pub group: u32,
    pub session: u32,
    /// The threads that have not ended; the first one always counts.
    pub threads: u32,
    /// Clock ticks from boot to its start.
    pub start_ticks: u64,
}

impl ProcStat {
    /// Parses a line. The name is in parentheses and may itself contain spaces and parentheses; fields are counted from
    /// behind it.
    pub fn parse(line: &str) -> Option<Self> {
        let (before, rest) = line.rsplit_once(") ")?;
        let pid = before.split_once(" (")?.0.parse().ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let session = fields.next()?.parse().ok()?;
        let threads = fields.nth(13)?.parse().ok()?;
        let start_ticks = fields.nth(1)?.parse().ok()?;
        Some(Self { pid, state, parent, group, session, threads, start_ticks })
    }

    /// Returns the kernel's short name of the process of such a line.
    pub fn name(line: &str) -> Option<&str> {
        Some(line.rsplit_once(") ")?.0.split_once(" (")?.1)
    }

    /// Returns the processor time of the process of such a line and of its ended children, in ticks.
    pub fn cpu_ticks(line: &str) -> Option<u64> {
        let fields = line.rsplit_once(") ")?.1.split_ascii_whitespace().skip(11).take(4);
        let ticks: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
        (ticks.len() == 4).then(|| ticks.iter().sum())
    }

    /// Returns whether the process has ended and only waits to be reaped. A killed process shows the state of its first
    /// thread, which may have ended while another one still hangs in the kernel.
    pub const fn has_exited(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Linux 6.18, 2026-11-15; the name made worse by hand.
    const LINE: &str = "7182 (a) S (b) S 7170 7180 7171 0 -1 4194304 120 0 0 0 1 2 3 4 20 0 1 0 123456 3149824 384 \
        18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0";

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let stat = ProcStat::parse(LINE).unwrap();
        assert_eq!(
            stat,
            ProcStat {
                pid: 7182,
                state: 'S',
                parent: 7170,
                group: 7180,
                session: 7171,
                threads: 1,
                start_ticks: 123_456
            }
        );
        assert!(!stat.has_exited());
        assert_eq!(ProcStat::name(LINE), Some("a) S (b"));
        assert_eq!(ProcStat::cpu_ticks(LINE), Some(1 + 2 + 3 + 4));
        assert!(ProcStat::parse(&LINE.replace(") S 7170", ") Z 7170")).unwrap().has_exited());
    }

    // Linux 6.18, 2026-11-15: fio, killed while one of its threads waited for a frozen file system.
    const HALF_DEAD: &str = "23109 (fio) Z 23084 23084 12948 0 -1 4228108 6688 0 0 0 34 9 0 0 20 0 2 0 2389860 0 0 \
        18446744073709551615 0 0 0 0 0 0 0 4 16898 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 9";

    #[test]
    fn a_process_is_alive_while_one_of_its_threads_hangs() {
        let stat = ProcStat::parse(HALF_DEAD).unwrap();
        assert_eq!((stat.state, stat.threads), ('Z', 2));
        assert!(!stat.has_exited());
    }

    #[test]
    fn a_truncated_line_is_not_a_process() {
        for cut in [0, 3, 14, 40] {
            assert_eq!(ProcStat::parse(&LINE[..cut]), None, "{cut}");
        }
    }
}
