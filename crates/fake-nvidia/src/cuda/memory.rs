//! The memory of one GPU: allocations, each a sequence of pieces with their contents, and single words that differ.
//!
//! All addresses and lengths are multiples of 4.

use std::collections::BTreeMap;

use super::{contents::Content, gpu_model::WeakBit};

/// Where the memory of the first GPU begins, and the distance to that of the next.
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;
const SPACING: u64 = 1 << 40;

/// The page size of the driver's allocator, and the alignment of small allocations.
const PAGE: u64 = 2 << 20;
const SMALL: u64 = 512;

/// Returns the GPU to which an address belongs, counted from zero.
pub(crate) const fn gpu_of(address: u64) -> usize {
    (address.wrapping_sub(FIRST_ADDRESS) / SPACING) as usize
}

#[derive(Debug)]
pub(crate) struct Memory {
    first: u64,
    bytes: u64,
    used: u64,
    /// By address.
    allocations: BTreeMap<u64, Allocation>,
    /// The address of a word with a weak bit, and the bit.
    weak: Option<(u64, u32)>,
}

#[derive(Debug)]
struct Allocation {
    /// The first address after it.
    end: u64,
    /// By address, without gaps.
    pieces: BTreeMap<u64, PlacedContent>,
    /// Words that differ from the content, by address.
    changed: BTreeMap<u64, u32>,
}

/// A content, and the address of its position zero.
#[derive(Debug, Clone)]
struct PlacedContent {
    content: Content,
    origin: u64,
}

/// A part of a piece.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) content: Content,
    /// The address of the content's position zero. It may lie outside of the piece.
    pub(crate) origin: u64,
}

impl Piece {
    /// Returns the word at an address, without changes.
    pub(crate) fn word(&self, address: u64) -> u32 {
        self.content.word(address.wrapping_sub(self.origin) / 4)
    }
}

/// What a stretch of memory holds, for a copy.
#[derive(Debug, Clone)]
pub(crate) struct Stretch {
    pub(crate) start: u64,
    pub(crate) pieces: Vec<Piece>,
    /// Words that differ from the pieces, by address.
    pub(crate) changed: Vec<(u64, u32)>,
}

/// An address that is not within an allocation, or a length that exceeds it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BadAddress;

impl Memory {
    pub(crate) fn new(gpu: usize, bytes: u64, used: u64, weak: Option<WeakBit>) -> Self {
        let first = FIRST_ADDRESS + gpu as u64 * SPACING;
        Self {
            first,
            bytes,
            used,
            allocations: BTreeMap::new(),
            weak: weak.map(|weak| (first + weak.offset, weak.bit)),
        }
    }

    pub(crate) const fn total(&self) -> u64 {
        self.bytes
    }

    pub(crate) const fn free_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.used)
    }

    /// Allocates the first gap that is large enough. Returns `None` if there is none.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let unit = if bytes < PAGE / 2 { SMALL } else { PAGE };
        let room = bytes.max(1).next_multiple_of(unit);
        if room > self.free_bytes() {
            return None;
        }
        let mut start = self.first;
        for (other, allocation) in &self.allocations {
            if start + room <= *other {
                break;
            }
            start = allocation.end.next_multiple_of(unit);
        }
        if start + room > self.first + self.bytes {
            return None;
        }
        self.used += room;
        let pieces = BTreeMap::from([(start, PlacedContent { content: Content::Same(0), origin: start })]);
        self.allocations.insert(start, Allocation { end: start + room, pieces, changed: BTreeMap::new() });
        Some(start)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<(), BadAddress> {
        let allocation = self.allocations.remove(&address).ok_or(BadAddress)?;
        self.used -= allocation.end - address;
        Ok(())
    }

    fn allocation(&self, address: u64, bytes: u64) -> Result<&Allocation, BadAddress> {
        let found = self.allocations.range(..=address).next_back().map(|(_, allocation)| allocation);
        found.filter(|allocation| address + bytes <= allocation.end).ok_or(BadAddress)
    }

    fn allocation_mut(&mut self, address: u64, bytes: u64) -> Result<&mut Allocation, BadAddress> {
        let found = self.allocations.range_mut(..=address).next_back().map(|(_, allocation)| allocation);
        found.filter(|allocation| address + bytes <= allocation.end).ok_or(BadAddress)
    }

    /// Writes a content whose position zero is at `origin`.
    pub(crate) fn put(&mut self, address: u64, bytes: u64, content: Content, origin: u64) -> Result<(), BadAddress> {
        let weak = self.weak.filter(|(weak, _)| (address..address + bytes).contains(weak));
        let allocation = self.allocation_mut(address, bytes)?;
        if bytes > 0 {
            allocation.put(address, address + bytes, PlacedContent { content, origin });
        }
        if let Some((weak, _)) = weak {
            self.set_word(weak, self.word(weak)?)?;
        }
        Ok(())
    }

    /// Writes words.
    pub(crate) fn write(&mut self, address: u64, words: Vec<u32>) -> Result<(), BadAddress> {
        self.put(address, words.len() as u64 * 4, Content::words(words), address)
    }

    /// Writes one word.
    pub(crate) fn set_word(&mut self, address: u64, word: u32) -> Result<(), BadAddress> {
        let flipped = self.weak.filter(|(weak, _)| *weak == address).map_or(0, |(_, bit)| 1 << bit);
        self.allocation_mut(address, 4)?.changed.insert(address, word ^ flipped);
        Ok(())
    }

    pub(crate) fn word(&self, address: u64) -> Result<u32, BadAddress> {
        self.read(address, 1).map(|words| words[0])
    }

    pub(crate) fn read(&self, address: u64, count: u64) -> Result<Vec<u32>, BadAddress> {
        let mut words = vec![0; count as usize];
        self.read_into(address, &mut words)?;
        Ok(words)
    }

    pub(crate) fn read_into(&self, address: u64, words: &mut [u32]) -> Result<(), BadAddress> {
        let stretch = self.stretch(address, words.len() as u64 * 4)?;
        for piece in &stretch.pieces {
            let (from, till) = ((piece.start - address) / 4, (piece.end - address) / 4);
            piece.content.read(piece.start.wrapping_sub(piece.origin) / 4, &mut words[from as usize..till as usize]);
        }
        for (at, word) in &stretch.changed {
            words[((at - address) / 4) as usize] = *word;
        }
        Ok(())
    }

    pub(crate) fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        self.read(address, 2).map(|words| u64::from(words[0]) | u64::from(words[1]) << 32)
    }

    pub(crate) fn write_u64(&mut self, address: u64, word: u64) -> Result<(), BadAddress> {
        self.write(address, vec![word as u32, (word >> 32) as u32])
    }

    /// Returns what a stretch holds.
    pub(crate) fn stretch(&self, address: u64, bytes: u64) -> Result<Stretch, BadAddress> {
        let allocation = self.allocation(address, bytes)?;
        let end = address + bytes;
        let changed = allocation.changed.range(address..end).map(|(at, word)| (*at, *word)).collect();
        Ok(Stretch { start: address, pieces: allocation.pieces_within(address, end), changed })
    }

    /// Writes what a stretch of this or another memory holds.
    pub(crate) fn put_stretch(&mut self, address: u64, stretch: &Stretch) -> Result<(), BadAddress> {
        let moved = |at: u64| at.wrapping_sub(stretch.start).wrapping_add(address);
        for Piece { start, end, content, origin } in &stretch.pieces {
            self.put(moved(*start), end - start, content.clone(), moved(*origin))?;
        }
        stretch.changed.iter().try_for_each(|(at, word)| self.set_word(moved(*at), *word))
    }
}

impl Allocation {
    fn put(&mut self, start: u64, end: u64, content: PlacedContent) {
        // What lies behind keeps its content.
        if end < self.end && !self.pieces.contains_key(&end) {
            let split = self.pieces.range(..end).next_back().map(|(_, content)| content.clone());
            self.pieces.extend(split.map(|split| (end, split)));
        }
        let covered: Vec<u64> = self.pieces.range(start..end).map(|(at, _)| *at).collect();
        covered.iter().for_each(|at| drop(self.pieces.remove(at)));
        self.pieces.insert(start, content);
        if !self.changed.is_empty() {
            let behind = self.changed.split_off(&start).split_off(&end);
            self.changed.extend(behind);
        }
    }

    fn pieces_within(&self, start: u64, end: u64) -> Vec<Piece> {
        let first = self.pieces.range(..=start).next_back().map_or(start, |(at, _)| *at);
        let mut ends = self.pieces.range(first..).skip(1).map(|(at, _)| *at).chain([self.end]);
        let pieces = self.pieces.range(first..end).map(|(at, PlacedContent { content, origin })| Piece {
            start: (*at).max(start),
            end: ends.next().unwrap_or(self.end).min(end),
            content: content.clone(),
            origin: *origin,
        });
        pieces.filter(|piece| piece.start < piece.end).collect()
    }
}
