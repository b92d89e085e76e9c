//! `doctor token`: creates, lists and revokes API tokens.

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::time::{Span, Timestamp};
use doctor_store::access::{Role, TokenDigest, TokenRow, new_token};
use serde::Serialize;

use super::confirmation::{Change, ChangeArgs};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Table, ago, cell, format_time, plural},
};

/// Create, list and revoke API tokens.
///
/// A token is printed once, when it is created; the store keeps only its digest. A viewer token allows reading; an
/// operator token also allows every action of the command line.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, clap::Subcommand)]
enum TokenCommand {
    Create(CreateArgs),
    Revoke(RevokeArgs),
    /// List tokens with their creator, role and expiry.
    List,
}

/// Create a token and print it. It cannot be shown again.
#[derive(Debug, clap::Args)]
struct CreateArgs {
    /// Owner or purpose; recorded in the audit trail with every action taken with the token.
    name: String,
    /// Role of the token: viewer or operator.
    #[arg(long, value_name = "ROLE", default_value = "viewer")]
    role: Role,
    /// Lifetime of the token, such as "30d".
    #[arg(long, value_name = "LENGTH", default_value = "90d")]
    expires: Span,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT", default_value = "requested on the command line")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// Revoke a token. A controller rejects it within a second.
#[derive(Debug, clap::Args)]
struct RevokeArgs {
    name: String,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

impl Args {
    /// Whether this only reads.
    pub(crate) const fn reads(&self) -> bool {
        matches!(self.command, TokenCommand::List)
    }
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        TokenCommand::Create(args) => create(context, args),
        TokenCommand::Revoke(args) => revoke(context, args),
        TokenCommand::List => list(context),
    }
}

/// The JSON output of `doctor token create`.
#[derive(Debug, Serialize)]
struct CreatedToken<'a> {
    name: &'a str,
    role: Role,
    expires: Option<Timestamp>,
    token: &'a str,
}

fn create(context: &Context, args: &CreateArgs) -> Result<Exit> {
    const LONGEST: usize = 64;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '@');
    if args.name.is_empty() || args.name.len() > LONGEST || !args.name.chars().all(plain) {
        let text = format!("a token's name is 1 to {LONGEST} letters, digits, `.`, `_`, `-` or `@`");
        return Err(Failure::Usage(text));
    }
    if args.expires <= Span::ZERO {
        return Err(Failure::Usage("--expires must be longer than zero, such as 30d".to_owned()));
    }
    let store = context.open_or_create_store()?;
    // Tokens expire in real time, even if the cluster is simulated.
    let (by, at) = (args.change_args.operator_name(), SystemClock.now());
    let expires = at.plus(args.expires);
    let (name, role) = (&args.name, args.role);
    let change = Change {
        plan: format!("Would create the token {name} with the role {role}, valid until {} UTC.", format_time(expires)),
        changes: vec![format!("{name}: {role} until {} UTC", format_time(expires))],
        done: format!("Created the token {name} with the role {role}, valid until {} UTC.", format_time(expires)),
        next: "store it in a safe place: it is not shown again".to_owned(),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.change_args.confirm(&change)?;
    let token = new_token().map_err(|error| Failure::Other(format!("reading random bytes: {error}")))?;
    let digest = TokenDigest::of(&token);
    let row = TokenRow { name: name.clone(), role, by, created: at, expires: Some(expires), revoked: None, digest };
    store.add_token(&row, &args.why)?;
    let created = CreatedToken { name, role, expires: row.expires, token: &token };
    context.out.show(&created, |page| {
        page.line(&change.done);
        page.line(format!("  {token}"));
        page.line(format!("Next: {}", change.next));
    })?;
    Ok(Exit::Ok)
}

fn revoke(context: &Context, args: &RevokeArgs) -> Result<Exit> {
    let store = context.store_for_changes()?;
    let (by, at) = (args.change_args.operator_name(), SystemClock.now());
    let known: Vec<String> =
        store.tokens()?.into_iter().filter(|token| token.revoked.is_none()).map(|token| token.name).collect();
    if !known.contains(&args.name) {
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        return Err(Failure::Unknown { what: "token", name: args.name.clone(), known });
    }
    let change = Change {
        plan: format!("Would revoke the token {}.", args.name),
        changes: vec![format!("{}: revoked", args.name)],
        done: format!("Revoked the token {}.", args.name),
        next: "`doctor token create NAME` creates another one".to_owned(),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.change_args.apply(context, &change, || {
        store.revoke_token(&args.name, &by, &args.why, at)?;
        Ok(())
    })
}

pub(super) fn list(context: &Context) -> Result<Exit> {
    let tokens = context.store()?.tokens()?;
    let now = SystemClock.now();
    context.out.show(&tokens, |page| {
        if tokens.is_empty() {
            page.line("No tokens: `doctor token create NAME --role viewer|operator` creates one.");
            return;
        }
        let mut table = Table::new(["NAME", "ROLE", "STATE", "EXPIRES (UTC)", "CREATED", "BY"]);
        for token in &tokens {
            let state = match (token.revoked, token.is_valid(now)) {
                (Some(_), _) => cell("revoked").faint(),
                (None, true) => cell("valid").good(),
                (None, false) => cell("expired").faint(),
            };
            table.row([
                cell(token.name.as_str()),
                cell(token.role.code()),
                state,
                cell(token.expires.map_or_else(|| "never".to_owned(), format_time)),
                cell(ago(now, token.created)),
                cell(token.by.as_str()),
            ]);
        }
        page.table(&table);
        page.line(plural(tokens.len(), "token"));
    })?;
    Ok(Exit::Ok)
}
