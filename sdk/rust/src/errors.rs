use serde_json::{json, Map, Value};
use std::fmt;
use std::time::Duration;

/// The codes of errors. The set is closed: programs may branch on them.
#[allow(missing_docs)]
pub mod code {
    pub const INVALID: &str = "invalid";
    pub const NOT_FOUND: &str = "not_found";
    pub const CONFLICT: &str = "conflict";
    pub const EXHAUSTED: &str = "exhausted";
    pub const UNAVAILABLE: &str = "unavailable";
    pub const DENIED: &str = "denied";
    pub const TIMEOUT: &str = "timeout";
    pub const COMMAND_TIMEOUT: &str = "command_timeout";
    pub const OOM: &str = "oom";
    pub const LAYER_ERROR: &str = "layer_error";
    pub const EXPIRED: &str = "expired";
    pub const UNSUPPORTED: &str = "unsupported";
    pub const INTERNAL: &str = "internal";
}

/// A refusal of the platform, or that it was not there.
#[derive(Clone, Debug, PartialEq)]
pub struct Error {
    /// One of the platform's error codes.
    pub code: String,
    /// What failed and what to do, for people.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// How long to wait before that; zero leaves it to the caller.
    pub retry_after: Duration,
    /// Flat facts for programs, such as `expected_seq`.
    pub details: Map<String, Value>,
}

impl Error {
    /// Returns an error that no repetition helps.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Error {
            code: code.into(),
            message: message.into(),
            retryable: false,
            retry_after: Duration::ZERO,
            details: Map::new(),
        }
    }

    pub(crate) fn of_told(told: &Value) -> Self {
        let wait_s = told["retry_after_s"].as_f64().unwrap_or(0.0);
        Error {
            code: told["code"].as_str().unwrap_or(code::INTERNAL).into(),
            message: told["message"].as_str().unwrap_or("").into(),
            retryable: told["retryable"].as_bool().unwrap_or(false),
            retry_after: Duration::from_secs_f64(wait_s.clamp(0.0, 86_400.0)),
            details: told["details"].as_object().cloned().unwrap_or_default(),
        }
    }

    pub(crate) fn told(&self) -> Value {
        json!({
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "retry_after_s": self.retry_after.as_secs_f64(),
            "details": self.details,
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Error {}
