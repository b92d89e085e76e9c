//! How long a simulated month of a thousand nodes takes.
use doctor_sim::{
    WorldConfig,
    drive::compare::{Chooser, play},
};

fn main() {
    let nodes = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1000);
    let score = play(WorldConfig::of(nodes), 30, Chooser::Ours).expect("a world that can be made");
    println!("{}", serde_json::to_string_pretty(&score).expect("plain data"));
}
