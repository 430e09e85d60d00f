use crate::errors::{code, Error};
use base64::{engine::general_purpose::STANDARD, Engine};
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Where the node listens, in every sandbox.
pub const DEFAULT_PATH: &str = "/run/dsec/agent.sock";
/// The longest payload of a report, as JSON.
pub const PAYLOAD_MAX_BYTES: usize = 256 * 1024;

const REQUEST_MAX_BYTES: usize = PAYLOAD_MAX_BYTES + 16 * 1024;
const REPLY_MAX_BYTES: usize = 4 * 1024 * 1024;
/// One request waits so long for feedback at the node; then it is asked again.
const SLICE: Duration = Duration::from_secs(60);
/// A node that has not answered so long after a request's own wait is asked again.
const MARGIN: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// Who one is.
#[derive(Clone, Debug, PartialEq)]
pub struct About {
    /// The version of the protocol.
    pub protocol: u64,
    /// The sandbox.
    pub sandbox_id: String,
    /// The rollout; empty when the sandbox serves none.
    pub rollout_id: String,
    /// The number of the rollout's newest report; 0 when there is none.
    pub last_seq: u64,
    /// The tools that the node calls for the sandbox.
    pub tools: Vec<String>,
    /// The longest payload.
    pub payload_max_bytes: u64,
    /// The longest frame.
    pub frame_max_bytes: u64,
}

/// The trainer's answer to a report.
#[derive(Clone, Debug, PartialEq)]
pub struct Feedback {
    /// The report that it answers.
    pub seq: u64,
    /// Any JSON value.
    pub payload: Value,
    /// None when the trainer gave none.
    pub reward: Option<f64>,
    /// The agent is to stop.
    pub done: bool,
}

/// One step of the behaviour log; who did it is known from the socket.
#[derive(Clone, Debug, Default)]
pub struct Action {
    /// What was done, such as `fetch_url`.
    pub name: String,
    /// How it ended; `ok` when it is empty.
    pub status: String,
    /// How long it took.
    pub latency: Duration,
    /// Tokens that a model read.
    pub tokens_in: u64,
    /// Tokens that a model wrote.
    pub tokens_out: u64,
    /// The action's own particulars.
    pub attributes: BTreeMap<String, String>,
}

/// A connection to the sandbox's node. It connects when first used and again when it breaks: a
/// request that got no answer is repeated with the same number, so a report counts once however
/// often the platform's parts are restarted.
pub struct Channel {
    /// How long a request is repeated while the platform cannot take it; two minutes by default.
    pub patience: Duration,
    path: PathBuf,
    pub(crate) outside: bool,
    connection: Option<UnixStream>,
    last_id: u64,
    next_seq: u64,
}

impl Default for Channel {
    fn default() -> Self {
        Channel::new()
    }
}

impl Channel {
    /// Returns a channel to what `DSEC_AGENT_SOCKET` names, else to [`DEFAULT_PATH`]. Nothing is
    /// connected yet.
    pub fn new() -> Self {
        let named = std::env::var_os("DSEC_AGENT_SOCKET").filter(|path| !path.is_empty());
        Channel::at(named.map_or_else(|| PathBuf::from(DEFAULT_PATH), PathBuf::from))
    }

    /// Returns a channel to a socket.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Channel {
            patience: Duration::from_secs(120),
            outside: !path.exists(),
            path,
            connection: None,
            last_id: 0,
            next_seq: 0,
        }
    }

    /// Says who one is and how far the rollout has come; the channel goes on after that.
    pub fn hello(&mut self) -> Result<About, Error> {
        let told = self.ask(fields(json!({"op": "hello"})), Duration::ZERO)?;
        let text = |name: &str| told[name].as_str().unwrap_or("").to_string();
        let number = |name: &str| told[name].as_u64().unwrap_or(0);
        let about = About {
            protocol: number("protocol"),
            sandbox_id: text("sandbox_id"),
            rollout_id: text("rollout_id"),
            last_seq: number("last_seq"),
            tools: told["tools"].as_array().map_or(Vec::new(), |tools| {
                tools
                    .iter()
                    .filter_map(Value::as_str)
                    .map(String::from)
                    .collect()
            }),
            payload_max_bytes: number("payload_max_bytes"),
            frame_max_bytes: number("frame_max_bytes"),
        };
        self.next_seq = about.last_seq + 1;
        Ok(about)
    }

    /// Reports a stage and returns its number once it is durable; it waits for no feedback.
    ///
    /// # Errors
    ///
    /// `conflict` when another process reports for the rollout, `invalid` for a payload that is too
    /// large, `expired` when the rollout is closed, `not_found` when the sandbox serves none.
    pub fn report(&mut self, stage: &str, payload: Value) -> Result<u64, Error> {
        let seq = self.number()?;
        self.report_as(seq, stage, payload)
    }

    /// Reports a stage under a number. The same number and content twice is one report; another
    /// content is a `conflict`, a gap is `invalid` and says which number is expected.
    pub fn report_as(&mut self, seq: u64, stage: &str, payload: Value) -> Result<u64, Error> {
        let request = json!({"op": "report", "seq": seq, "stage": stage, "payload": payload});
        self.ask(fields(request), Duration::ZERO)?;
        self.next_seq = self.next_seq.max(seq + 1);
        Ok(seq)
    }

    /// Reports a stage and waits for as long as the trainer takes for its feedback.
    pub fn step(&mut self, stage: &str, payload: Value) -> Result<Feedback, Error> {
        let seq = self.number()?;
        let request = json!({"op": "step", "seq": seq, "stage": stage, "payload": payload});
        let feedback = self.some_feedback(fields(request))?;
        self.next_seq = self.next_seq.max(seq + 1);
        Ok(feedback)
    }

    /// Waits for the feedback to a report, for as long as it takes.
    pub fn await_feedback(&mut self, seq: u64) -> Result<Feedback, Error> {
        self.some_feedback(fields(json!({"op": "await", "seq": seq})))
    }

    /// Waits so long for the feedback to a report; None when it did not come.
    pub fn await_for(&mut self, seq: u64, wait: Duration) -> Result<Option<Feedback>, Error> {
        self.feedback(fields(json!({"op": "await", "seq": seq})), wait)
    }

    /// Writes one step of the behaviour log. Actions that the platform writes itself are `denied`.
    pub fn log(&mut self, action: &Action) -> Result<(), Error> {
        let status = if action.status.is_empty() {
            "ok"
        } else {
            &action.status
        };
        let request = json!({
            "op": "log",
            "action": action.name,
            "status": status,
            "latency_ms": action.latency.as_secs_f64() * 1000.0,
            "tokens_in": action.tokens_in,
            "tokens_out": action.tokens_out,
            "attributes": action.attributes,
        });
        self.ask(fields(request), Duration::ZERO).map(|_| ())
    }

    // --- Asking, and asking again ---

    fn number(&mut self) -> Result<u64, Error> {
        if self.next_seq == 0 {
            self.hello()?;
        }
        Ok(self.next_seq)
    }

    fn some_feedback(&mut self, request: Map<String, Value>) -> Result<Feedback, Error> {
        loop {
            if let Some(feedback) = self.feedback(request.clone(), SLICE)? {
                return Ok(feedback);
            }
        }
    }

    fn feedback(
        &mut self,
        mut request: Map<String, Value>,
        wait: Duration,
    ) -> Result<Option<Feedback>, Error> {
        // None: so late that there is no such time.
        let until = Instant::now().checked_add(wait);
        loop {
            let left = until.map_or(SLICE, |until| {
                until.saturating_duration_since(Instant::now()).min(SLICE)
            });
            request.insert("wait_s".into(), json!(left.as_secs_f64()));
            let told = self.ask(request.clone(), left)?;
            if told["ready"] == true {
                return Ok(Some(Feedback {
                    seq: told["seq"].as_u64().unwrap_or(0),
                    payload: told["payload"].clone(),
                    reward: told["reward"].as_f64(),
                    done: told["done"] == true,
                }));
            }
            if until.map_or(false, |until| Instant::now() >= until) {
                return Ok(None);
            }
        }
    }

    /// Returns the result of one request, repeated while it can help.
    fn ask(&mut self, request: Map<String, Value>, wait: Duration) -> Result<Value, Error> {
        let body = encoded(&Value::Object(request))?;
        let give_up_at = Instant::now().checked_add(wait.saturating_add(self.patience));
        let mut pause = FIRST_PAUSE;
        loop {
            let late = give_up_at.map_or(false, |at| Instant::now() > at);
            let mut next = pause;
            match self.ask_once(&body, wait + MARGIN, None) {
                Ok(reply) if reply["error"].is_object() => {
                    let refusal = Error::of_told(&reply["error"]);
                    if !refusal.retryable || late {
                        return Err(refusal);
                    }
                    if !refusal.retry_after.is_zero() {
                        next = refusal.retry_after;
                    }
                }
                Ok(mut reply) => return Ok(reply["result"].take()),
                Err(broken) => {
                    self.connection = None;
                    if late {
                        return Err(self.away(&broken));
                    }
                }
            }
            std::thread::sleep(next);
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// Returns the result of one request that is never repeated, and what comes before it in `parts`.
    pub(crate) fn ask_just_once(
        &mut self,
        request: &Value,
        wait: Duration,
        parts: &mut Vec<u8>,
    ) -> Result<Value, Error> {
        let body = encoded(request)?;
        match self.ask_once(&body, wait + MARGIN, Some(parts)) {
            Ok(reply) if reply["error"].is_object() => Err(Error::of_told(&reply["error"])),
            Ok(mut reply) => Ok(reply["result"].take()),
            Err(broken) => {
                self.connection = None;
                Err(Error::new(
                    code::UNAVAILABLE,
                    format!("the node's answer was lost ({broken}); the call may have been made"),
                ))
            }
        }
    }

    fn ask_once(
        &mut self,
        body: &[u8],
        timeout: Duration,
        mut parts: Option<&mut Vec<u8>>,
    ) -> io::Result<Value> {
        if self.connection.is_none() {
            self.connection = Some(UnixStream::connect(&self.path)?);
        }
        self.last_id += 1;
        let id = self.last_id;
        let connection = self.connection.as_mut().expect("it was just made");
        connection.set_write_timeout(Some(MARGIN))?;
        let head = format!("{{\"id\":{id},");
        let length = u32::try_from(head.len() + body.len() - 1).expect("requests are short");
        let mut frame = length.to_be_bytes().to_vec();
        frame.extend_from_slice(head.as_bytes());
        frame.extend_from_slice(&body[1..]);
        connection.write_all(&frame)?;
        let until = Instant::now() + timeout;
        loop {
            let reply = next_frame(connection, until)?;
            if let Some(part) = reply["part"].as_str() {
                if let (Some(parts), true) = (parts.as_mut(), reply["id"] == id) {
                    STANDARD
                        .decode_vec(part, parts)
                        .map_err(|error| broken(error.to_string()))?;
                }
                continue;
            }
            // An answer to an earlier request, given up long ago, is passed over.
            if reply["id"] == id || (reply["id"].is_null() && reply["error"].is_object()) {
                return Ok(reply);
            }
        }
    }

    fn away(&self, broken: &io::Error) -> Error {
        let path = self.path.display();
        let mut error = Error::new(
            code::UNAVAILABLE,
            format!(
                "no answer on {path} ({broken}); is this a sandbox, and is its node's daemon running?"
            ),
        );
        error.retryable = true;
        error
    }
}

fn encoded(request: &Value) -> Result<Vec<u8>, Error> {
    let body = serde_json::to_vec(request)
        .map_err(|error| Error::new(code::INVALID, format!("this is no JSON: {error}")))?;
    if body.len() > REQUEST_MAX_BYTES {
        return Err(Error::new(
            code::INVALID,
            format!(
                "a request of {} bytes: at most {PAYLOAD_MAX_BYTES} bytes of payload may be \
                 sent; put larger data into a file of the sandbox and report its path",
                body.len()
            ),
        ));
    }
    Ok(body)
}

fn fields(request: Value) -> Map<String, Value> {
    match request {
        Value::Object(fields) => fields,
        _ => unreachable!("requests are objects"),
    }
}

fn next_frame(connection: &mut UnixStream, until: Instant) -> io::Result<Value> {
    let mut header = [0; 4];
    read_all(connection, &mut header, until)?;
    let length = u32::from_be_bytes(header) as usize;
    if length > REPLY_MAX_BYTES {
        return Err(broken(format!(
            "the peer announced a frame of {length} bytes"
        )));
    }
    let mut body = vec![0; length];
    read_all(connection, &mut body, until)?;
    serde_json::from_slice(&body).map_err(|error| broken(error.to_string()))
}

fn read_all(connection: &mut UnixStream, into: &mut [u8], until: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        connection.set_read_timeout(Some(left))?;
        match connection.read(&mut into[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn broken(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}
