//! What ranks send to each other: numbers, or the function that they are.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    sync::Arc,
};

use crate::cuda::{
    contents::{Content, sum::Sum},
    memory::{BadAddress, Memory},
};

pub(crate) enum Message {
    /// The bits of real numbers.
    Numbers(Vec<u32>),
    /// So many numbers of a sum, except those that differ, by their index.
    Function { sum: Sum, count: u64, changed: BTreeMap<u64, u32> },
}

const NUMBERS: u64 = 0;
const FUNCTION: u64 = 1;

impl Message {
    pub(crate) fn from_memory(memory: &Memory, address: u64, count: u64) -> Result<Self, BadAddress> {
        let stretch = memory.stretch(address, count * 4)?;
        if let [piece] = stretch.pieces.as_slice()
            && let Content::Sum(sum) = &piece.content
            && piece.origin == address
        {
            let changed = stretch.changed.iter().map(|(at, bits)| ((at - address) / 4, *bits)).collect();
            return Ok(Self::Function { sum: Sum::clone(sum), count, changed });
        }
        memory.read(address, count).map(Self::Numbers)
    }

    pub(crate) fn into_memory(self, memory: &mut Memory, address: u64) -> Result<(), BadAddress> {
        match self {
            Self::Numbers(bits) => memory.write(address, bits),
            Self::Function { sum, count, changed } => {
                memory.put(address, count * 4, Content::Sum(Arc::new(sum)), address)?;
                changed.into_iter().try_for_each(|(index, bits)| memory.set_word(address + index * 4, bits))
            }
        }
    }

    fn count(&self) -> u64 {
        match self {
            Self::Numbers(bits) => bits.len() as u64,
            Self::Function { count, .. } => *count,
        }
    }

    fn number(&self, index: u64) -> f32 {
        match self {
            Self::Numbers(bits) => f32::from_bits(bits[index as usize]),
            Self::Function { sum, changed, .. } => {
                changed.get(&index).map_or_else(|| sum.value(index), |bits| f32::from_bits(*bits))
            }
        }
    }

    /// Replaces one number, if the message is long enough.
    pub(crate) fn change(&mut self, index: u64, change: impl Fn(f32) -> f32) {
        if index >= self.count() {
            return;
        }
        let bits = change(self.number(index)).to_bits();
        match self {
            Self::Numbers(all) => all[index as usize] = bits,
            Self::Function { changed, .. } => drop(changed.insert(index, bits)),
        }
    }

    /// Adds up two messages of the same length.
    pub(crate) fn plus(self, other: &Self) -> Self {
        if let (Self::Function { sum, count, changed }, Self::Function { sum: more, changed: also, .. }) =
            (&self, other)
            && let Some(both) = sum.plus(more)
        {
            let indices = changed.keys().chain(also.keys());
            let changed =
                indices.map(|index| (*index, (self.number(*index) + other.number(*index)).to_bits())).collect();
            return Self::Function { sum: both, count: *count, changed };
        }
        let count = self.count().min(other.count());
        Self::Numbers((0..count).map(|index| (self.number(index) + other.number(index)).to_bits()).collect())
    }

    pub(crate) fn send(&self, stream: &mut impl Write) -> io::Result<()> {
        let numbers: Vec<u64> = match self {
            Self::Numbers(bits) => {
                [NUMBERS, bits.len() as u64].into_iter().chain(bits.iter().map(|bits| u64::from(*bits))).collect()
            }
            Self::Function { sum, count, changed } => {
                let head = [FUNCTION, *count, sum.seed.into(), sum.range.into(), sum.ranks.len() as u64];
                let ranks = sum.ranks.iter().map(|rank| u64::from(*rank));
                let changes = changed.iter().flat_map(|(index, bits)| [*index, u64::from(*bits)]);
                head.into_iter().chain(ranks).chain([changed.len() as u64]).chain(changes).collect()
            }
        };
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
        stream.write_all(&bytes)
    }

    pub(crate) fn receive(stream: &mut impl Read) -> io::Result<Self> {
        let length = read_number(stream)?;
        let mut bytes = vec![0; length as usize];
        stream.read_exact(&mut bytes)?;
        let mut rest = bytes.as_slice();
        let mut number = || read_number(&mut rest);
        let (kind, count) = (number()?, number()?);
        if kind == NUMBERS {
            return (0..count).map(|_| number().map(|bits| bits as u32)).collect::<io::Result<_>>().map(Self::Numbers);
        }
        let (seed, range, ranks) = (number()? as u32, number()? as u32, number()?);
        let ranks = (0..ranks).map(|_| number().map(|rank| rank as u32)).collect::<io::Result<_>>()?;
        let changes = number()?;
        let changed = (0..changes).map(|_| Ok((number()?, number()? as u32))).collect::<io::Result<_>>()?;
        Ok(Self::Function { sum: Sum { ranks, seed, range }, count, changed })
    }
}

fn read_number(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
}
