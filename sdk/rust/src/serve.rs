use crate::channel::{About, Channel};
use crate::errors::{code, Error};
use serde_json::{json, Value};
use std::io::{self, Read, Write};
use std::panic::{catch_unwind, AssertUnwindSafe};

/// What [`serve`] serves.
pub struct Agent<F> {
    /// The agent's name.
    pub name: String,
    /// The agent's version.
    pub version: String,
    /// The names of what `execute` takes, for the trainer.
    pub arguments: Vec<String>,
    /// Does the work for an input and returns an output.
    pub execute: F,
}

/// Takes work and does it. In a sandbox that serves a rollout it works for the trainer until that
/// says `done` or closes the rollout; otherwise it reads one input from standard input as JSON and
/// prints the output, as a step of a DAG does.
///
/// What was under way when an earlier process died is never begun again by itself: the trainer is
/// told by the stage `restarted`, and says what to do.
///
/// # Errors
///
/// The rollout cannot go on, or the one piece of work failed.
pub fn serve<F>(channel: &mut Channel, mut agent: Agent<F>) -> Result<(), Error>
where
    F: FnMut(&mut Channel, Value) -> Result<Value, Error>,
{
    if !channel.outside {
        let about = channel.hello()?;
        if !about.rollout_id.is_empty() {
            return match rollout(channel, &mut agent, &about) {
                Err(error) if error.code == code::EXPIRED => Ok(()),
                other => other,
            };
        }
    }
    once(channel, &mut agent)
}

fn rollout<F>(channel: &mut Channel, agent: &mut Agent<F>, about: &About) -> Result<(), Error>
where
    F: FnMut(&mut Channel, Value) -> Result<Value, Error>,
{
    let mut said = json!({
        "agent": agent.name, "version": agent.version, "arguments": agent.arguments,
    });
    let mut stage = "ready";
    if about.last_seq > 0 {
        stage = "restarted";
        said["last_seq"] = json!(about.last_seq);
    }
    let mut seq = channel.report(stage, said)?;
    loop {
        let feedback = channel.await_feedback(seq)?;
        if feedback.done {
            return Ok(());
        }
        let reported = work(channel, agent, feedback.payload)
            .map(|output| channel.report("result", json!({ "output": output })));
        seq = match reported {
            Ok(Ok(seq)) => seq,
            // What was returned is too much for a report.
            Ok(Err(error)) if error.code == code::INVALID => failed(channel, &error)?,
            Ok(Err(error)) => return Err(error),
            Err(error) => failed(channel, &error)?,
        };
    }
}

fn failed(channel: &mut Channel, error: &Error) -> Result<u64, Error> {
    channel.report("failed", json!({ "error": error.told() }))
}

fn work<F>(channel: &mut Channel, agent: &mut Agent<F>, input: Value) -> Result<Value, Error>
where
    F: FnMut(&mut Channel, Value) -> Result<Value, Error>,
{
    catch_unwind(AssertUnwindSafe(|| (agent.execute)(channel, input))).unwrap_or_else(|panicked| {
        let said = panicked
            .downcast_ref::<&str>()
            .map(|text| text.to_string())
            .or_else(|| panicked.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        Err(Error::new(code::INTERNAL, format!("panic: {said}")))
    })
}

fn once<F>(channel: &mut Channel, agent: &mut Agent<F>) -> Result<(), Error>
where
    F: FnMut(&mut Channel, Value) -> Result<Value, Error>,
{
    let broken = |error: io::Error| Error::new(code::INTERNAL, error.to_string());
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map_err(broken)?;
    let input = if text.trim().is_empty() {
        Value::Null
    } else {
        serde_json::from_str(&text)
            .map_err(|error| Error::new(code::INVALID, format!("the input is no JSON: {error}")))?
    };
    let output = work(channel, agent, input)?;
    writeln!(io::stdout(), "{output}").map_err(broken)
}
