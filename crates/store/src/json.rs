//! Values stored as JSON, because no query reads their fields.

use serde::{Serialize, de::DeserializeOwned};

use super::error::{Result, StoreError};

pub(super) fn write<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| StoreError::Refused { operation: "writing a value", why: error.to_string() })
}

pub(super) fn read<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| StoreError::Unreadable { what, why: error.to_string() })
}
