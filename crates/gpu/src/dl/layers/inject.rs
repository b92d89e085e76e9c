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
        injected: &[InjectedError],
    ) -> Result<Option<Self>, CudaError> {
        let (encoded, caller_index) = encode_errors(pass, replicas, injected);
        if caller_index.is_empty() {
            return Ok(None);
        }
        let changed = gpu.allocate(caller_index.len() * size_of::<u32>())?;
        Ok(Some(Self { kernel, errors: gpu.upload(&encoded)?, changed, caller_index }))
    }

    /// Injects the errors into the outputs, and sets `changed` for those that changed a value.
    pub(super) fn inject(&self, outputs: &Buffer<'_>, changed: &mut [bool]) -> Result<(), CudaError> {
        let count = u32::try_from(self.caller_index.len()).expect("the errors fit into a launch");
        self.kernel.launch(
            Launch::new(count.div_ceil(256), 256),
            &[outputs.into(), (&self.errors).into(), (&self.changed).into(), count.into()],
        )?;
        for (index, now) in self.caller_index.iter().zip(self.changed.read::<u32>(self.caller_index.len())?) {
            changed[*index] |= now != 0;
        }
        Ok(())
    }
}

/// Encodes the errors of a pass for the kernel, four words each, and returns the caller's index of each.
fn encode_errors(pass: Pass, replicas: usize, injected: &[InjectedError]) -> (Vec<u32>, Vec<usize>) {
    let (mut encoded, mut caller_index) = (Vec::new(), Vec::new());
    for (index, one) in injected.iter().enumerate().filter(|(_, one)| one.pass == pass) {
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
            encoded.extend([at as u32, (at >> 32) as u32]);
            encoded.extend(one.error.encode());
            caller_index.push(index);
        }
    }
    (encoded, caller_index)
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
    fn an_error_is_injected_into_its_replica_or_into_all() {
        let all = InjectedError { replicas: Replicas::All, error: OutputError::NotANumber, ..FLIP };
        let (encoded, caller_index) = encode_errors(FLIP.pass, 3, &[FLIP, all]);
        assert_eq!(encoded, [261, 0, 1, 30, 5, 0, 2, 0, 133, 0, 2, 0, 261, 0, 2, 0]);
        assert_eq!(caller_index, [0, 1, 1, 1]);
    }

    #[test]
    fn errors_of_other_passes_are_ignored() {
        assert_eq!(encode_errors(Pass::AdamStep, 3, &[FLIP]), (vec![], vec![]));
    }

    #[test]
    #[should_panic(expected = "has 128 outputs")]
    fn an_output_that_does_not_exist_is_rejected() {
        encode_errors(FLIP.pass, 3, &[InjectedError { place: 128, ..FLIP }]);
    }
}
