//! The program that the conformance suite drives: requests as lines of JSON in, results out.

use dsec_agent::{
    code, json, serve, Action, Agent, Channel, Error, Feedback, HttpRequest, ModelRequest, Value,
};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::time::Duration;

fn main() {
    let mut channel = Channel::new();
    if std::env::args().nth(1).as_deref() == Some("serve") {
        let agent = Agent {
            name: "adder".into(),
            version: "2".into(),
            arguments: vec!["a".into(), "b".into()],
            execute: add,
        };
        if let Err(error) = serve(&mut channel, agent) {
            eprintln!("{error}");
            std::process::exit(1);
        }
        return;
    }
    for line in io::stdin().lock().lines() {
        let asked: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
        let said = match answer(&mut channel, &asked) {
            Ok(result) => json!({ "result": result }),
            Err(error) => json!({"error": {
                "code": error.code, "retryable": error.retryable, "details": error.details,
            }}),
        };
        println!("{said}");
    }
}

fn answer(channel: &mut Channel, asked: &Value) -> Result<Value, Error> {
    let text = |name: &str| asked[name].as_str().unwrap_or("").to_string();
    let number = |name: &str| asked[name].as_u64().unwrap_or(0);
    let seconds = |name: &str| asked[name].as_f64().unwrap_or(0.0);
    let attributes: BTreeMap<String, String> = asked["attributes"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| (name.clone(), value.as_str().unwrap_or("").to_string()))
        .collect();
    match asked["op"].as_str() {
        Some("patience") => {
            channel.patience = Duration::from_secs_f64(seconds("wait_s"));
            Ok(Value::Null)
        }
        Some("hello") => {
            let about = channel.hello()?;
            Ok(json!({
                "protocol": about.protocol,
                "sandbox_id": about.sandbox_id,
                "rollout_id": about.rollout_id,
                "last_seq": about.last_seq,
                "tools": about.tools,
                "payload_max_bytes": about.payload_max_bytes,
                "frame_max_bytes": about.frame_max_bytes,
            }))
        }
        Some("report") => {
            let seq = match number("seq") {
                0 => channel.report(&text("stage"), asked["payload"].clone()),
                seq => channel.report_as(seq, &text("stage"), asked["payload"].clone()),
            };
            seq.map(Value::from)
        }
        Some("step") => channel
            .step(&text("stage"), asked["payload"].clone())
            .map(told),
        Some("await") => {
            let wait = Duration::from_secs_f64(seconds("wait_s"));
            Ok(channel
                .await_for(number("seq"), wait)?
                .map_or(Value::Null, told))
        }
        Some("log") => channel
            .log(&Action {
                name: text("action"),
                status: text("status"),
                latency: Duration::from_secs_f64(seconds("latency_ms") / 1000.0),
                tokens_in: number("tokens_in"),
                tokens_out: number("tokens_out"),
                attributes,
            })
            .map(|()| Value::Null),
        Some("call") => channel.call_tool(
            &text("tool"),
            &text("method"),
            &asked["arguments"],
            |call| {
                if let Some(fails) = asked["fails"].as_str() {
                    return Err(Error::new(fails, "as it was told"));
                }
                call.status = text("status");
                call.tokens_in = number("tokens_in");
                call.tokens_out = number("tokens_out");
                call.notes = attributes;
                Ok(Value::Null)
            },
        ),
        Some("tool") => channel
            .ask_tool(
                &text("tool"),
                &text("call"),
                &asked["arguments"],
                Duration::from_secs(1),
            )
            .map(|answer| answer.result),
        Some("http") => {
            let mut request = HttpRequest::new(text("method"), text("url"));
            request.body = text("body").into_bytes();
            for (name, value) in asked["headers"].as_object().into_iter().flatten() {
                request
                    .headers
                    .insert(name.clone(), value.as_str().unwrap_or("").into());
            }
            let response = channel.http(&request)?;
            Ok(json!({
                "status": response.status,
                "url": response.url,
                "x_site": response
                    .headers
                    .iter()
                    .filter(|(name, _)| name.eq_ignore_ascii_case("x-site"))
                    .map(|(_, value)| value)
                    .collect::<Vec<_>>(),
                "bytes": response.body.len(),
                "sha256": format!("{:x}", Sha256::digest(&response.body)),
            }))
        }
        Some("complete") => {
            let mut request = ModelRequest::new(asked["messages"].clone());
            request.max_tokens = asked["max_tokens"].as_u64();
            request.options = asked["options"].as_object().cloned().unwrap_or_default();
            let completion = channel.complete(&text("tool"), &request)?;
            Ok(json!({
                "model": completion.model,
                "tokens_in": completion.tokens_in,
                "tokens_out": completion.tokens_out,
                "body": completion.body,
            }))
        }
        other => panic!("no such op: {other:?}"),
    }
}

fn told(feedback: Feedback) -> Value {
    json!({
        "seq": feedback.seq,
        "payload": feedback.payload,
        "reward": feedback.reward,
        "done": feedback.done,
    })
}

fn add(_channel: &mut Channel, input: Value) -> Result<Value, Error> {
    let a = input["a"]
        .as_i64()
        .ok_or_else(|| Error::new(code::INVALID, "give a and b"))?;
    if a == 7 {
        return Ok("x".repeat(300_000).into());
    }
    assert!(a != 8, "eight");
    Ok((a + input["b"].as_i64().unwrap_or(0)).into())
}
