//! Verified messages of nodes that are durable and not in history yet: reports of agents, and result documents of runs.
//!
//! Entering a message needs the cluster as the control loop knows it: machine types, baselines, acknowledged events. The
//! loop may be busy for a minute with a slow cluster, and a node should not wait for that. So a message is first only
//! verified and made durable here, together with whatever else arrived meanwhile ([`super::group_commit`]), and the node
//! is answered; the next cycle classifies many of them and enters them in one transaction.
//!
//! These rules make it exactly once:
//!
//! - A message leaves the queue in the transaction that enters it. Only the leader enters messages.
//! - Any process may add messages, whether it leads or not: what may be added is decided by rows in the same transaction.
//! - A document is claimed when it is added: `pending_results.queued` admits one for each run and node, and a run that
//!   has ended admits none.
//! - A run with a document in the queue is not ended for want of it: [`result_is_queued`].
//! - A repeated report is recognised by its number when it is entered.
//!
//! The queue is bounded, in all and for each node, so that no node can fill the disk or keep others out.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_checks::document::{AgentReport, Document, DocumentError};
use doctor_core::{
    ids::{NodeName, RunId},
    time::Timestamp,
};

use super::{
    Store,
    compression::{compress, decompress},
    db::{Access, ColumnType, SqlValue, Tx, vals},
    error::Result,
    fencing,
    messages::{Enqueued, MessageContent, QueuedMessage, VerifiedMessage},
};

/// Limits of the whole queue. Agents may use three quarters of it: the result of a run arrives once, while a report
/// waits on its node and comes again.
const MAX_MESSAGES: u64 = 50_000;
const MAX_BYTES: u64 = 1 << 30;
/// Limits of one node. Its agent sends one report after another, and a report may be as long as a document.
const MAX_MESSAGES_OF_NODE: u64 = 32;
const MAX_BYTES_OF_NODE: u64 = 32 << 20;
/// Other processes add and remove messages, too.
const RECOUNT_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes of messages that are kept parsed until they are entered; others are read back.
const MAX_KEPT_BYTES: usize = 64 << 20;
/// The longest message that is kept parsed: in that form it may take ten times its length. Most are shorter.
const MAX_KEPT_MESSAGE_BYTES: usize = 256 << 10;
/// A message that was offered this often to cycles waits for the regular one.
const PROMPT_OFFERS: u8 = 2;

/// What this process knows of the queue.
#[derive(Debug)]
pub(super) struct IngestQueue {
    known: Mutex<KnownQueue>,
    /// Low bits of ids, by which those of two processes differ.
    salt: i64,
}

#[derive(Debug, Default)]
struct KnownQueue {
    /// Messages that this process has added.
    messages: HashMap<i64, KnownMessage>,
    kept_bytes: usize,
    usage: Usage,
    counted: Option<Instant>,
    last_id: i64,
}

#[derive(Debug)]
struct KnownMessage {
    /// `None`: it is too long, or too much was kept already.
    message: Option<Arc<VerifiedMessage>>,
    /// Before that, the database need not have it.
    is_committed: bool,
    /// Number of times it was listed.
    offered: u8,
}

/// A message with its compressed bytes.
#[derive(Debug)]
pub(super) struct PackedMessage {
    message: Arc<VerifiedMessage>,
    body: Vec<u8>,
}

impl PackedMessage {
    /// Compresses a message. This takes time, so do not call it under a lock.
    pub(super) fn new(message: VerifiedMessage) -> Result<Self> {
        let body = compress(&message.bytes)?;
        Ok(Self { message: Arc::new(message), body })
    }

    pub(super) const fn stored_length(&self) -> usize {
        self.body.len()
    }
}

/// The size of the queue.
#[derive(Debug, Default)]
struct Usage {
    messages: u64,
    bytes: u64,
    by_node: HashMap<NodeName, (u64, u64)>,
}

impl Usage {
    /// Returns why this message may not be added; `None` if it may.
    fn refusal(&self, packed: &PackedMessage) -> Option<Enqueued> {
        let share = if packed.message.content.run().is_some() { 4 } else { 3 };
        let bytes = packed.body.len() as u64;
        if self.messages >= MAX_MESSAGES / 4 * share || self.bytes + bytes > MAX_BYTES / 4 * share {
            return Some(Enqueued::QueueFull);
        }
        let (messages, of_node) = self.by_node.get(&packed.message.node).copied().unwrap_or_default();
        let is_full = messages >= MAX_MESSAGES_OF_NODE || of_node + bytes > MAX_BYTES_OF_NODE;
        is_full.then_some(Enqueued::NodeQueueFull)
    }

    fn add(&mut self, node: &NodeName, messages: u64, bytes: u64) {
        self.messages += messages;
        self.bytes += bytes;
        let (known, of_node) = self.by_node.entry(node.clone()).or_default();
        *known += messages;
        *of_node += bytes;
    }

    fn remove(&mut self, node: &NodeName, bytes: u64) {
        self.messages = self.messages.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
        if let Some((messages, of_node)) = self.by_node.get_mut(node) {
            *messages = messages.saturating_sub(1);
            *of_node = of_node.saturating_sub(bytes);
            if *messages == 0 {
                self.by_node.remove(node);
            }
        }
    }
}

impl IngestQueue {
    pub(super) fn new() -> Self {
        let salt = i64::try_from(RandomState::new().hash_one(std::process::id()) & 0x7_ffff).unwrap_or(0);
        Self { known: Mutex::default(), salt }
    }

    fn lock(&self) -> MutexGuard<'_, KnownQueue> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns ids for messages that arrived at these times, in order.
    fn ids(&self, received: impl Iterator<Item = Timestamp>) -> Vec<i64> {
        let mut known = self.lock();
        let next = |received: Timestamp| {
            let by_time = (received.millis().clamp(0, i64::MAX >> 20) << 20) | self.salt;
            known.last_id = by_time.max(known.last_id + 1);
            known.last_id
        };
        received.map(next).collect()
    }
}

impl KnownQueue {
    fn keep(&mut self, id: i64, packed: &PackedMessage) {
        let bytes = packed.message.bytes.len();
        let fits = bytes <= MAX_KEPT_MESSAGE_BYTES && self.kept_bytes + bytes <= MAX_KEPT_BYTES;
        self.kept_bytes += if fits { bytes } else { 0 };
        let message = fits.then(|| Arc::clone(&packed.message));
        self.messages.insert(id, KnownMessage { message, is_committed: false, offered: 0 });
        self.usage.add(&packed.message.node, 1, packed.body.len() as u64);
    }

    fn forget(&mut self, id: i64) {
        let message = self.messages.remove(&id).and_then(|known| known.message);
        self.kept_bytes -= message.map_or(0, |message| message.bytes.len());
    }

    /// Marks the added messages of a batch, and forgets the others.
    fn settle(&mut self, batch: &[PackedMessage], ids: &[i64], is_added: impl Fn(usize) -> bool) {
        for (index, (packed, id)) in batch.iter().zip(ids).enumerate() {
            if !is_added(index) {
                self.forget(*id);
                self.usage.remove(&packed.message.node, packed.body.len() as u64);
            } else if let Some(known) = self.messages.get_mut(id) {
                known.is_committed = true;
            }
        }
    }

    fn committed(&self) -> Vec<i64> {
        self.messages.iter().filter(|(_, known)| known.is_committed).map(|(id, _)| *id).collect()
    }
}

impl Store {
    fn ingest_queue(&self) -> &IngestQueue {
        &self.shared.ingest_queue
    }

    /// Adds verified messages, as far as they may be added. Where syncing is a separate step they are not durable yet.
    pub(super) fn enqueue_messages(&self, batch: &[PackedMessage]) -> Result<Vec<Enqueued>> {
        let refused = self.over_limit(batch)?;
        let ids = self.ingest_queue().ids(batch.iter().map(|packed| packed.message.received));
        {
            // Before the commit, because a cycle may enter them right after it.
            let mut known = self.ingest_queue().lock();
            batch.iter().zip(&ids).for_each(|(packed, id)| known.keep(*id, packed));
        }
        let outcomes = self.transaction(Access::Enqueue, &mut |tx| {
            fencing::begin_write(tx, Access::Enqueue, None, self.shared.schema)?;
            enqueue(tx, batch, &ids, &refused)
        });
        let is_added = |index: usize| outcomes.as_ref().is_ok_and(|outcomes| outcomes[index] == Enqueued::Queued);
        self.ingest_queue().lock().settle(batch, &ids, is_added);
        outcomes
    }

    /// Returns which messages of a batch exceed the limits.
    fn over_limit(&self, batch: &[PackedMessage]) -> Result<Vec<Option<Enqueued>>> {
        let age = self.ingest_queue().lock().counted.map(|counted| counted.elapsed());
        if age.is_none_or(|age| age >= RECOUNT_INTERVAL) {
            self.recount()?;
        }
        let refused = refusals(&self.ingest_queue().lock().usage, batch);
        if refused.iter().all(Option::is_none) {
            return Ok(refused);
        }
        // Another process may have entered some.
        self.recount()?;
        Ok(refusals(&self.ingest_queue().lock().usage, batch))
    }

    /// Reads what waits. A process that does not lead enters nothing: here it learns what the leader has entered.
    fn recount(&self) -> Result<()> {
        let before = self.ingest_queue().lock().committed();
        let (usage, there) = self.read(|tx| {
            let (mut usage, mut there, names) = (Usage::default(), HashSet::new(), Arc::clone(&tx.ids));
            let sql = "SELECT id, node, stored_length FROM ingest_queue";
            tx.rows("counting waiting messages", sql, &[], |row| {
                there.insert(row.int(0)?);
                usage.add(names.node(row.int(1)?)?, 1, row.unsigned(2)?);
                Ok(())
            })?;
            Ok((usage, there))
        })?;
        let mut known = self.ingest_queue().lock();
        before.into_iter().filter(|id| !there.contains(id)).for_each(|id| known.forget(id));
        (known.usage, known.counted) = (usage, Some(Instant::now()));
        Ok(())
    }

    /// Returns the number of messages that wait to be entered in history.
    pub fn queued_count(&self) -> Result<u64> {
        let sql = "SELECT COUNT(*) FROM ingest_queue";
        self.read(|tx| Ok(tx.first("counting waiting messages", sql, &[], |row| row.unsigned(0))?.unwrap_or(0)))
    }

    /// Returns whether messages that this process has added were offered to fewer than two cycles: a cycle may have
    /// begun before they arrived.
    pub fn has_new_messages(&self) -> bool {
        self.ingest_queue().lock().messages.values().any(|known| known.offered < PROMPT_OFFERS)
    }

    /// Lists waiting messages, oldest first: at most this many, after this id.
    pub fn queued_messages(&self, after: Option<i64>, limit: u32) -> Result<Vec<QueuedMessage>> {
        let sql = "SELECT id, node, run, received, length, stored_length FROM ingest_queue \
                   WHERE id > $1 ORDER BY id LIMIT $2";
        let before = self.ingest_queue().lock().committed();
        let listed = self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            tx.all("listing waiting messages", sql, vals![after.unwrap_or(-1), limit], |row| {
                Ok(QueuedMessage {
                    id: row.int(0)?,
                    node: names.node(row.int(1)?)?.clone(),
                    run: row.opt_int(2)?.map(|run| RunId::from_number(run.cast_unsigned())),
                    received: row.timestamp(3)?,
                    bytes: row.unsigned(4)?,
                    stored_bytes: row.unsigned(5)?,
                })
            })
        })?;
        let mut known = self.ingest_queue().lock();
        if after.is_none() {
            // Another leader has entered what is missing among them.
            let there: HashSet<i64> = listed.iter().map(|message| message.id).collect();
            let is_complete = listed.len() < limit as usize;
            let newest = listed.last().map_or(0, |message| message.id);
            let is_gone = |id: &i64| (is_complete || *id <= newest) && !there.contains(id);
            before.into_iter().filter(is_gone).for_each(|id| known.forget(id));
        }
        for message in &listed {
            if let Some(known) = known.messages.get_mut(&message.id) {
                known.offered = known.offered.saturating_add(1);
            }
        }
        Ok(listed)
    }

    /// Returns the content of listed messages, or why it cannot be read, as after a downgrade.
    pub fn queued_contents(
        &self,
        listed: &[&QueuedMessage],
    ) -> Result<Vec<std::result::Result<Arc<VerifiedMessage>, DocumentError>>> {
        let kept: Vec<Option<Arc<VerifiedMessage>>> = {
            let known = self.ingest_queue().lock();
            listed.iter().map(|message| known.messages.get(&message.id)?.message.clone()).collect()
        };
        let absent: Vec<i64> =
            listed.iter().zip(&kept).filter(|(_, kept)| kept.is_none()).map(|(message, _)| message.id).collect();
        let mut stored = self.stored_bodies(&absent)?;
        let content = |(message, kept): (&&QueuedMessage, Option<Arc<VerifiedMessage>>)| match kept {
            Some(kept) => Ok(kept),
            None => read_back(message, stored.remove(&message.id).unwrap_or_default()).map(Arc::new),
        };
        Ok(listed.iter().zip(kept).map(content).collect())
    }

    fn stored_bodies(&self, ids: &[i64]) -> Result<HashMap<i64, Vec<u8>>> {
        let mut bodies = HashMap::with_capacity(ids.len());
        if ids.is_empty() {
            return Ok(bodies);
        }
        self.read(|tx| {
            bodies.clear();
            let sql = "SELECT id, body FROM ingest_queue WHERE id IN {keys}";
            tx.rows_by_key("reading waiting messages", sql, ids, |row| {
                bodies.insert(row.int(0)?, decompress(row.blob(1)?)?);
                Ok(())
            })
        })?;
        Ok(bodies)
    }

    /// Forgets messages that were entered.
    pub(super) fn forget_messages(&self, entered: &[&QueuedMessage]) {
        let mut known = self.ingest_queue().lock();
        for message in entered {
            known.forget(message.id);
            known.usage.remove(&message.node, message.stored_bytes);
        }
    }
}

/// Returns why messages of a batch may not be added. A batch adds little to the queue, except for one node.
fn refusals(usage: &Usage, batch: &[PackedMessage]) -> Vec<Option<Enqueued>> {
    let mut in_batch: HashMap<&NodeName, u64> = HashMap::new();
    let mut refused = Vec::with_capacity(batch.len());
    for packed in batch {
        let of_node = in_batch.entry(&packed.message.node).or_default();
        *of_node += 1;
        let too_many = *of_node > MAX_MESSAGES_OF_NODE;
        refused.push(usage.refusal(packed).or_else(|| too_many.then_some(Enqueued::NodeQueueFull)));
    }
    refused
}

/// Parses a message that an earlier process has verified.
fn read_back(message: &QueuedMessage, bytes: Vec<u8>) -> std::result::Result<VerifiedMessage, DocumentError> {
    let content = match message.run {
        Some(_) => MessageContent::Document(Box::new(Document::parse_stored(&bytes)?)),
        None => MessageContent::Report(Box::new(AgentReport::parse_stored(&bytes)?)),
    };
    Ok(VerifiedMessage { node: message.node.clone(), received: message.received, content, bytes })
}

fn enqueue(
    tx: &mut Tx<'_>,
    batch: &[PackedMessage],
    ids: &[i64],
    refused: &[Option<Enqueued>],
) -> Result<Vec<Enqueued>> {
    use ColumnType::{Blob, Int};
    let mut claims = Claims::load(tx, batch)?;
    let mut outcomes = Vec::with_capacity(batch.len());
    let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(batch.len() * 7);
    let mut claimed: Vec<SqlValue<'_>> = Vec::new();
    for ((packed, id), refused) in batch.iter().zip(ids).zip(refused) {
        let VerifiedMessage { node, received, content, bytes } = &*packed.message;
        let node = match content.run() {
            None => Some(tx.node_id(node, *received)?),
            Some(_) => tx.ids.node_id(node),
        };
        let outcome = match (content.run(), node, refused) {
            // A document that was accepted before is, whatever the queue can take now.
            (Some(run), Some(node), refused) => match claims.outcome(run, node) {
                Enqueued::Queued => refused.unwrap_or(Enqueued::Queued),
                other => other,
            },
            (Some(_), None, _) => Enqueued::UnknownRun,
            (None, _, refused) => refused.unwrap_or(Enqueued::Queued),
        };
        outcomes.push(outcome);
        let (Enqueued::Queued, Some(node)) = (outcome, node) else { continue };
        if let Some(run) = content.run() {
            claims.claim(run, node);
            claimed.extend_from_slice(vals![run, node]);
        }
        let (length, stored) = (bytes.len() as u64, packed.body.len() as u64);
        rows.extend_from_slice(vals![*id, node, content.run(), *received, length, stored, packed.body.as_slice()]);
    }
    let operation = "storing messages";
    let sqlite = "UPDATE pending_results SET queued = 1 WHERE run = $1 AND node = $2";
    let postgres = "UPDATE pending_results p SET queued = 1 FROM UNNEST($1::int8[], $2::int8[]) AS c (run, node) \
                    WHERE p.run = c.run AND p.node = c.node";
    tx.execute_each(operation, (sqlite, postgres), &[Int; 2], &claimed)?;
    let into = "ingest_queue (id, node, run, received, length, stored_length, body)";
    tx.insert_many(operation, into, &[Int, Int, Int, Int, Int, Int, Blob], &rows, "")?;
    Ok(outcomes)
}

/// What the runs of a batch's documents wait for.
#[derive(Debug, Default)]
struct Claims {
    /// By run and node: whether a result is still expected.
    pending: HashMap<(RunId, i64), bool>,
    /// Nodes of runs that have ended.
    ended: HashSet<(RunId, i64)>,
}

impl Claims {
    /// Loads the runs, and keeps them from ending until the transaction ends.
    fn load(tx: &mut Tx<'_>, batch: &[PackedMessage]) -> Result<Self> {
        let operation = "reading runs";
        let runs: BTreeSet<i64> =
            batch.iter().filter_map(|packed| Some(packed.message.content.run()?.number().cast_signed())).collect();
        let runs: Vec<i64> = runs.into_iter().collect();
        let mut claims = Self::default();
        if runs.is_empty() {
            return Ok(claims);
        }
        let sql = "SELECT run, node, received_at, queued FROM pending_results WHERE run IN {keys}";
        let locking = format!("{sql} FOR UPDATE");
        let mut active: HashSet<i64> = HashSet::new();
        tx.rows_by_key(operation, if tx.is_sqlite() { sql } else { &locking }, &runs, |row| {
            let is_expected = row.opt_int(2)?.is_none() && row.int(3)? == 0;
            active.insert(row.int(0)?);
            claims.pending.insert((row.run(0)?, row.int(1)?), is_expected);
            Ok(())
        })?;
        let others: Vec<i64> = runs.into_iter().filter(|run| !active.contains(run)).collect();
        tx.rows_by_key(operation, "SELECT run, node FROM run_node WHERE run IN {keys}", &others, |row| {
            claims.ended.insert((row.run(0)?, row.int(1)?));
            Ok(())
        })?;
        Ok(claims)
    }

    fn outcome(&self, run: RunId, node: i64) -> Enqueued {
        match self.pending.get(&(run, node)) {
            Some(true) => Enqueued::Queued,
            Some(false) => Enqueued::Duplicate,
            None if self.ended.contains(&(run, node)) => Enqueued::RunEnded,
            None => Enqueued::UnknownRun,
        }
    }

    fn claim(&mut self, run: RunId, node: i64) {
        self.pending.insert((run, node), false);
    }
}

/// Whether a result of this run waits in the queue. On PostgreSQL, no further one can be added until the transaction
/// ends; SQLite has one writer.
pub(super) fn result_is_queued(tx: &mut Tx<'_>, run: RunId) -> Result<bool> {
    let operation = "reading waiting messages";
    if !tx.is_sqlite() {
        let sql = "SELECT node FROM pending_results WHERE run = $1 FOR UPDATE";
        tx.all(operation, sql, vals![run], |row| row.int(0))?;
    }
    let sql = "SELECT 1 FROM ingest_queue WHERE run = $1 LIMIT 1";
    Ok(tx.first(operation, sql, vals![run], |_| Ok(()))?.is_some())
}

/// Removes messages, in the transaction that enters them.
pub(super) fn remove(tx: &mut Tx<'_>, ids: &[i64]) -> Result<()> {
    let rows: Vec<SqlValue<'_>> = ids.iter().map(|id| (*id).into()).collect();
    let sqlite = "DELETE FROM ingest_queue WHERE id = $1";
    let postgres = "DELETE FROM ingest_queue WHERE id = ANY ($1::int8[])";
    tx.execute_each("removing entered messages", (sqlite, postgres), &[ColumnType::Int], &rows)
}

#[cfg(test)]
mod tests {
    use doctor_checks::document::Versions;
    use doctor_core::time::Span;

    use super::*;
    use crate::{Entering, LeaseClock, StoreUrl};

    fn packed(node: &str, number: u64, length: usize) -> PackedMessage {
        let (node, received) = (NodeName::new(node).unwrap(), Timestamp::from_secs(1_794_700_800));
        let report = AgentReport::heartbeat(node.clone(), number, received, Versions::default());
        let content = MessageContent::Report(Box::new(report));
        let message = VerifiedMessage { node, received, content, bytes: vec![0; 10] };
        PackedMessage { message: Arc::new(message), body: vec![0; length] }
    }

    #[test]
    fn one_node_cannot_keep_others_out() {
        let store = Store::open_in_memory().unwrap();
        let mut added = 0;
        let outcome = loop {
            match store.enqueue_messages(&[packed("n1", added, 2 << 20)]).unwrap()[..] {
                [Enqueued::Queued] => added += 1,
                [other] => break other,
                _ => panic!("one message has one outcome"),
            }
        };
        assert_eq!((outcome, added), (Enqueued::NodeQueueFull, MAX_BYTES_OF_NODE / (2 << 20)));
        assert_eq!(store.enqueue_messages(&[packed("n2", 1, 2 << 20)]).unwrap(), [Enqueued::Queued]);
        let many: Vec<PackedMessage> = (0..40).map(|number| packed("n3", number, 1)).collect();
        let outcomes = store.enqueue_messages(&many).unwrap();
        assert_eq!(outcomes.iter().filter(|outcome| **outcome == Enqueued::Queued).count(), 32);
        assert_eq!(store.queued_count().unwrap(), added + 1 + 32);
    }

    #[test]
    fn a_process_that_does_not_lead_keeps_nothing_that_the_leader_has_entered() {
        let folder = tempfile::tempdir().unwrap();
        let url = StoreUrl::Sqlite(folder.path().join("doctor.db"));
        let (standby, leader) = (Store::open(&url).unwrap(), Store::open(&url).unwrap());
        assert_eq!(standby.enqueue_messages(&[packed("n1", 1, 1), packed("n2", 1, 1)]).unwrap().len(), 2);
        let lease = leader.acquire("leader", LeaseClock::Database, Span::hours(1)).unwrap();
        let listed = leader.queued_messages(None, 1).unwrap();
        let entering = Entering { messages: &listed.iter().collect::<Vec<_>>(), ..Entering::default() };
        leader.enter(&lease, &entering).unwrap();
        assert_eq!(standby.ingest_queue().lock().messages.len(), 2);
        standby.recount().unwrap();
        let known = standby.ingest_queue().lock();
        assert_eq!((known.messages.len(), known.usage.messages, known.kept_bytes), (1, 1, 10));
    }

    #[test]
    fn a_long_message_is_not_kept_parsed() {
        let mut known = KnownQueue::default();
        for (id, length) in [(1, MAX_KEPT_MESSAGE_BYTES), (2, MAX_KEPT_MESSAGE_BYTES + 1)] {
            let mut long = packed("n1", 1, 1);
            Arc::get_mut(&mut long.message).unwrap().bytes = vec![0; length];
            known.keep(id, &long);
        }
        let is_kept = |id: i64| known.messages[&id].message.is_some();
        assert!(is_kept(1) && !is_kept(2));
        assert_eq!((known.kept_bytes, known.usage.messages), (MAX_KEPT_MESSAGE_BYTES, 2));
        [1, 2].into_iter().for_each(|id| known.forget(id));
        assert_eq!(known.kept_bytes, 0);
    }

    #[test]
    fn a_full_queue_has_room_for_results_of_runs() {
        let mut usage = Usage { messages: MAX_MESSAGES / 4 * 3, bytes: 0, by_node: HashMap::new() };
        assert_eq!(usage.refusal(&packed("n1", 1, 1)), Some(Enqueued::QueueFull));
        usage.messages = 0;
        usage.bytes = MAX_BYTES / 4 * 3;
        assert_eq!(usage.refusal(&packed("n1", 1, 1)), Some(Enqueued::QueueFull));
        usage.bytes -= 1;
        assert_eq!(usage.refusal(&packed("n1", 1, 1)), None);
    }

    #[test]
    fn ids_grow_with_time_and_also_when_the_clock_goes_back() {
        let queue = IngestQueue::new();
        let at = |millis: i64| Timestamp::from_millis(1_794_700_800_000 + millis);
        let ids = queue.ids([0, 0, 5, 1, -1_000_000].map(at).into_iter());
        assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
        assert_eq!(ids[2] >> 20, at(5).millis());
    }
}
