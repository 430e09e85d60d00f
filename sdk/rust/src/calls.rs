use crate::channel::{Action, Channel};
use crate::errors::Error;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

/// What a running call of a tool says of itself for the behaviour log.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// How it ended: `ok` when it is empty, and the error's code when it failed.
    pub status: String,
    /// Tokens that a model read.
    pub tokens_in: u64,
    /// Tokens that a model wrote.
    pub tokens_out: u64,
    /// Its own particulars.
    pub notes: BTreeMap<String, String>,
}

/// Returns the SHA-256 of arguments as JSON, in hexadecimal digits: names sorted, no white space, no
/// escapes that JSON does not need.
pub fn arguments_sha256(arguments: &Value) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(sorted(arguments).to_string()) {
        write!(text, "{byte:02x}").expect("a string takes all");
    }
    text
}

/// Sorts names also where another crate asked serde_json to keep their order.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let by_name: BTreeMap<_, _> = fields.iter().collect();
            Value::Object(
                by_name
                    .into_iter()
                    .map(|(name, it)| (name.clone(), sorted(it)))
                    .collect(),
            )
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

impl Channel {
    /// Runs `work` as a tool's call and writes a step of the behaviour log when it is over, named
    /// `tool.method`, with the hash of the arguments, the status and the latency. Outside of a
    /// sandbox, where there was no socket when the channel was made, there is no log.
    ///
    /// # Errors
    ///
    /// That of `work`, or else that of the log.
    pub fn call_tool<T>(
        &mut self,
        tool: &str,
        method: &str,
        arguments: &Value,
        work: impl FnOnce(&mut Call) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut call = Call::default();
        let began = Instant::now();
        let result = work(&mut call);
        if self.outside {
            return result;
        }
        let mut attributes = call.notes;
        attributes.insert("arguments_sha256".into(), arguments_sha256(arguments));
        let mut status = call.status;
        if let Err(error) = &result {
            status = error.code.clone();
            attributes.insert("error".into(), error.message.clone());
        }
        let unsaid = self.log(&Action {
            name: format!("{tool}.{method}"),
            status,
            latency: began.elapsed(),
            tokens_in: call.tokens_in,
            tokens_out: call.tokens_out,
            attributes,
        });
        let value = result?;
        unsaid.map(|()| value)
    }
}
