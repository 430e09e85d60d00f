use dsec_agent::{arguments_sha256, code, json, tool, Channel, HttpRequest, ModelRequest};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

#[test]
fn any_patience_and_any_wait_will_do() {
    let path = std::env::temp_dir().join(format!("dsec-agent-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let node = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        let mut length = [0; 4];
        connection.read_exact(&mut length).unwrap();
        let mut body = vec![0; u32::from_be_bytes(length) as usize];
        connection.read_exact(&mut body).unwrap();
        let reply = br#"{"id": 1, "result": {"ready": true, "seq": 1, "payload": 2}}"#;
        let length = u32::try_from(reply.len()).unwrap().to_be_bytes();
        connection
            .write_all(&[&length, &reply[..]].concat())
            .unwrap();
    });
    let mut channel = Channel::at(&path);
    channel.patience = Duration::MAX;
    let feedback = channel.await_for(1, Duration::MAX).unwrap().unwrap();
    assert_eq!(feedback.payload, json!(2));
    node.join().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn arguments_have_one_hash_in_every_language() {
    let odd = "<&>\u{2028}\u{2029}\u{8}\u{c}\\u2028\x7f";
    // As Python's SDK has it.
    assert_eq!(
        arguments_sha256(&json!({"n": 3, "at": {"zip": "1", "city": odd}})),
        "8c6dbe095d06031e7f7268d622e389e41bf867dcae9a19543fb64aec804911af",
    );
}

/// Answers one request on one connection with frames and hangs up; a second one finds nobody.
fn answering(name: &str, frames: Vec<&'static str>) -> (PathBuf, JoinHandle<()>) {
    let path = std::env::temp_dir().join(format!("dsec-{name}-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let node = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        let mut length = [0; 4];
        connection.read_exact(&mut length).unwrap();
        let mut body = vec![0; u32::from_be_bytes(length) as usize];
        connection.read_exact(&mut body).unwrap();
        for frame in frames {
            let length = u32::try_from(frame.len()).unwrap().to_be_bytes();
            connection
                .write_all(&[&length, frame.as_bytes()].concat())
                .unwrap();
        }
    });
    (path, node)
}

#[test]
fn a_call_whose_answer_is_lost_is_not_made_again() {
    let (path, node) = answering("lost", vec![r#"{"id":1,"part":"aGFs"}"#]);
    let lost = Channel::at(&path)
        .http(&HttpRequest::get("http://x/"))
        .unwrap_err();
    assert_eq!(
        (lost.code.as_str(), lost.retryable),
        (code::UNAVAILABLE, false)
    );
    node.join().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_refusal_that_may_pass_is_left_to_the_caller() {
    let refusal = r#"{"id":1,"error":{"code":"exhausted","retryable":true,"retry_after_s":7}}"#;
    let (path, node) = answering("refused", vec![refusal]);
    let refused = Channel::at(&path)
        .complete(tool::LLM, &ModelRequest::new(json!([])))
        .unwrap_err();
    assert_eq!(
        (refused.code.as_str(), refused.retry_after),
        (code::EXHAUSTED, Duration::from_secs(7))
    );
    node.join().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn parts_of_a_call_before_are_none_of_this_one() {
    let (path, node) = answering(
        "parts",
        vec![
            r#"{"id":0,"part":"b2xk"}"#,
            r#"{"id":1,"part":"bmU="}"#,
            r#"{"id":1,"part":"dw=="}"#,
            r#"{"id":1,"result":{"status":200,"url":"u","headers":[["a","b"]]}}"#,
        ],
    );
    let mut request = HttpRequest::post("http://x/", "old");
    request.timeout = Duration::MAX;
    let response = Channel::at(&path).http(&request).unwrap();
    assert_eq!(
        (response.body.as_slice(), response.header("A")),
        (&b"new"[..], Some("b"))
    );
    node.join().unwrap();
    std::fs::remove_file(path).unwrap();
}
