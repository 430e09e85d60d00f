use crate::channel::Channel;
use crate::errors::{code, Error};
use base64::{engine::general_purpose::STANDARD, Engine};
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use std::time::Duration;

/// The tools that a node calls for its sandboxes; [`crate::About::tools`] says which it calls for
/// this one.
#[allow(missing_docs)]
pub mod tool {
    pub const HTTP_CLIENT: &str = "http_client";
    pub const LLM: &str = "llm";
    pub const LLM_SUMMARIZER: &str = "llm_summarizer";
}

const HTTP_TIMEOUT: Duration = Duration::from_secs(30);
/// No call takes longer at the node.
const LONGEST_CALL: Duration = Duration::from_secs(600);

/// What came of a tool's call that the node made.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// An object, as `docs/agent-protocol.md` has it for the tool.
    pub result: Value,
    /// The body that came before it.
    pub body: Vec<u8>,
}

/// A request that the node makes; [`HttpRequest::get`] and [`HttpRequest::post`] make usual ones.
#[derive(Clone, Debug)]
pub struct HttpRequest {
    /// Such as `GET`.
    pub method: String,
    /// Where it goes.
    pub url: String,
    /// By name.
    pub headers: BTreeMap<String, String>,
    /// At most 190 KiB.
    pub body: Vec<u8>,
    /// For all of it, redirects included; at most 5 minutes.
    pub timeout: Duration,
}

impl HttpRequest {
    /// Returns a request of any method without headers or a body, of 30 seconds.
    pub fn new(method: impl Into<String>, url: impl Into<String>) -> Self {
        HttpRequest {
            method: method.into(),
            url: url.into(),
            headers: BTreeMap::new(),
            body: Vec::new(),
            timeout: HTTP_TIMEOUT,
        }
    }

    /// Returns a GET.
    pub fn get(url: impl Into<String>) -> Self {
        HttpRequest::new("GET", url)
    }

    /// Returns a POST of a body.
    pub fn post(url: impl Into<String>, body: impl Into<Vec<u8>>) -> Self {
        HttpRequest {
            body: body.into(),
            ..HttpRequest::new("POST", url)
        }
    }
}

/// An answer, whatever its status.
#[derive(Clone, Debug, PartialEq)]
pub struct HttpResponse {
    /// Such as 200.
    pub status: u16,
    /// Where it came from, after redirects.
    pub url: String,
    /// As they came; a name may come more than once.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl HttpResponse {
    /// Returns the first header of a name, in upper or lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }
}

/// What a model is asked. What is left out is the contract's.
#[derive(Clone, Debug)]
pub struct ModelRequest {
    /// Those of chat completions, an array of objects; there has to be one.
    pub messages: Value,
    /// The contract's when it is empty.
    pub model: String,
    /// The most that may be written.
    pub max_tokens: Option<u64>,
    /// How freely.
    pub temperature: Option<f64>,
    /// Whether log-probabilities are told.
    pub logprobs: bool,
    /// Of how many tokens besides the one that was taken.
    pub top_logprobs: u8,
    /// Further fields of the request, of those that `docs/agent-protocol.md` names.
    pub options: Map<String, Value>,
    /// At most 10 minutes.
    pub timeout: Duration,
}

impl ModelRequest {
    /// Returns a request with the contract's terms, of 10 minutes.
    pub fn new(messages: Value) -> Self {
        ModelRequest {
            messages,
            model: String::new(),
            max_tokens: None,
            temperature: None,
            logprobs: false,
            top_logprobs: 0,
            options: Map::new(),
            timeout: LONGEST_CALL,
        }
    }
}

/// What a model wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Which model.
    pub model: String,
    /// Tokens that it read.
    pub tokens_in: u64,
    /// Tokens that it wrote.
    pub tokens_out: u64,
    /// The chat completion, as the model server has it.
    pub body: Value,
}

impl Channel {
    /// Has the node make a call of a tool, with arguments as `docs/agent-protocol.md` has them, and
    /// waits so long for it, and half a minute. [`Channel::http`] and [`Channel::complete`] are the
    /// same with types.
    ///
    /// It is asked for once, whatever the patience: what became of a call whose answer is lost is not
    /// known. The node writes the step of the behaviour log, so it does not belong into
    /// [`Channel::call_tool`].
    ///
    /// # Errors
    ///
    /// `denied` for what the contract does not grant, `exhausted`, with `retry_after`, for what it
    /// grants no more of for now, `unsupported` for a tool that the node does not run, `unavailable`
    /// when the answer is lost, and the tool's own.
    pub fn ask_tool(
        &mut self,
        tool: &str,
        call: &str,
        arguments: &Value,
        wait: Duration,
    ) -> Result<Answer, Error> {
        let request = json!({"op": "tool", "tool": tool, "call": call, "arguments": arguments});
        let mut body = Vec::new();
        let result = self.ask_just_once(&request, wait.min(LONGEST_CALL), &mut body)?;
        Ok(Answer { result, body })
    }

    /// Has the node make a request; the sandbox needs no network for it. A status of any kind is an
    /// answer and no error.
    ///
    /// # Errors
    ///
    /// Those of [`Channel::ask_tool`], and `invalid` for what is no request, `timeout` when the answer
    /// is not whole in time, `exhausted` when it is longer than 16 MiB.
    pub fn http(&mut self, request: &HttpRequest) -> Result<HttpResponse, Error> {
        let arguments = json!({
            "url": request.url,
            "method": request.method,
            "headers": request.headers,
            "body": STANDARD.encode(&request.body),
            "timeout_s": request.timeout.as_secs_f64(),
        });
        let answer = self.ask_tool(tool::HTTP_CLIENT, "request", &arguments, request.timeout)?;
        response(answer).ok_or_else(odd)
    }

    /// Has the node ask its model by a tool, [`tool::LLM`] or [`tool::LLM_SUMMARIZER`].
    ///
    /// # Errors
    ///
    /// Those of [`Channel::ask_tool`], and `denied` for another model or more tokens than the
    /// contract's, `invalid` for what is no request.
    pub fn complete(&mut self, tool: &str, request: &ModelRequest) -> Result<Completion, Error> {
        let mut arguments = json!({
            "messages": request.messages,
            "model": request.model,
            "logprobs": request.logprobs,
            "top_logprobs": request.top_logprobs,
            "options": request.options,
            "timeout_s": request.timeout.as_secs_f64(),
        });
        if let Some(max_tokens) = request.max_tokens {
            arguments["max_tokens"] = max_tokens.into();
        }
        if let Some(temperature) = request.temperature {
            arguments["temperature"] = temperature.into();
        }
        let answer = self.ask_tool(tool, "complete", &arguments, request.timeout)?;
        completion(&answer).ok_or_else(odd)
    }
}

fn response(answer: Answer) -> Option<HttpResponse> {
    let told = &answer.result;
    let headers = told["headers"].as_array()?.iter().map(|pair| {
        let (name, value) = (pair[0].as_str()?, pair[1].as_str()?);
        Some((name.to_string(), value.to_string()))
    });
    Some(HttpResponse {
        status: u16::try_from(told["status"].as_u64()?).ok()?,
        url: told["url"].as_str()?.into(),
        headers: headers.collect::<Option<_>>()?,
        body: answer.body,
    })
}

fn completion(answer: &Answer) -> Option<Completion> {
    let told = &answer.result;
    Some(Completion {
        model: told["model"].as_str()?.into(),
        tokens_in: told["tokens_in"].as_u64()?,
        tokens_out: told["tokens_out"].as_u64()?,
        body: serde_json::from_slice(&answer.body).ok()?,
    })
}

fn odd() -> Error {
    Error::new(code::INTERNAL, "the node's answer is odd")
}
