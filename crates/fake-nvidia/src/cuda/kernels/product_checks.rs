//! The checks of products: the checksum of every row, the wrong numbers of a row, and planted errors.

use std::collections::BTreeMap;

use super::{Arguments, KernelError};
use crate::cuda::{
    contents::{Content, product::Product},
    device::Device,
    memory::{Memory, Stretch},
};

pub(crate) fn check_rows(device: &Device, is_float: bool, rows: u32, arguments: &Arguments) -> Result<(), KernelError> {
    let [c, n, weights, expected, count, list, room] = arguments.take()?;
    let mut memory = device.memory();
    let (weights, expected) = (memory.read(weights, n)?, memory.read(expected, rows.into())?);
    let stretch = memory.stretch(c, u64::from(rows) * n * 4)?;
    let wrong = match product_in(&stretch, c, n).filter(|product| product.is_float == is_float) {
        Some(product) => {
            let sums = product.row_sums(&weights);
            let differences = differences(product, &stretch, &weights, is_float);
            let sum_of = |row: u32| {
                let (difference, is_odd) = differences.get(&row).copied().unwrap_or_default();
                (sums[row as usize].wrapping_add(difference), is_odd)
            };
            wrong_rows(&expected, sum_of)
        }
        None => {
            let words = memory.read(c, u64::from(rows) * n)?;
            wrong_rows(&expected, |row| {
                sum_of_words(&words[(u64::from(row) * n) as usize..][..n as usize], &weights, is_float)
            })
        }
    };
    if wrong.is_empty() {
        return Ok(());
    }
    let before = memory.word(count)?;
    let listed = wrong.iter().take(room.saturating_sub(before.into()) as usize).flatten().copied();
    memory.write(list + u64::from(before) * 8, listed.collect())?;
    Ok(memory.write(count, vec![before + wrong.len() as u32])?)
}

/// Returns each row whose checksum is not the expected one, with the checksum. A sum is `(checksum, whether a number is
/// none that a sum of integers can be)`.
fn wrong_rows(expected: &[u32], sum_of: impl Fn(u32) -> (u32, bool)) -> Vec<[u32; 2]> {
    let rows = expected.iter().zip(0..).filter_map(|(expected, row)| {
        let (sum, is_odd) = sum_of(row);
        (is_odd || sum != *expected).then_some([row, sum])
    });
    rows.collect()
}

/// Returns the product that fills a stretch, apart from changed words.
fn product_in(stretch: &Stretch, c: u64, n: u64) -> Option<&Product> {
    match stretch.pieces.as_slice() {
        [piece] if piece.origin == c => match &piece.content {
            Content::Product(product) if u64::from(product.columns()) == n => Some(&**product),
            _ => None,
        },
        _ => None,
    }
}

/// Returns for each row with changed numbers what they add to its checksum, and whether one is no integer.
fn differences(product: &Product, stretch: &Stretch, weights: &[u32], is_float: bool) -> BTreeMap<u32, (u32, bool)> {
    let mut rows = BTreeMap::<u32, (u32, bool)>::new();
    for (at, bits) in &stretch.changed {
        let place = (at - stretch.start) / 4;
        let (row, column) = (place / weights.len() as u64, place % weights.len() as u64);
        let (number, is_odd) = integer(*bits, is_float);
        let difference = number.wrapping_sub(product.number(place)) as u32;
        let sum = rows.entry(row as u32).or_default();
        sum.0 = sum.0.wrapping_add(difference.wrapping_mul(weights[column as usize]));
        sum.1 |= is_odd;
    }
    rows
}

fn sum_of_words(words: &[u32], weights: &[u32], is_float: bool) -> (u32, bool) {
    words.iter().zip(weights).fold((0, false), |(sum, any_odd): (u32, bool), (bits, weight)| {
        let (number, is_odd) = integer(*bits, is_float);
        (sum.wrapping_add((number as u32).wrapping_mul(*weight)), any_odd || is_odd)
    })
}

/// Returns the nearest integer, and whether the bits are not exactly that: a fraction, a NaN, or minus zero.
fn integer(bits: u32, is_float: bool) -> (i32, bool) {
    if !is_float {
        return (bits as i32, false);
    }
    let number = f32::from_bits(bits).round_ties_even() as i32;
    (number, (number as f32).to_bits() != bits)
}

pub(crate) fn locate(device: &Device, arguments: &Arguments) -> Result<(), KernelError> {
    let [c, n, k, row, seed_a, seed_b, range, is_float, count, list, room] = arguments.take()?;
    let mut memory = device.memory();
    let first = c + row * n * 4;
    let stretch = memory.stretch(first, n * 4)?;
    let product = product_in(&stretch, c, n).filter(|product| {
        let (a, b) = (product.a, product.b);
        let same = |seed: u64, matrix_seed: u32| seed == u64::from(matrix_seed);
        let shape = (u64::from(a.k), u64::from(a.range), u64::from(product.is_float)) == (k, range, is_float);
        shape && same(seed_a, a.seed) && same(seed_b, b.seed)
    });
    let product = product.ok_or(KernelError::Unexpected("there is no product of these matrices"))?;
    let changed = stretch.changed.iter().filter_map(|(at, bits)| {
        let place = (at - c) / 4;
        let number = product.number(place);
        (*bits != product.encode(number)).then(|| [row as u32, (place % n) as u32, *bits, number as u32])
    });
    let wrong: Vec<_> = changed.collect();
    append(&mut memory, count, list, room, &wrong)
}

/// Adds entries to a list and its count.
fn append(memory: &mut Memory, count: u64, list: u64, room: u64, entries: &[[u32; 4]]) -> Result<(), KernelError> {
    if entries.is_empty() {
        return Ok(());
    }
    let before = memory.word(count)?;
    let listed = entries.iter().take(room.saturating_sub(before.into()) as usize).flatten().copied();
    memory.write(list + u64::from(before) * 16, listed.collect())?;
    Ok(memory.write(count, vec![before + entries.len() as u32])?)
}

pub(crate) fn plant_numbers(device: &Device, arguments: &Arguments) -> Result<(), KernelError> {
    let [c, places, kinds, bits, is_float, changed, count] = arguments.take()?;
    let mut memory = device.memory();
    let (places, kinds, bits) = (memory.read(places, count)?, memory.read(kinds, count)?, memory.read(bits, count)?);
    let mut has_changed = Vec::new();
    for ((place, kind), bit) in places.into_iter().zip(kinds).zip(bits) {
        let at = c + u64::from(place) * 4;
        let was = memory.word(at)?;
        let now = match kind {
            0 => 0,
            1 => was ^ (1 << (bit % 32)),
            2 => f32::NAN.to_bits(),
            _ if is_float == 1 => (f32::from_bits(was) + 1.0).to_bits(),
            _ => was.wrapping_add(1),
        };
        memory.set_word(at, now)?;
        has_changed.push(u32::from(now != was));
    }
    Ok(memory.write(changed, has_changed)?)
}
