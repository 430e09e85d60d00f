//! An agent's way out of its sandbox: stages to the trainer, feedback back, steps to the behaviour
//! log. `docs/agent-protocol.md` describes what it speaks.
//!
//! ```no_run
//! use dsec_agent::{json, Channel};
//!
//! # fn main() -> Result<(), dsec_agent::Error> {
//! let mut channel = Channel::new();
//! let feedback = channel.step("tests_run", json!({"failed": 3}))?;
//! if !feedback.done {
//!     println!("{}", feedback.payload);
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod calls;
mod channel;
mod errors;
mod serve;
mod tools;

pub use calls::{arguments_sha256, Call};
pub use channel::{About, Action, Channel, Feedback, DEFAULT_PATH, PAYLOAD_MAX_BYTES};
pub use errors::{code, Error};
pub use serde_json::{json, Map, Value};
pub use serve::{serve, Agent};
pub use tools::{tool, Answer, Completion, HttpRequest, HttpResponse, ModelRequest};
