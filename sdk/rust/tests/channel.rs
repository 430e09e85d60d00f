use dsec_agent::{arguments_sha256, json, Channel};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
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
