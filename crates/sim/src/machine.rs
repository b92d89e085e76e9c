//! A machine: its identity, and when it will break. Its faults come from separate random streams, so that it breaks at
//! the same times whatever else happens.

use doctor_core::{
    node::Hardware,
    time::{Span, Timestamp},
};

use crate::{
    assumptions::Assumptions,
    fault::{Class, Cure, FaultKind},
    random::{Purpose, Seed, Stream},
};

#[derive(Debug)]
pub(crate) struct Machine {
    /// Slot and generation in one number: the third machine in a slot differs from the second.
    pub(crate) number: u64,
    born: Timestamp,
    lemon: bool,
    stream: Stream,
    /// The remainder of the gap between faults in which the machine is at the start, in units of the mean gap.
    residue: Option<f64>,
    /// Faults drawn so far, whether or not they occurred.
    drawn: u32,
    pub(crate) boots: u32,
    /// The next fault.
    pub(crate) upcoming_fault: Option<UpcomingFault>,
    /// Present faults, as indices into the world's list.
    pub(crate) faults: Vec<u32>,
    /// Repairs and replacements scheduled so far; selects the next draw of a repair's duration.
    pub(crate) repairs: u32,
    /// Test results so far; selects the next draw of noise.
    pub(crate) measured: u32,
}

/// A future fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct UpcomingFault {
    pub(crate) at: Timestamp,
    pub(crate) kind: FaultKind,
    pub(crate) nth: u32,
    pub(crate) draw: FaultDraw,
}

/// The individual properties of one fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct FaultDraw {
    pub(crate) cure: Cure,
    pub(crate) depth: f64,
    pub(crate) part: u8,
    /// As a share of [`Assumptions::agent_poll`].
    pub(crate) agent_delay: f64,
    /// In units of the mean time to a ticket.
    pub(crate) ticket: f64,
}

impl Machine {
    /// Creates a machine. The first machine in a slot has some age; later ones are new.
    pub(crate) fn new(seed: Seed, slot: u32, generation: u32, now: Timestamp, assumptions: &Assumptions) -> Self {
        let number = (u64::from(slot) << 24) | u64::from(generation);
        let mut made = seed.stream(Purpose::Machine, number, 0);
        let age = made.unit();
        let lemon = made.chance(assumptions.lemon_share);
        let first = generation == 0;
        let oldest = if first { assumptions.oldest } else { Span::ZERO };
        Self {
            number,
            born: now.minus(scaled(oldest, age)),
            lemon,
            stream: seed.stream(Purpose::Faults, number, 0),
            residue: first.then(|| residue(&mut made, assumptions.weibull_shape)),
            drawn: 0,
            boots: 1,
            upcoming_fault: None,
            faults: Vec::new(),
            repairs: 0,
            measured: 0,
        }
    }

    pub(crate) const fn generation(&self) -> u32 {
        (self.number & 0xff_ffff) as u32
    }

    /// Returns the slot of the machine.
    pub(crate) const fn place(&self) -> u32 {
        (self.number >> 24) as u32
    }

    /// Returns what the cluster knows of the machine without querying the node.
    pub(crate) fn outside(&self) -> Hardware {
        Hardware {
            gpu_uuids: Vec::new(),
            board_serial: Some(self.serial()),
            physical_host: None,
            boot_id: Some(format!("{:010x}-{:04}", self.number, self.boots)),
        }
    }

    /// Returns what the node reports of itself.
    pub(crate) fn inside(&self) -> Hardware {
        let gpu = |part| format!("GPU-{:010x}-{part:02}", self.number);
        Hardware { gpu_uuids: (0..crate::simulated_tests::PARTS).map(gpu).collect(), ..self.outside() }
    }

    fn serial(&self) -> String {
        format!("SIM{:010x}", self.number)
    }

    /// Draws the next fault after `from`. `None`: nothing ever breaks in this world.
    pub(crate) fn next_fault(&mut self, from: Timestamp, assumptions: &Assumptions) -> Option<UpcomingFault> {
        let ordinary = assumptions.ordinary_rate();
        if ordinary <= 0.0 {
            return None;
        }
        let lemon = if self.lemon { assumptions.lemon_factor } else { 1.0 };
        // Without a bound, a machine that is never replaced would eventually break every second.
        let incidents = i32::try_from(self.drawn.min(40)).unwrap_or(40);
        let per_day = ordinary * lemon * assumptions.hazard_per_incident.powi(incidents);
        let gap = self.stream.weibull(assumptions.weibull_shape);
        let gap = self.residue.take().unwrap_or(gap);
        let at = self.after(from, gap / per_day, assumptions);
        let class = self.stream.pick(&[
            assumptions.hard_per_node_day,
            assumptions.gray_per_node_day,
            assumptions.sdc_per_node_day,
        ]);
        let class = [Class::Hard, Class::Gray, Class::Sdc][class];
        let weights: Vec<f64> = FaultKind::ALL
            .iter()
            .map(|kind| if kind.profile().class == class { kind.profile().share } else { 0.0 })
            .collect();
        let kind = FaultKind::ALL[self.stream.pick(&weights)];
        let fate = draw_fault(&mut self.stream, kind);
        let nth = self.drawn;
        self.drawn += 1;
        Some(UpcomingFault { at, kind, nth, draw: fate })
    }

    /// Creates a fault now, for a script. It draws nothing from the stream of spontaneous faults.
    pub(crate) fn fault_now(&mut self, seed: Seed, kind: FaultKind, now: Timestamp) -> UpcomingFault {
        let nth = self.drawn;
        self.drawn += 1;
        let mut stream = seed.stream(Purpose::Faults, self.number, u64::from(nth) + 1);
        UpcomingFault { at: now, kind, nth, draw: draw_fault(&mut stream, kind) }
    }

    /// Returns the time `days` of ordinary ageing after `from`; a young machine ages faster.
    fn after(&self, from: Timestamp, days: f64, assumptions: &Assumptions) -> Timestamp {
        let grown = self.born.plus(assumptions.infant_period);
        let young = grown.since(from).as_hours() / 24.0;
        let consumed = young * assumptions.infant_factor;
        if days <= consumed {
            from.plus(from_days(days / assumptions.infant_factor))
        } else {
            from.plus(from_days(young + days - consumed))
        }
    }
}

fn draw_fault(stream: &mut Stream, kind: FaultKind) -> FaultDraw {
    FaultDraw {
        cure: [Cure::Reset, Cure::Reboot, Cure::Repair][stream.pick(&kind.profile().cures)],
        depth: stream.unit(),
        part: u8::try_from(stream.below(usize::from(crate::simulated_tests::PARTS))).unwrap_or(0),
        agent_delay: stream.unit(),
        ticket: stream.exponential(),
    }
}

/// Draws the rest of the gap that an observer finds long after the beginning. Without this, the whole fleet would start
/// with the burst that follows a fault.
fn residue(stream: &mut Stream, shape: f64) -> f64 {
    let mut ahead = -30.0;
    while ahead < 0.0 {
        ahead += stream.weibull(shape);
    }
    ahead
}

/// Multiplies a duration by a factor.
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "milliseconds of a simulated world")]
pub(crate) fn scaled(span: Span, factor: f64) -> Span {
    Span::from_millis((span.millis() as f64 * factor) as i64)
}

/// Converts days, bounded so that a distant time stays representable.
#[expect(clippy::cast_possible_truncation, reason = "bounded just before")]
fn from_days(days: f64) -> Span {
    Span::from_millis((days.min(1.0e6) * 86_400_000.0) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fates(seed: u64, slot: u32) -> Vec<UpcomingFault> {
        let assumptions = Assumptions::default();
        let mut machine = Machine::new(Seed(seed), slot, 0, Timestamp::from_secs(0), &assumptions);
        let mut at = Timestamp::from_secs(0);
        (0..20)
            .map(|_| {
                let coming = machine.next_fault(at, &assumptions).unwrap();
                at = coming.at;
                coming
            })
            .collect()
    }

    #[test]
    fn faults_of_a_machine_are_reproducible_per_seed() {
        assert_eq!(fates(1, 5), fates(1, 5));
        assert_ne!(fates(1, 5), fates(2, 5));
        assert_ne!(fates(1, 5), fates(1, 6));
    }

    #[test]
    fn a_fleet_fails_at_about_the_published_rate() {
        let assumptions = Assumptions { infant_factor: 1.0, hazard_per_incident: 1.0, ..Assumptions::default() };
        let start = Timestamp::from_secs(0);
        let end = start.plus(Span::days(2000));
        let mut counts = [0_u32; 3];
        for slot in 0..400 {
            let mut machine = Machine::new(Seed(3), slot, 0, start, &assumptions);
            let mut at = start;
            while let Some(coming) = machine.next_fault(at, &assumptions).filter(|coming| coming.at < end) {
                at = coming.at;
                counts[coming.kind.profile().class as usize] += 1;
            }
        }
        for (count, expected) in counts.into_iter().zip([3.8e-3, 1.5e-3, 1.0e-4]) {
            let rate = f64::from(count) / (400.0 * 2000.0);
            assert!((rate / expected - 1.0).abs() < 0.25, "{rate} instead of {expected}");
        }
    }

    #[test]
    fn a_fleet_does_not_start_with_a_burst_of_faults() {
        let assumptions = Assumptions { infant_factor: 1.0, hazard_per_incident: 1.0, ..Assumptions::default() };
        let start = Timestamp::from_secs(0);
        let end = start.plus(Span::days(30));
        let broken = (0..20_000).filter(|slot| {
            let mut machine = Machine::new(Seed(3), *slot, 0, start, &assumptions);
            machine.next_fault(start, &assumptions).is_some_and(|coming| coming.at < end)
        });
        // About 30 times the daily rate for ordinary machines, nearly all lemons.
        let share = broken.count() as f64 / 20_000.0;
        assert!((0.10..0.16).contains(&share), "{share}");
    }

    #[test]
    fn a_new_machine_fails_more_often_during_its_infant_period() {
        let assumptions = Assumptions::default();
        let now = Timestamp::from_secs(0);
        let new = Machine::new(Seed(1), 0, 1, now, &assumptions);
        assert_eq!(new.after(now, 30.0, &assumptions), now.plus(Span::days(10)));
        assert_eq!(new.after(now, 100.0, &assumptions), now.plus(Span::days(40)));
        let later = now.plus(Span::days(365));
        assert_eq!(new.after(later, 30.0, &assumptions), later.plus(Span::days(30)));
    }
}
