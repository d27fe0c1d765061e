//! Tests of the metrics server, including hostile clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use super::*;

/// Starts a server on a free port and returns its address.
fn server(
    make: impl Fn() -> Result<String, String> + Send + Sync + 'static,
) -> (MetricsServer, String) {
    let server = MetricsServer::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    server.serve(make).unwrap();
    let at = server.at().strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    let at = at.to_owned();
    (server, at)
}

fn connect(at: &str) -> TcpStream {
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Returns all data received until the connection ends.
fn rest(mut stream: &TcpStream) -> String {
    let mut text = Vec::new();
    stream.read_to_end(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

fn ask(at: &str, request: &[u8]) -> String {
    let mut stream = connect(at);
    stream.write_all(request).unwrap();
    rest(&stream)
}

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

#[test]
fn a_scrape_returns_the_text_with_type_and_length() {
    let (_server, at) = server(|| Ok("x 1\n".into()));
    let response = ask(&at, GET);
    assert_eq!(
        response,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: 4\r\nConnection: close\r\n\r\nx 1\n"
    );
}

#[test]
fn other_requests_are_refused_with_their_status() {
    let (_server, at) = server(|| Ok("x 1\n".into()));
    let line = |line: &str| format!("{line}\r\nHost: x\r\n\r\n").into_bytes();
    let long = format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(REQUEST_MAX));
    let endless = vec![b'A'; REQUEST_MAX + 1];
    for (request, status) in [
        (line("GET /metrics HTTP/1.0"), 200),
        (line("GET /metrics?name[]=x HTTP/1.1"), 200),
        (b"GET /metrics HTTP/1.1\r\n\r\n".to_vec(), 200),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello".to_vec(), 200),
        (line("GET / HTTP/1.1"), 404),
        (line("GET /metrics/ HTTP/1.1"), 404),
        (line("GET /../metrics HTTP/1.1"), 404),
        (line("POST /other HTTP/1.1"), 404),
        (line("POST /metrics HTTP/1.1"), 405),
        (line("HEAD /metrics HTTP/1.1"), 200),
        (line("OPTIONS /metrics HTTP/1.1"), 405),
        (line("get /metrics HTTP/1.1"), 400),
        (line("GET /metrics HTTP/2.0"), 400),
        (line("GET /metrics HTTP/1.1 x"), 400),
        (line("GET  /metrics HTTP/1.1"), 400),
        (line("GET /metrics"), 400),
        (line("GET http://x/metrics HTTP/1.1"), 200),
        (line("GET HTTP://[::1]:9100/metrics?name[]=x HTTP/1.1"), 200),
        (line("HEAD http://x:9100/metrics HTTP/1.1"), 200),
        (line("POST http://x/metrics HTTP/1.1"), 405),
        (line("GET http://x/ HTTP/1.1"), 404),
        (line("GET http://x HTTP/1.1"), 404),
        (line("GET http://x?/metrics HTTP/1.1"), 404),
        (line("GET http:///metrics HTTP/1.1"), 400),
        (line("GET https://x/metrics HTTP/1.1"), 400),
        (line("GET x:9100 HTTP/1.1"), 400),
        (line("OPTIONS * HTTP/1.1"), 400),
        (line(""), 400),
        (b"GET /metrics HTTP/1.1\r\nno header\r\n\r\n".to_vec(), 400),
        (b"GET /metrics HTTP/1.1\r\n: x\r\n\r\n".to_vec(), 400),
        (b"GET /metrics HTTP/1.1\r\nA b: x\r\n\r\n".to_vec(), 400),
        (b"GET /metrics HTTP/1.1\r\nA: b\nc\r\n\r\n".to_vec(), 400),
        (b"GET /metrics HTTP/1.1\r\nA: \0\r\n\r\n".to_vec(), 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n".to_vec(), 400),
        (b"\x16\x03\x01\x02\0\x01\0\r\n\r\n".to_vec(), 400),
        (b"\r\n\r\n".to_vec(), 400),
        (long.into_bytes(), 400),
        (endless, 400),
    ] {
        let shown = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        let response = ask(&at, &request);
        let head = format!("HTTP/1.1 {status} ");
        assert!(response.starts_with(&head), "{shown:?} got {response:?}");
        let has_text = status == 200 && !request.starts_with(b"HEAD");
        assert_eq!(response.contains("x 1\n"), has_text, "{shown:?} got {response:?}");
        let allow = response.contains("\r\nAllow: GET, HEAD\r\n");
        assert_eq!(allow, status == 405, "{shown:?} got {response:?}");
    }
    // Clients that stop in the middle of a request, or send nothing.
    for (part, response) in [(&b"GET /metr"[..], "HTTP/1.1 400 "), (b"", "")] {
        let mut stream = connect(&at);
        stream.write_all(part).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let got = rest(&stream);
        assert!(got.starts_with(response) && got.is_empty() == response.is_empty(), "{got:?}");
    }
}

#[test]
fn a_failed_render_is_unavailable() {
    let (_server, at) = server(|| Err("too busy".into()));
    let response = ask(&at, GET);
    assert!(response.starts_with("HTTP/1.1 503 "), "{response}");
    assert!(response.ends_with("\r\n\r\ntoo busy\n"), "{response}");
}

#[test]
fn silent_clients_are_evicted() {
    let (_server, at) = server(|| Ok("x 1\n".into()));
    let silent: Vec<TcpStream> = (0..3 * CONNECTIONS_MAX)
        .map(|_| {
            let mut stream = connect(&at);
            stream.write_all(b"GET /metrics HTT").unwrap();
            stream
        })
        .collect();
    assert!(ask(&at, GET).starts_with("HTTP/1.1 200 "));
    // The oldest client was closed immediately to make room for a newer one, not after the time
    // limit.
    assert_eq!((&silent[0]).read(&mut [0; 9]).unwrap_or(0), 0);
}

#[test]
fn clients_that_do_not_read_are_bounded_and_share_one_text() {
    // The text is longer than the buffers of a connection.
    let text = "x".repeat(32 << 20);
    let made = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&made);
    let (_server, at) = server(move || {
        count.fetch_add(1, Ordering::SeqCst);
        Ok(text.clone())
    });
    let begin = Instant::now();
    let lazy: Vec<TcpStream> = (0..CONNECTIONS_MAX)
        .map(|_| {
            let mut stream = connect(&at);
            stream.write_all(GET).unwrap();
            // The request has arrived when the response begins.
            stream.read_exact(&mut [0; 9]).unwrap();
            stream
        })
        .collect();
    // Further connections are closed as long as all of these are being served.
    let limit = Duration::from_secs(60);
    loop {
        let mut stream = connect(&at);
        let sent = stream.write_all(GET);
        if sent.is_ok() && stream.read_exact(&mut [0; 9]).is_ok() {
            break;
        }
        assert!(begin.elapsed() < limit, "no room for a client");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(begin.elapsed() >= TIMEOUT / 2, "the others were cut off early");
    let slots = begin.elapsed().as_millis() / INTERVAL_MIN.as_millis() + 2;
    assert!(made.load(Ordering::SeqCst) as u128 <= slots);
    drop(lazy);
}

#[test]
fn a_scrape_shows_no_state_from_before_its_request() {
    let state = Arc::new(AtomicUsize::new(0));
    let read = Arc::clone(&state);
    let (_server, at) = server(move || Ok(format!("x {}\n", read.load(Ordering::SeqCst))));
    for value in 0..4 {
        state.store(value, Ordering::SeqCst);
        let response = ask(&at, GET);
        assert!(response.ends_with(&format!("\r\n\r\nx {value}\n")), "{response}");
    }
}

#[test]
fn the_text_is_rendered_for_one_client_at_a_time() {
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counts = (Arc::clone(&now), Arc::clone(&most));
    let (_server, at) = server(move || {
        counts.1.fetch_max(counts.0.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        counts.0.fetch_sub(1, Ordering::SeqCst);
        Ok("x 1\n".into())
    });
    let streams: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream = connect(&at);
            stream.write_all(GET).unwrap();
            stream
        })
        .collect();
    for stream in &streams {
        assert!(rest(stream).ends_with("\r\n\r\nx 1\n"));
    }
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

#[test]
fn the_endpoint_stops_with_its_owner_and_serves_unix_sockets() {
    let path = std::env::temp_dir().join(format!("rtrs-metrics-{}", std::process::id()));
    let address = MetricsAddress::Unix(path.clone());
    let server = MetricsServer::bind(&address).unwrap();
    let (ended, over) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    server
        .serve(move || {
            let _held_by_the_thread = &ended;
            Ok("x 1\n".into())
        })
        .unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(GET).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("\r\n\r\nx 1\n"), "{text}");
    let taken = MetricsServer::bind(&address).unwrap_err();
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    // A client that sends nothing does not delay the end.
    let silent = UnixStream::connect(&path).unwrap();
    drop(server);
    assert!(!path.exists());
    let thread = over.recv_timeout(Duration::from_secs(60));
    assert_eq!(thread, Err(mpsc::RecvTimeoutError::Disconnected), "its threads have ended");
    drop(silent);
}
