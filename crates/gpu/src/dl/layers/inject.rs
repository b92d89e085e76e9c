//! Errors injected into the outputs: the negative control of every run, and trials.

use crate::cuda::{Buffer, CudaError, Function, Gpu, Launch};

use super::passes::Pass;

/// An error injected into the outputs of every repeat, after the pass and before the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InjectedError {
    pub pass: Pass,
    pub replicas: Replicas,
    /// The index of the output.
    pub place: usize,
    pub error: OutputError,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replicas {
    One(usize),
    /// The same error in all: the replicas agree, and are wrong.
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputError {
    /// Replaced by zero.
    Zeroed,
    /// The lowest bit is 0, the sign is 31.
    Flipped {
        bit: u32,
    },
    NotANumber,
}

impl OutputError {
    /// Returns the encoding that the kernel takes.
    const fn encode(self) -> [u32; 2] {
        match self {
            Self::Zeroed => [0, 0],
            Self::Flipped { bit } => [1, bit],
            Self::NotANumber => [2, 0],
        }
    }
}

/// The errors of one pass, ready on the device.
#[derive(Debug)]
pub(super) struct PassErrors<'g> {
    kernel: Function<'g>,
    errors: Buffer<'g>,
    changed: Buffer<'g>,
    /// For each error on the device, its index among the caller's.
    caller_index: Vec<usize>,
}

impl<'g> PassErrors<'g> {
    /// Uploads the errors of the pass. Returns `None` if it has none.
    ///
    /// # Panics
    /// Panics for a replica or an output that does not exist.
    pub(super) fn upload(
        gpu: &'g Gpu<'g>,
        kernel: Function<'g>,
        pass: Pass,
        replicas: usize,
        planted: &[InjectedError],
    ) -> Result<Option<Self>, CudaError> {
        let (words, whose) = encode_errors(pass, replicas, planted);
        if whose.is_empty() {
            return Ok(None);
        }
        let changed = gpu.allocate(whose.len() * size_of::<u32>())?;
        Ok(Some(Self { kernel, errors: gpu.upload(&words)?, changed, caller_index: whose }))
    }

    /// Injects the errors into the outputs, and sets `changed` for those that changed a value.
    pub(super) fn inject(&self, outputs: &Buffer<'_>, changed: &mut [bool]) -> Result<(), CudaError> {
        let count = u32::try_from(self.caller_index.len()).expect("the errors fit into a launch");
        self.kernel.launch(
            Launch::new(count.div_ceil(256), 256),
            &[outputs.into(), (&self.errors).into(), (&self.changed).into(), count.into()],
        )?;
        for (whose, now) in self.caller_index.iter().zip(self.changed.read::<u32>(self.caller_index.len())?) {
            changed[*whose] |= now != 0;
        }
        Ok(())
    }
}

/// Encodes the errors of a pass for the kernel, four words each, and returns the caller's index of each.
fn encode_errors(pass: Pass, replicas: usize, planted: &[InjectedError]) -> (Vec<u32>, Vec<usize>) {
    let (mut words, mut whose) = (Vec::new(), Vec::new());
    for (index, one) in planted.iter().enumerate().filter(|(_, one)| one.pass == pass) {
        let numbers = pass.spec().numbers;
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
            words.extend(one.error.encode());
            whose.push(index);
        }
    }
    (words, whose)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLIP: InjectedError = InjectedError {
        pass: Pass::CrossEntropyForward,
        replicas: Replicas::One(2),
        place: 5,
        error: OutputError::Flipped { bit: 30 },
    };

    #[test]
    fn an_error_goes_to_its_replica_and_one_for_all_to_each() {
        let all = InjectedError { replicas: Replicas::All, error: OutputError::NotANumber, ..FLIP };
        let (words, whose) = encode_errors(FLIP.pass, 3, &[FLIP, all]);
        assert_eq!(words, [261, 0, 1, 30, 5, 0, 2, 0, 133, 0, 2, 0, 261, 0, 2, 0]);
        assert_eq!(whose, [0, 1, 1, 1]);
    }

    #[test]
    fn errors_of_other_passes_are_left_out() {
        assert_eq!(encode_errors(Pass::AdamStep, 3, &[FLIP]), (vec![], vec![]));
    }

    #[test]
    #[should_panic(expected = "has 128 outputs")]
    fn an_output_that_is_not_there_is_refused() {
        encode_errors(FLIP.pass, 3, &[InjectedError { place: 128, ..FLIP }]);
    }
}
