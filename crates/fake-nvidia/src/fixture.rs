//! Parses a scene: a subset of TOML in which a line is a table header, a key with its value, or a comment. Benchmarks
//! measure the stand-in together with the program that loads it, and a full TOML parser took half of the time of
//! reading eight GPUs.

#[derive(Debug, Default)]
pub(crate) struct Fixture {
    pub(crate) driver: String,
    pub(crate) cuda: i32,
    pub(crate) init: u32,
    pub(crate) hang: String,
    pub(crate) lost_gpus: u32,
    pub(crate) gpus: Vec<FakeGpu>,
}

#[derive(Debug, Default)]
pub(crate) struct FakeGpu {
    pub(crate) bus: String,
    pub(crate) handle: u32,
    /// Every call with its handle hangs.
    pub(crate) hang: bool,
    /// Every call with its handle first writes to this file.
    pub(crate) blocking_file: String,
    /// Sorted by name.
    pub(crate) fields: Vec<(String, Field)>,
    /// The fields that differ while its CUDA device multiplies, sorted by name.
    pub(crate) load: Vec<(String, Field)>,
    /// What its CUDA device is like.
    pub(crate) cuda: Vec<(String, Field)>,
}

impl FakeGpu {
    /// Returns the value of a field, under load or not.
    pub(crate) fn field(&self, name: &str, is_loaded: bool) -> Option<&Field> {
        let find = |fields: &'_ [(String, Field)]| fields.binary_search_by(|(field, _)| (**field).cmp(name)).ok();
        match find(&self.load).filter(|_| is_loaded) {
            Some(index) => Some(&self.load[index].1),
            None => find(&self.fields).map(|index| &self.fields[index].1),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Field {
    Number(f64),
    Text(String),
    /// The driver returns this error code.
    Error(u32),
}

/// The table that a line belongs to.
enum Table {
    Top,
    Gpu,
    Fields,
    Load,
    Cuda,
}

impl Fixture {
    /// Parses the text of a fixture.
    ///
    /// # Errors
    /// Returns the line that is wrong.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (mut fixture, mut table) = (Self::default(), Table::Top);
        for (number, line) in (1..).zip(text.lines()) {
            let error = || format!("cannot parse line {number}: {line}");
            match line.trim() {
                "" => {}
                comment if comment.starts_with('#') => {}
                "[[gpu]]" => {
                    fixture.gpus.push(FakeGpu::default());
                    table = Table::Gpu;
                }
                "[gpu.fields]" if !fixture.gpus.is_empty() => table = Table::Fields,
                "[gpu.load]" if !fixture.gpus.is_empty() => table = Table::Load,
                "[gpu.cuda]" if !fixture.gpus.is_empty() => table = Table::Cuda,
                line => {
                    let (key, value) = key_and_value(line).ok_or_else(error)?;
                    fixture.set(&table, key, value).ok_or_else(error)?;
                }
            }
        }
        for card in &mut fixture.gpus {
            for fields in [&mut card.fields, &mut card.load, &mut card.cuda] {
                fields.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
                if let Some(two) = fields.windows(2).find(|two| two[0].0 == two[1].0) {
                    return Err(format!("{} of {} is defined twice", two[0].0, card.bus));
                }
            }
        }
        Ok(fixture)
    }

    fn set(&mut self, table: &Table, key: String, value: &str) -> Option<()> {
        match (table, key.as_str()) {
            (Table::Top, "driver") => self.driver = quoted(value)?,
            (Table::Top, "cuda") => self.cuda = value.parse().ok()?,
            (Table::Top, "init") => self.init = value.parse().ok()?,
            (Table::Top, "hang") => self.hang = quoted(value)?,
            (Table::Top, "loses") => self.lost_gpus = value.parse().ok()?,
            (Table::Gpu, "bus") => self.gpus.last_mut()?.bus = quoted(value)?,
            (Table::Gpu, "handle") => self.gpus.last_mut()?.handle = value.parse().ok()?,
            (Table::Gpu, "hang") => self.gpus.last_mut()?.hang = value.parse().ok()?,
            (Table::Gpu, "touches") => self.gpus.last_mut()?.blocking_file = quoted(value)?,
            (Table::Fields, _) => self.gpus.last_mut()?.fields.push((key, field(value)?)),
            (Table::Load, _) => self.gpus.last_mut()?.load.push((key, field(value)?)),
            (Table::Cuda, _) => self.gpus.last_mut()?.cuda.push((key, field(value)?)),
            (Table::Top | Table::Gpu, _) => return None,
        }
        Some(())
    }
}

/// Splits `driver = …` or `"temperature.gpu" = …`.
fn key_and_value(line: &str) -> Option<(String, &str)> {
    let (key, value) = line.split_once(" = ")?;
    let key = if key.starts_with('"') { quoted(key)? } else { key.to_owned() };
    Some((key, value.trim()))
}

fn field(value: &str) -> Option<Field> {
    if value.starts_with('"') {
        return quoted(value).map(Field::Text);
    }
    match value.strip_prefix('{') {
        Some(rest) => rest.strip_suffix('}')?.trim().strip_prefix("error = ")?.parse().ok().map(Field::Error),
        None => value.parse().ok().map(Field::Number),
    }
}

fn quoted(text: &str) -> Option<String> {
    let inside = text.strip_prefix('"')?.strip_suffix('"')?;
    if !inside.contains(['\\', '"']) {
        return Some(inside.to_owned());
    }
    let (mut out, mut rest) = (String::new(), inside.chars());
    while let Some(c) = rest.next() {
        out.push(match c {
            '"' => return None,
            '\\' => match rest.next()? {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                same @ ('"' | '\\') => same,
                _ => return None,
            },
            other => other,
        });
    }
    Some(out)
}
