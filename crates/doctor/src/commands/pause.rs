//! Pausing validation, everywhere or in one pool, and going on.

use doctor_core::{ids::PoolName, snapshot::Pause, time::Span};

use super::{
    ask::moment_of_change,
    confirm::{Change, Signed},
};
use crate::{context::Context, exit::Exit, failure::Result, output::clock};

/// Start no validation. What is running may finish; findings are still taken in.
#[derive(Debug, clap::Args)]
pub(crate) struct PauseArgs {
    /// Only in this pool. Without: everywhere.
    #[arg(long, value_name = "POOL")]
    pool: Option<PoolName>,
    /// Ends by itself after this long, such as "4h".
    #[arg(long = "for", value_name = "LENGTH")]
    length: Option<Span>,
    /// Why; it stands in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    signed: Signed,
}

/// End a pause.
#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    /// The pause of this pool. Without: the one that is everywhere.
    #[arg(long, value_name = "POOL")]
    pool: Option<PoolName>,
    /// Why; it stands in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    signed: Signed,
}

fn place(pool: Option<&PoolName>) -> String {
    pool.map_or_else(|| "everywhere".to_owned(), |pool| format!("in pool {pool}"))
}

pub(crate) fn pause(context: &Context, args: &PauseArgs) -> Result<Exit> {
    let store = context.store()?;
    let (by, at) = (args.signed.by(), moment_of_change(context, &store)?);
    let until = args.length.map(|length| at.plus(length));
    let (place, resume) = (place(args.pool.as_ref()), resume_command(args.pool.as_ref()));
    let how_long = until.map_or_else(|| "until resumed".to_owned(), |until| format!("until {} UTC", clock(until)));
    let change = Change {
        plan: format!("Would start no validation {place} {how_long}."),
        changes: vec![format!("validation {place}: paused {how_long}")],
        done: format!("Paused {place} {how_long}."),
        next: format!("`{resume}` goes on"),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.signed.carry_out(context, &change, || {
        let pause = Pause { pool: args.pool.clone(), by, why: args.why.clone(), since: at, until };
        Ok(store.pause(&pause)?)
    })
}

fn resume_command(pool: Option<&PoolName>) -> String {
    let pool = pool.map_or_else(String::new, |pool| format!(" --pool {pool}"));
    format!("doctor resume{pool} --why …")
}

pub(crate) fn resume(context: &Context, args: &ResumeArgs) -> Result<Exit> {
    let store = context.store()?;
    let (by, at) = (args.signed.by(), moment_of_change(context, &store)?);
    let place = place(args.pool.as_ref());
    let pauses = store.pauses(at)?;
    let changes: Vec<String> = pauses
        .iter()
        .filter(|pause| pause.pool == args.pool)
        .map(|pause| format!("pause {place} by {} ends: {}", pause.by, pause.why))
        .collect();
    if changes.is_empty() {
        let others: Vec<String> = pauses.iter().map(|pause| self::place(pause.pool.as_ref())).collect();
        let known =
            if others.is_empty() { "nothing is paused".to_owned() } else { format!("paused: {}", others.join(", ")) };
        return Err(crate::failure::Failure::Unknown { what: "pause", name: place, known });
    }
    let change = Change {
        plan: format!("Would go on with validation {place}."),
        changes,
        done: format!("Resumed {place}."),
        next: "`doctor status` shows what starts".to_owned(),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.signed.carry_out(context, &change, || Ok(store.resume(args.pool.as_ref(), &by, &args.why, at)?))
}
