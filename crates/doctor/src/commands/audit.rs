//! `doctor audit`: lists actions of the controller and of operators.

use doctor_core::ids::NodeName;

use crate::{
    context::Context,
    exit::Exit,
    failure::Result,
    output::{Table, cell, format_time, plural},
};

/// List the actions of the controller and of operators with time and reason, newest first.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only actions on this node.
    node: Option<NodeName>,
    /// Maximum number of lines.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(super) limit: u32,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let rows = store.audit(args.limit, args.node.as_ref())?;
    context.out.show(&rows, |page| {
        if rows.is_empty() {
            page.line("No actions recorded.");
            return;
        }
        let mut table = Table::new(["AT (UTC)", "BY", "WHAT", "NODE", "WHY"]);
        for row in &rows {
            table.row([
                cell(format_time(row.at)),
                cell(row.by.clone()),
                cell(row.what.clone()),
                cell(row.node.as_ref().map_or("-", |node| node.as_str())),
                cell(format!("{}: {}", row.code, row.text)),
            ]);
        }
        page.table(&table);
        page.line(plural(rows.len(), "line"));
    })?;
    Ok(Exit::Ok)
}
