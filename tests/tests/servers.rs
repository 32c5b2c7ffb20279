//! Servers that were not written here, under load: checkpointed by every engine, killed and restored, again and again, while
//! clients outside keep their connections, and their data is counted in the end.

use std::fs;
use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use stillpoint_tests::programs::{built_by_go, installed};
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::alone;
use stillpoint_tests::{
    Client, Scratch, Stillpoint, engine, kernel, right, right_eq, skipped, undisturbed_only, wait_for,
};

const PATIENCE: Duration = Duration::from_secs(60);
/// How often each is killed and restored.
const LIVES: usize = 3;

/// What a client says and hears in one round of its connection, of which this is the number.
type Round = fn(&mut BufReader<TcpStream>, u64, u64) -> Result<()>;

fn said_wrong(said: &str) -> std::io::Error {
    std::io::Error::other(format!("unexpected: {said:?}"))
}

fn line(stream: &mut BufReader<TcpStream>) -> Result<String> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(std::io::Error::other("the connection has been closed"));
    }
    Ok(line)
}

/// A request on a connection that is kept; the answer's body.
fn get(stream: &mut BufReader<TcpStream>, path: &str) -> Result<Vec<u8>> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.get_mut().write_all(request.as_bytes())?;
    let status = line(stream)?;
    if !status.contains(" 200 ") {
        return Err(said_wrong(&status));
    }
    let mut length = None;
    loop {
        let header = line(stream)?.to_lowercase();
        if header == "\r\n" {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse().ok();
        }
    }
    let mut body = vec![0; length.ok_or_else(|| said_wrong("no length"))?];
    stream.read_exact(&mut body)?;
    Ok(body)
}

/// A server that is a child of ours, until it is killed for the first time.
struct Server {
    scratch: Scratch,
    stillpoint: Stillpoint,
    pid: u32,
    child: Option<Child>,
    port: u16,
    clients: Vec<Client>,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port()
}

impl Server {
    /// Starts it, and waits until somebody listens.
    fn start(scratch: Scratch, port: u16, command: &[&str]) -> Self {
        let directory = scratch.directory("server");
        let open = |name: &str| fs::File::create(directory.join(name)).expect("create");
        let mut process = alone(command[0]);
        process.args(&command[1..]).current_dir(&directory).env(MARK, scratch.path());
        process.stdin(Stdio::null()).stdout(open("out")).stderr(open("errors"));
        let mut child = process.spawn().unwrap_or_else(|e| panic!("{}: {e}", command[0]));
        let listens = || {
            if let Ok(Some(status)) = child.try_wait() {
                let said = fs::read_to_string(directory.join("errors")).unwrap_or_default();
                panic!("{} has ended ({status}): {said}", command[0]);
            }
            TcpStream::connect(("127.0.0.1", port)).is_ok().then_some(())
        };
        wait_for(&format!("{} to listen", command[0]), PATIENCE, listens);
        let stillpoint = scratch.stillpoint();
        Server { stillpoint, pid: child.id(), child: Some(child), port, clients: Vec::new(), scratch }
    }

    fn with_clients(mut self, count: u64, round: Round) -> Self {
        let client = |number| Client::new(self.port, move |stream, n| round(stream, number, n));
        self.clients = (0..count).map(client).collect();
        self.go_on("undisturbed");
        self
    }

    #[track_caller]
    fn go_on(&self, what: &str) {
        self.clients.iter().for_each(|client| client.goes_on(what));
    }

    fn rest(&self) {
        let moment = self.scratch.random().below(150);
        std::thread::sleep(Duration::from_millis(moment));
    }

    /// Checkpoints by the engine whose turn it is, then kills and restores.
    #[track_caller]
    fn disturb(&mut self) {
        for engine in engine::in_turn() {
            self.rest();
            let pid = self.pid.to_string();
            let arguments = ["checkpoint", &pid, "--name", "server", "--json", "--engine", engine];
            let output = self.stillpoint.run(&arguments);
            // Not every engine is for every program: node keeps its code from its children, and who may not trace may
            // not make the kernel wait.
            assert!(output.status.success() || engine::is_impossible(&output), "{output}");
            self.go_on(&format!("after a checkpoint by {engine}"));
        }
        for life in 1..=LIVES {
            self.rest();
            self.kill_and_restore();
            self.go_on(&format!("in life {life}"));
            self.rest();
            self.stillpoint.checkpoint(self.pid, "server", &[]);
        }
    }

    #[track_caller]
    fn kill_and_restore(&mut self) {
        let checkpoint = self.stillpoint.checkpoint(self.pid, "server", &["--kill"]);
        match self.child.take() {
            Some(mut child) => drop(child.wait()),
            None => kernel::wait_gone(self.pid, PATIENCE),
        }
        assert_eq!(self.stillpoint.restore_detached(&checkpoint.name(), &[]), self.pid);
    }

    /// Ends the clients; tells how many rounds each has had.
    fn end_clients(&mut self) -> Vec<u64> {
        let clients = std::mem::take(&mut self.clients).into_iter();
        clients.map(|client| client.end().expect("its connection")).collect()
    }

    /// Ends it by a signal.
    fn end(self, signal: rustix::process::Signal) {
        kernel::kill(self.pid, signal);
        kernel::wait_gone(self.pid, PATIENCE);
        self.scratch.nothing_is_left("in the end");
    }
}

#[test]
fn redis() {
    let Some(redis) = installed(&["redis-server"], "redis-server") else { return };
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port().to_string());
    let redis = redis.to_str().expect("path");
    let command = [redis, "--port", &port, "--appendonly", "yes", "--appendfsync", "always", "--save", ""];
    let round: Round = |stream, number, n| {
        stream.get_mut().write_all(format!("INCR client-{number}\r\n").as_bytes())?;
        let answer = line(stream)?;
        if answer == format!(":{}\r\n", n + 1) { Ok(()) } else { Err(said_wrong(&answer)) }
    };
    let mut server = Server::start(scratch, port.parse().expect("port"), &command).with_clients(3, round);
    // A child of it writes the log anew meanwhile.
    let mut other = TcpStream::connect(("127.0.0.1", server.port)).expect("connect");
    other.write_all(b"BGREWRITEAOF\r\n").expect("write");
    server.disturb();
    other.write_all(b"BGREWRITEAOF\r\n").expect("write");
    server.kill_and_restore();
    server.go_on("with a child that writes the log anew");
    let rounds = server.end_clients();
    drop(other);
    // All that was ever confirmed is in the log.
    kernel::kill(server.pid, kernel::SIGKILL);
    kernel::wait_gone(server.pid, PATIENCE);
    let Server { scratch, port: number, .. } = server;
    wait_for("a child to be gone", PATIENCE, || scratch.processes().is_empty().then_some(()));
    let server = Server::start(scratch, number, &command);
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", number)).expect("connect"));
    for (n, rounds) in rounds.iter().enumerate() {
        // It listens before it has read its log.
        wait_for("the log to be read", PATIENCE, || {
            stream.get_mut().write_all(format!("GET client-{n}\r\n").as_bytes()).expect("write");
            (!line(&mut stream).expect("length").starts_with("-LOADING")).then_some(())
        });
        let count: u64 = line(&mut stream).expect("count").trim().parse().expect("number");
        // One more may have been counted than its client has heard of.
        right!(count >= *rounds && count <= rounds + 1, "client {n}: {count} of {rounds}");
    }
    server.end(rustix::process::Signal::TERM);
}

#[test]
fn memcached() {
    let Some(memcached) = installed(&["memcached"], "memcached") else { return };
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port().to_string());
    let command = [
        memcached.to_str().expect("path"),
        "-l",
        "127.0.0.1",
        "-p",
        &port,
        "-U",
        "0",
        "-u",
        "root",
        "-t",
        "4",
    ];
    let round: Round = |stream, number, n| {
        let value = format!("{number}-{n}-{}", "x".repeat((n * 37 % 3000) as usize));
        let set = format!("set k{number}.{} 0 0 {}\r\n{value}\r\n", n % 50, value.len());
        stream.get_mut().write_all(set.as_bytes())?;
        let answer = line(stream)?;
        if answer != "STORED\r\n" {
            return Err(said_wrong(&answer));
        }
        stream.get_mut().write_all(format!("get k{number}.{}\r\n", n % 50).as_bytes())?;
        let (_, answer, _) = (line(stream)?, line(stream)?, line(stream)?);
        if answer.trim_end() == value { Ok(()) } else { Err(said_wrong(&answer)) }
    };
    let mut server = Server::start(scratch, port.parse().expect("port"), &command).with_clients(4, round);
    server.disturb();
    server.end_clients();
    server.end(rustix::process::Signal::TERM);
}

const FILE: u64 = 100_000;

fn letter(at: u64) -> u8 {
    (at * 7919 % 251) as u8
}

#[test]
fn nginx_with_workers() {
    let Some(nginx) = installed(&["nginx", "/usr/sbin/nginx"], "nginx-light") else { return };
    if !kernel::is_root() {
        return skipped("nginx is started as root");
    }
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port());
    let directory = scratch.directory("server");
    fs::write(directory.join("file"), (0..FILE).map(letter).collect::<Vec<u8>>()).expect("file");
    let here = directory.display();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {here}/{kind}; "))
        .concat();
    let configuration = format!(
        "daemon off; user root; worker_processes 2; pid {here}/pid; error_log {here}/log;\n\
         events {{ worker_connections 64; }}\n\
         http {{ access_log {here}/access; {paths} keepalive_requests 10000000; keepalive_timeout 600;\n\
         server {{ listen 127.0.0.1:{port}; root {here}; }} }}\n"
    );
    fs::write(directory.join("conf"), configuration).expect("configuration");
    let round: Round = |stream, _, _| {
        let body = get(stream, "/file")?;
        let right = body.len() as u64 == FILE && body.iter().zip(0..).all(|(b, at)| *b == letter(at));
        if right { Ok(()) } else { Err(said_wrong("another file")) }
    };
    let conf = directory.join("conf");
    let command = [nginx.to_str().expect("path"), "-c", conf.to_str().expect("path")];
    let mut server = Server::start(scratch, port, &command).with_clients(4, round);
    server.disturb();
    server.end_clients();
    server.end(rustix::process::Signal::QUIT);
}

#[test]
fn gunicorn_with_workers() {
    let Some(gunicorn) = installed(&["/usr/bin/gunicorn"], "gunicorn") else { return };
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port());
    let directory = scratch.directory("server");
    let application = "import hashlib, os\n\
        def app(environ, start):\n\
        \x20   body = hashlib.sha256(environ['PATH_INFO'].encode()).hexdigest().encode()\n\
        \x20   start('200 OK', [('Content-Length', str(len(body)))])\n\
        \x20   return [body]\n";
    fs::write(directory.join("application.py"), application).expect("application");
    let round: Round = |stream, number, n| {
        let body = get(stream, &format!("/{number}/{n}"))?;
        if body.len() == 64 { Ok(()) } else { Err(said_wrong("not a digest")) }
    };
    let bind = format!("127.0.0.1:{port}");
    let command = [
        gunicorn.to_str().expect("path"),
        "--workers=3",
        "--threads=4",
        "--worker-class=gthread",
        "--keep-alive=600",
        "--timeout=300",
        "--bind",
        &bind,
        "application:app",
    ];
    let mut server = Server::start(scratch, port, &command).with_clients(4, round);
    server.disturb();
    server.end_clients();
    server.end(rustix::process::Signal::TERM);
}

#[test]
fn node() {
    let Some(node) = installed(&["node"], "nodejs") else { return };
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port().to_string());
    let script = "const http = require('http'); const seen = new Map();\n\
        const server = http.createServer((request, response) => {\n\
        const [, client, n] = request.url.split('/'); const before = seen.get(client) ?? -1;\n\
        seen.set(client, Number(n)); const body = JSON.stringify({client, before, junk: 'x'.repeat(n % 5000)});\n\
        response.writeHead(200, {'Content-Length': body.length}); response.end(body); });\n\
        server.keepAliveTimeout = 600000; server.requestTimeout = 0; server.headersTimeout = 0;\n\
        server.listen(Number(process.argv[1]), '127.0.0.1');\n\
        setInterval(() => { globalThis.ticks = (globalThis.ticks ?? 0) + 1; }, 10);";
    let command = [node.to_str().expect("path"), "-e", script, &port];
    let server = Server::start(scratch, port.parse().expect("port"), &command);
    let mut server = server.with_clients(4, NUMBERED);
    server.disturb();
    server.end_clients();
    server.end(rustix::process::Signal::TERM);
}

/// Threads of two processes that were forked from a third.
#[test]
fn puma_with_workers() {
    let Some(puma) = installed(&["puma"], "puma") else { return };
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port());
    let directory = scratch.directory("server");
    let application =
        "run lambda { |env| [200, { 'Content-Type' => 'text/plain' }, [env['PATH_INFO'] * 10]] }";
    let settings =
        format!("workers 2\nthreads 2, 4\npersistent_timeout 600\nbind 'tcp://127.0.0.1:{port}'\n");
    fs::write(directory.join("config.ru"), application).expect("application");
    fs::write(directory.join("settings.rb"), settings).expect("settings");
    let round: Round = |stream, number, n| {
        let path = format!("/{number}/{n}");
        let body = get(stream, &path)?;
        if body == path.repeat(10).as_bytes() { Ok(()) } else { Err(said_wrong("another path")) }
    };
    let command = [puma.to_str().expect("path"), "-C", "settings.rb", "config.ru"];
    let mut server = Server::start(scratch, port, &command).with_clients(4, round);
    server.disturb();
    server.end_clients();
    server.end(rustix::process::Signal::TERM);
}

/// A master with a worker of several threads, and a socket by which it can be ruled.
#[test]
fn haproxy() {
    let Some(haproxy) = installed(&["haproxy", "/usr/sbin/haproxy"], "haproxy") else { return };
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port());
    let directory = scratch.directory("server");
    let (here, behind) = (directory.display(), free_port());
    let configuration = format!(
        "global\n master-worker\n nbthread 2\n stats socket {here}/ruled level admin expose-fd listeners\n\
         defaults\n mode http\n timeout connect 60s\n timeout client 600s\n timeout server 600s\n\
         frontend before\n bind 127.0.0.1:{port}\n default_backend others\n\
         backend others\n server itself 127.0.0.1:{behind} check inter 50ms fall 1000\n\
         frontend behind\n bind 127.0.0.1:{behind}\n\
         http-request return status 200 content-type text/plain lf-string %[path]\n"
    );
    let file = directory.join("configuration");
    fs::write(&file, configuration).expect("configuration");
    let round: Round = |stream, number, n| {
        let path = format!("/{number}/{n}");
        let body = get(stream, &path)?;
        if body == path.as_bytes() { Ok(()) } else { Err(said_wrong("another path")) }
    };
    let command = [haproxy.to_str().expect("path"), "-W", "-db", "-f", file.to_str().expect("path")];
    let mut server = Server::start(scratch, port, &command).with_clients(4, round);
    server.disturb();
    server.end_clients();
    server.end(rustix::process::Signal::TERM);
}

/// What MariaDB says, without its header; who says something hears it in one piece each time.
fn packet(stream: &mut BufReader<TcpStream>) -> Result<Vec<u8>> {
    let mut header = [0; 4];
    stream.read_exact(&mut header)?;
    let mut body = vec![0; u32::from_le_bytes([header[0], header[1], header[2], 0]) as usize];
    stream.read_exact(&mut body)?;
    match body.first() {
        Some(0xff) | None => Err(said_wrong(&String::from_utf8_lossy(&body))),
        _ => Ok(body),
    }
}

fn send(stream: &mut BufReader<TcpStream>, number: u8, body: &[u8]) -> Result<Vec<u8>> {
    let mut whole = (body.len() as u32).to_le_bytes().to_vec();
    whole[3] = number;
    whole.extend_from_slice(body);
    stream.get_mut().write_all(&whole)?;
    packet(stream)
}

/// Those of a client: version 4.1, with a database, a safe password, and the name of how it is told.
const ABILITIES: u32 = 0x8_8208;

/// A transfer between two accounts, and a line about it, in one transaction.
const TRANSFERS: Round = |stream, number, n| {
    if n == 0 {
        packet(stream)?;
        let mut hello = [&ABILITIES.to_le_bytes()[..], &[0, 0, 0, 1, 33], &[0; 23]].concat();
        hello.extend_from_slice(b"root\0\0ledger\0mysql_native_password\0");
        send(stream, 1, &hello)?;
    }
    let (one, other) = (n * 7 % 50, 50 + (n * 13 + number) % 50);
    for query in [
        "begin".into(),
        format!("update accounts set amount = amount - {n} where id = {one}"),
        format!("update accounts set amount = amount + {n} where id = {other}"),
        format!("insert into transfers values ({number}, {n})"),
        "commit".into(),
    ] {
        send(stream, 0, &[b"\x03", query.as_bytes()].concat())?;
    }
    Ok(())
};

/// MariaDB with two clients that transfer money: what they were told to be done is there.
#[test]
fn mariadb() {
    let Some(mariadbd) = installed(&["mariadbd", "/usr/sbin/mariadbd"], "mariadb-server") else { return };
    let Some(mariadb) = installed(&["mariadb"], "mariadb-client") else { return };
    if !kernel::is_root() {
        return skipped("becomes the user mysql");
    }
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port());
    let directory = scratch.directory("server");
    let owned = Command::new("chown").arg("mysql").arg(&directory).status();
    assert!(owned.is_ok_and(|s| s.success()));
    let data = format!("--datadir={}", directory.join("data").display());
    let installs = Command::new("mariadb-install-db")
        .args([
            "--no-defaults",
            "--user=mysql",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            &data,
        ])
        .output()
        .expect("mariadb-install-db");
    assert!(installs.status.success(), "{}", String::from_utf8_lossy(&installs.stdout));
    let begin = "create database ledger;\nuse ledger;\ncreate table accounts (id int primary key, amount bigint);\n\
        create table transfers (client int, n int, primary key (client, n));\n\
        insert into accounts select seq, 0 from seq_0_to_99;\n";
    fs::write(directory.join("begin"), begin).expect("begin");
    let (at, socket) = (format!("--port={port}"), format!("--socket={}", directory.join("socket").display()));
    let begin = format!("--init-file={}", directory.join("begin").display());
    let command = [
        mariadbd.to_str().expect("path"),
        "--no-defaults",
        "--user=mysql",
        "--bind-address=127.0.0.1",
        "--innodb-use-native-aio=0", // io_uring
        "--innodb-buffer-pool-size=32M",
        &data,
        &at,
        &socket,
        &begin,
    ];
    let mut server = Server::start(scratch, port, &command).with_clients(2, TRANSFERS);
    server.disturb();
    let rounds = server.end_clients();
    let asked = "check table accounts, transfers; select sum(amount) from accounts; \
        select client, count(*), max(n) + 1 from transfers group by client order by client";
    let output = Command::new(mariadb)
        .args(["--no-defaults", &socket, "--user=root", "-N", "-e", asked, "ledger"])
        .output()
        .expect("mariadb");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let counts = rounds.iter().enumerate().map(|(client, rounds)| format!("{client}\t{rounds}\t{rounds}\n"));
    let expected = format!(
        "ledger.accounts\tcheck\tstatus\tOK\nledger.transfers\tcheck\tstatus\tOK\n0\n{}",
        counts.collect::<String>()
    );
    right_eq!(said, expected);
    server.end(rustix::process::Signal::TERM);
}

/// The server knows which number each client had before.
const NUMBERED: Round = |stream, number, n| {
    let body = get(stream, &format!("/{number}/{n}"))?;
    let body: serde_json::Value = serde_json::from_slice(&body)?;
    if body["before"] == n as i64 - 1 { Ok(()) } else { Err(said_wrong(&body.to_string())) }
};

#[test]
fn go() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let Some(served) = built_by_go("served.go", &scratch) else { return };
    let port = free_port().to_string();
    let command = [served.to_str().expect("path"), &port];
    let server = Server::start(scratch, port.parse().expect("port"), &command);
    let mut server = server.with_clients(4, NUMBERED);
    server.disturb();
    server.end_clients();
    server.end(rustix::process::Signal::TERM);
}

#[test]
fn java_with_a_pool_of_threads() {
    let Some(java) = installed(&["java"], "default-jdk-headless") else { return };
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port().to_string());
    let directory = scratch.directory("server");
    let source = r#"
import com.sun.net.httpserver.*; import java.net.*; import java.util.concurrent.*;
public class Served {
  public static void main(String[] arguments) throws Exception {
    ConcurrentHashMap<String, Long> seen = new ConcurrentHashMap<>();
    HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", Integer.parseInt(arguments[0])), 50);
    server.createContext("/", exchange -> {
      String[] path = exchange.getRequestURI().getPath().split("/");
      Long before = seen.put(path[1], Long.parseLong(path[2]));
      byte[] body = (path[1] + " " + (before == null ? -1 : before)).getBytes();
      exchange.sendResponseHeaders(200, body.length); exchange.getResponseBody().write(body); exchange.close();
    });
    server.setExecutor(Executors.newFixedThreadPool(6)); server.start();
  }
}"#;
    fs::write(directory.join("Served.java"), source).expect("source");
    let round: Round = |stream, number, n| {
        let body = String::from_utf8_lossy(&get(stream, &format!("/{number}/{n}"))?).into_owned();
        if body == format!("{number} {}", n as i64 - 1) { Ok(()) } else { Err(said_wrong(&body)) }
    };
    let idle = "-Dsun.net.httpserver.idleInterval=600";
    let command = [java.to_str().expect("path"), "-Xmx256m", idle, "Served.java", &port];
    let mut server = Server::start(scratch, port.parse().expect("port"), &command).with_clients(4, round);
    server.disturb();
    server.end_clients();
    server.end(rustix::process::Signal::TERM);
}

/// A Jupyter kernel, whose variables are there when somebody talks to it after a restore.
#[test]
fn jupyter() {
    let python = "/usr/bin/python3";
    let has =
        Command::new(python).args(["-c", "import ipykernel, jupyter_client"]).stderr(Stdio::null()).status();
    if !has.is_ok_and(|s| s.success()) {
        return skipped("python3-ipykernel or python3-jupyter-client is not installed");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let directory = scratch.directory("server");
    let ask = |code: &str| -> String {
        let script = "import sys, jupyter_client\n\
            client = jupyter_client.BlockingKernelClient(); client.load_connection_file('connection.json')\n\
            client.start_channels(); client.wait_for_ready(timeout=60)\n\
            client.execute_interactive(sys.argv[1], timeout=60); client.stop_channels()";
        let mut command = Command::new(python);
        command.args(["-c", script, code]).current_dir(&directory).env(MARK, scratch.path());
        let output = command.output().expect("python3");
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    };
    let mut process = alone(python);
    process.args(["-m", "ipykernel_launcher", "-f", "connection.json"]).current_dir(&directory);
    process.env(MARK, scratch.path()).env("JUPYTER_RUNTIME_DIR", &directory).env("HOME", &directory);
    let mut child =
        process.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("python3");
    let pid = child.id();
    let is_written = || {
        std::fs::read(directory.join("connection.json")).is_ok_and(|all| all.trim_ascii_end().ends_with(b"}"))
    };
    wait_for("the kernel", PATIENCE, || is_written().then_some(()));
    assert_eq!(ask("answer = 41; import threading; print('set')"), "set\n");
    let stillpoint = scratch.stillpoint();
    for n in 0..LIVES {
        stillpoint.checkpoint(pid, "kernel", &[]);
        let checkpoint = stillpoint.checkpoint(pid, "kernel", &["--kill"]);
        match n {
            0 => drop(child.wait()),
            _ => kernel::wait_gone(pid, PATIENCE),
        }
        assert_eq!(stillpoint.restore_detached(&checkpoint.name(), &[]), pid);
        right_eq!(ask("answer += 1; print(answer)"), format!("{}\n", 42 + n));
    }
    kernel::kill(pid, kernel::SIGKILL);
    kernel::wait_gone(pid, PATIENCE);
}

/// A terminal multiplexer with its panes: shells go on with what they know, and what they have shown is there.
#[test]
fn tmux() {
    let Some(tmux) = installed(&["tmux"], "tmux") else { return };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let directory = scratch.directory("server");
    let call = |arguments: &[&str]| -> String {
        let mut command = alone(&tmux);
        command.args(["-S", "socket", "-f", "/dev/null"]).args(arguments).current_dir(&directory);
        command.env(MARK, scratch.path()).env("TERM", "xterm").env_remove("TMUX");
        let output = command.stdin(Stdio::null()).output().expect("tmux");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let shows = |pane: &str, text: &str| {
        wait_for(&format!("{pane} to show {text}"), PATIENCE, || {
            call(&["capture-pane", "-p", "-t", pane]).lines().any(|l| l.trim() == text).then_some(())
        });
    };
    call(&["new-session", "-d", "-s", "s", "-x", "90", "-y", "30", "bash --norc --noprofile"]);
    call(&["split-window", "-t", "s", "bash --norc --noprofile"]);
    let pid: u32 = call(&["display-message", "-p", "#{pid}"]).parse().expect("pid");
    for (pane, word) in [("s.0", "first"), ("s.1", "second")] {
        call(&["send-keys", "-t", pane, &format!("known={word}; sleep 1000 & echo $known-said"), "Enter"]);
        shows(pane, &format!("{word}-said"));
    }
    let stillpoint = scratch.stillpoint();
    for life in 1..=LIVES {
        stillpoint.checkpoint(pid, "tmux", &[]);
        let checkpoint = stillpoint.checkpoint(pid, "tmux", &["--kill"]);
        kernel::wait_gone(pid, PATIENCE);
        assert_eq!(stillpoint.restore_detached(&checkpoint.name(), &[]), pid);
        for (pane, word) in [("s.0", "first"), ("s.1", "second")] {
            shows(pane, &format!("{word}-said"));
            let keys = format!("clear; echo $known-{life} $(jobs -r | grep -c sleep)");
            call(&["send-keys", "-t", pane, &keys, "Enter"]);
            shows(pane, &format!("{word}-{life} 1"));
            call(&["send-keys", "-t", pane, "clear; echo $known-said", "Enter"]);
            shows(pane, &format!("{word}-said"));
        }
        let size = call(&["display-message", "-p", "-t", "s.0", "#{window_width}x#{window_height}"]);
        right_eq!(size, "90x30");
    }
    call(&["kill-server"]);
    kernel::wait_gone(pid, PATIENCE);
}

/// PostgreSQL while pgbench works: no transaction is lost, and its tables are as they must be.
#[test]
fn postgres() {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let Some(bin) = versions.map(|v| v.path().join("bin")).find(|bin| bin.join("initdb").exists()) else {
        return skipped("PostgreSQL is not installed (Debian package postgresql)");
    };
    if !kernel::is_root() {
        return skipped("becomes the user postgres");
    }
    if undisturbed_only() {
        return;
    }
    let (scratch, port) = (Scratch::new(), free_port().to_string());
    let directory = scratch.directory("server");
    let owned = Command::new("chown").arg("postgres").arg(&directory).status();
    assert!(owned.is_ok_and(|s| s.success()));
    let as_postgres = |program: &str, arguments: &[&str]| -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(bin.join(program));
        command.args(arguments).current_dir(&directory).env(MARK, scratch.path());
        command
    };
    let run = |program: &str, arguments: &[&str]| -> String {
        let output = as_postgres(program, arguments).stdin(Stdio::null()).output().expect("setpriv");
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program}: {said}");
        said
    };
    run("initdb", &["-D", "data", "-A", "trust", "-U", "postgres", "--no-sync"]);
    let settings = format!(
        "port = {port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\nmax_connections = 20\n\
         autovacuum_naptime = 1s\nlogging_collector = off\n"
    );
    let file = directory.join("data/postgresql.conf");
    fs::OpenOptions::new()
        .append(true)
        .open(file)
        .and_then(|mut f| f.write_all(settings.as_bytes()))
        .expect("settings");
    let postgres = bin.join("postgres");
    let (uid, gid) = ("--reuid=postgres", "--regid=postgres");
    let command = ["setpriv", uid, gid, "--clear-groups", postgres.to_str().expect("path"), "-D", "data"];
    let number = port.parse().expect("port");
    // The directory is in use by `run`, which goes on borrowing it.
    let mut server = Server::start(Scratch::new(), number, &as_path(&command, &directory));
    let to = ["-h", "127.0.0.1", "-p", &port, "-U", "postgres"];
    let sql =
        |query: &str| run("psql", &[&to[..], &["-At", "-c", query, "postgres"]].concat()).trim().to_owned();
    wait_for("the database", PATIENCE, || {
        as_postgres("psql", &[&to[..], &["-c", "select 1", "postgres"]].concat())
            .output()
            .is_ok_and(|o| o.status.success())
            .then_some(())
    });
    run("pgbench", &[&to[..], &["-i", "-q", "-s", "2", "postgres"]].concat());
    let mut bench =
        as_postgres("pgbench", &[&to[..], &["-c", "4", "-j", "2", "-T", "25", "postgres"]].concat());
    let bench =
        bench.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("pgbench");
    server.rest();
    server.disturb();
    let output = bench.wait_with_output().expect("pgbench");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("number of failed transactions: 0"), "{said}");
    let sums = sql(
        "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history), \
        (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history), \
        (select sum(tbalance) from pgbench_tellers) = (select sum(delta) from pgbench_history)",
    );
    right_eq!(sums, "t|t|t");
    let processed = said.lines().find_map(|l| l.strip_prefix("number of transactions actually processed: "));
    right_eq!(Some(sql("select count(*) from pgbench_history").as_str()), processed, "{said}");
    sql("create extension if not exists amcheck");
    run("pg_amcheck", &[&to[..], &["postgres"]].concat());
    server.kill_and_restore();
    right_eq!(sql("select 1"), "1");
    server.end(rustix::process::Signal::INT);
}

/// The command, run in another directory.
fn as_path<'a>(command: &[&'a str], directory: &'a Path) -> Vec<&'a str> {
    let chdir = ["env", "-C", directory.to_str().expect("path")];
    [&chdir[..], command].concat()
}
