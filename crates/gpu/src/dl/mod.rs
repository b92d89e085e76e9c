//! What a GPU does in training, done with known answers: every result is checked, and each run proves that the checks see
//! an error.

pub mod layers;
