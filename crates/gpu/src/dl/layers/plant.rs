//! Errors injected into the outputs: the negative control of every run, and trials.

use crate::cuda::{Buffer, CudaError, Function, Gpu, Launch};

use super::passes::Pass;

/// An error injected into the outputs of every repeat, after the pass and before the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planted {
    pub pass: Pass,
    pub replicas: Replicas,
    /// The index of the output.
    pub place: usize,
    pub error: PlantedError,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replicas {
    One(usize),
    /// The same error in all: the replicas agree, and are wrong.
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlantedError {
    /// Replaced by zero.
    Lost,
    /// The lowest bit is 0, the sign is 31.
    Flipped {
        bit: u32,
    },
    NotANumber,
}

impl PlantedError {
    /// Returns the encoding that the kernel takes.
    const fn words(self) -> [u32; 2] {
        match self {
            Self::Lost => [0, 0],
            Self::Flipped { bit } => [1, bit],
            Self::NotANumber => [2, 0],
        }
    }
}

/// The errors of one pass, ready on the device.
#[derive(Debug)]
pub(super) struct Errors<'g> {
    kernel: Function<'g>,
    errors: Buffer<'g>,
    changed: Buffer<'g>,
    /// For each error on the device, its index among the caller's.
    whose: Vec<usize>,
}

impl<'g> Errors<'g> {
    /// Uploads the errors of the pass. Returns `None` if it has none.
    ///
    /// # Panics
    /// Panics for a replica or an output that does not exist.
    pub(super) fn of(
        gpu: &'g Gpu<'g>,
        kernel: Function<'g>,
        pass: Pass,
        replicas: usize,
        planted: &[Planted],
    ) -> Result<Option<Self>, CudaError> {
        let (words, whose) = described(pass, replicas, planted);
        if whose.is_empty() {
            return Ok(None);
        }
        let changed = gpu.allocate(whose.len() * size_of::<u32>())?;
        Ok(Some(Self { kernel, errors: gpu.upload(&words)?, changed, whose }))
    }

    /// Injects the errors into the outputs, and sets `changed` for those that changed a value.
    pub(super) fn plant(&self, outputs: &Buffer<'_>, changed: &mut [bool]) -> Result<(), CudaError> {
        let count = u32::try_from(self.whose.len()).expect("the errors fit into a launch");
        self.kernel.launch(
            Launch::of(count.div_ceil(256), 256),
            &[outputs.into(), (&self.errors).into(), (&self.changed).into(), count.into()],
        )?;
        for (whose, now) in self.whose.iter().zip(self.changed.read::<u32>(self.whose.len())?) {
            changed[*whose] |= now != 0;
        }
        Ok(())
    }
}

/// Encodes the errors of a pass for the kernel, four words each, and returns the caller's index of each.
fn described(pass: Pass, replicas: usize, planted: &[Planted]) -> (Vec<u32>, Vec<usize>) {
    let (mut words, mut whose) = (Vec::new(), Vec::new());
    for (index, one) in planted.iter().enumerate().filter(|(_, one)| one.pass == pass) {
        let numbers = pass.known().numbers;
        assert!(one.place < numbers, "{pass} has {numbers} outputs and no {}", one.place);
        let into = match one.replicas {
            Replicas::All => 0..replicas,
            Replicas::One(replica) => {
                assert!(replica < replicas, "{pass} has {replicas} replicas and no {replica}");
                replica..replica + 1
            }
        };
        for replica in into {
            let at = (replica * numbers + one.place) as u64;
            words.extend([at as u32, (at >> 32) as u32]);
            words.extend(one.error.words());
            whose.push(index);
        }
    }
    (words, whose)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLIP: Planted = Planted {
        pass: Pass::CrossEntropyForward,
        replicas: Replicas::One(2),
        place: 5,
        error: PlantedError::Flipped { bit: 30 },
    };

    #[test]
    fn an_error_goes_to_its_replica_and_one_for_all_to_each() {
        let all = Planted { replicas: Replicas::All, error: PlantedError::NotANumber, ..FLIP };
        let (words, whose) = described(FLIP.pass, 3, &[FLIP, all]);
        assert_eq!(words, [261, 0, 1, 30, 5, 0, 2, 0, 133, 0, 2, 0, 261, 0, 2, 0]);
        assert_eq!(whose, [0, 1, 1, 1]);
    }

    #[test]
    fn errors_of_other_passes_are_left_out() {
        assert_eq!(described(Pass::AdamStep, 3, &[FLIP]), (vec![], vec![]));
    }

    #[test]
    #[should_panic(expected = "has 128 outputs")]
    fn an_output_that_is_not_there_is_refused() {
        described(FLIP.pass, 3, &[Planted { place: 128, ..FLIP }]);
    }
}
