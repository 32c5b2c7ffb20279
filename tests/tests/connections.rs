//! Connections: between two sockets of the program, and with clients outside.

use rustix::net;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_tests::target::{Running, alone};
use stillpoint_tests::{
    Build, Client, Feature, Rng, Scratch, Stillpoint, Target, kernel, right, right_eq, skipped,
    undisturbed_only, wait_for,
};

/// Each scenario through everything that can happen to it; and restored from a checkpoint that it went on after, so that its
/// sockets were closed by its end and must be made anew.
macro_rules! scenarios {
    ($($name:ident $(.$method:ident($($argument:expr),*))*,)*) => {
        mod kept {
            $(
                #[test]
                fn $name() {
                    super::Feature::new("connections", stringify!($name))$(.$method($($argument),*))*.survives();
                }
            )*
        }
        mod made_anew {
            $(
                #[test]
                fn $name() {
                    super::made_anew(stringify!($name));
                }
            )*
        }
    };
}

scenarios! {
    pair4,
    pair6,
    pair_mapped,
    two_families,
    no_door,
    full,
    half_closed,
    crowded,
    other_end_closed,
    with_options,
    corked,
    watched,
    busy.ignoring(&["thread"]),
    blocked,
    many,
    datagrams_unread,
    groups,
    without_port,
    raw_and_netlink,
    packets,
    foreign,
    multipath,
}

fn made_anew(scenario: &str) {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("connections", scenario, Build::Dynamic).expect("cc");
    let directory = scratch.directory("anew");
    let running = target.start(&directory, scratch.path());
    if running.skip().is_some() {
        return;
    }
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(scratch.random().below(40)));
        stillpoint.checkpoint(running.pid, "anew", &[]);
    }
    let pid = running.pid;
    running.kill();
    // An ordinary user's has its old id in its own namespace.
    let is_it = |now: u32| right_eq!(kernel::id_within(now).unwrap_or(now), pid);
    let again = stillpoint.restore_detached("anew", &[]);
    is_it(again);
    // Once more, now of sockets that were made by a restore.
    stillpoint.checkpoint(again, "anew", &[]);
    Running::restored(again, &directory).kill();
    let again = stillpoint.restore_detached("anew", &[]);
    is_it(again);
    Running::restored(again, &directory).finish("made anew");
    scratch.nothing_is_left("in the end");
}

// --- clients outside

/// A client that says something and waits until it hears it back.
fn echo(port: u16, seed: u64) -> Client {
    let mut random = Rng::new(seed);
    Client::new(port, move |stream, _| {
        let length = 1 + random.below(30_000) as usize;
        let said: Vec<u8> = (0..length).map(|_| random.next_u64() as u8).collect();
        let mut heard = vec![0; length];
        stream.get_mut().write_all(&said)?;
        stream.read_exact(&mut heard)?;
        match heard == said {
            true => Ok(()),
            false => Err(std::io::Error::other("it hears something else than it said")),
        }
    })
}

/// A server with clients that live in this process.
struct Served {
    scratch: Scratch,
    stillpoint: Stillpoint,
    running: Running,
    port: u16,
    clients: Vec<Client>,
}

impl Served {
    fn new(scenario: &str, clients: u64) -> Self {
        let scratch = Scratch::new();
        let target = Target::new("connections", scenario, Build::Dynamic).expect("cc");
        let running = target.start(&scratch.directory("served"), scratch.path());
        let said = running.said();
        let port = said.lines().find_map(|line| line.strip_prefix("port ")).and_then(|p| p.parse().ok());
        let port = port.unwrap_or_else(|| panic!("no port: {said}"));
        let seed = scratch.random().next_u64();
        let clients = (0..clients).map(|i| echo(port, seed ^ i)).collect();
        let served = Served { stillpoint: scratch.stillpoint(), scratch, running, port, clients };
        served.go_on("at first");
        served
    }

    #[track_caller]
    fn go_on(&self, what: &str) {
        self.clients.iter().for_each(|client| client.goes_on(what));
    }

    fn checkpoint(&self, extra: &[&str]) {
        self.stillpoint.checkpoint(self.running.pid, "served", extra);
    }

    fn restore(&mut self, extra: &[&str]) -> serde_json::Value {
        let mut arguments = vec!["restore", "served", "--detach", "--json"];
        arguments.extend(extra);
        let json = self.stillpoint.run(&arguments).ok().json();
        let directory = self.running.directory().to_owned();
        self.running = Running::restored(json["pid"].as_u64().expect("pid") as u32, &directory);
        json
    }

    /// Waits until all clients have been answered for so long, and restores the server as often as it is killed meanwhile: what a
    /// command had asked of the job's checkpointer is done also when the command is dead. Tells how often.
    #[track_caller]
    fn settle(&mut self, what: &str, quiet: Duration) -> u32 {
        let (mut restored, began) = (0, Instant::now());
        loop {
            let since = Instant::now();
            let rounds: Vec<u64> = self.clients.iter().map(Client::rounds).collect();
            let answered = || {
                let mut all = self.clients.iter().zip(&rounds);
                since.elapsed() >= quiet && all.all(|(c, n)| c.rounds() > n + 1)
            };
            while kernel::alive(self.running.pid) && !answered() {
                assert!(began.elapsed() < Duration::from_secs(60), "{what}: clients wait in vain");
                right!(!self.clients.iter().any(Client::has_lost), "{what}: a client has lost");
                std::thread::sleep(Duration::from_millis(2));
            }
            if kernel::alive(self.running.pid) {
                return restored;
            }
            restored += 1;
            self.running.reap();
            self.restore(&[]);
        }
    }

    /// All connections are over, and it is there for new ones.
    #[track_caller]
    fn has_lost_its_clients(mut self) {
        for client in self.clients.drain(..) {
            client.end().expect_err("its connection is over");
        }
        self.clients = vec![echo(self.port, 1)];
        self.go_on("with a new connection");
        self.finish();
    }

    #[track_caller]
    fn finish(self) {
        for client in self.clients {
            client.end().expect("a client");
        }
        self.running.finish("served");
        self.scratch.nothing_is_left("in the end");
    }
}

#[test]
fn clients_notice_nothing_of_checkpoints() {
    let served = Served::new("serve", 8);
    for n in 0..if undisturbed_only() { 0 } else { 6 } {
        served.checkpoint(&[]);
        served.go_on(&format!("after checkpoint {n}"));
    }
    served.finish();
}

#[test]
fn clients_keep_their_connections_over_a_restore() {
    if undisturbed_only() {
        return;
    }
    let mut served = Served::new("serve", 8);
    for n in 0..3 {
        let pause = served.scratch.random().below(300);
        served.checkpoint(&["--kill"]);
        served.running.reap();
        assert!(!keepers(&served.scratch).is_empty(), "nobody keeps their sockets");
        std::thread::sleep(Duration::from_millis(pause));
        let json = served.restore(&[]);
        // An ordinary user is told where it lives.
        let notes = usize::from(!kernel::is_root());
        assert_eq!(json["notes"].as_array().map(Vec::len), Some(notes), "{json}");
        served.go_on(&format!("in generation {n}"));
        // Nobody but the program holds them now.
        nobody_keeps_sockets(&served.scratch);
    }
    served.finish();
}

/// Processes of this test that keep sockets.
fn keepers(scratch: &Scratch) -> Vec<u32> {
    let keeps = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.trim() == "stillpoint-keep")
    };
    scratch.processes().into_iter().filter(keeps).collect()
}

/// One that has just been let go may not be gone yet.
#[track_caller]
fn nobody_keeps_sockets(scratch: &Scratch) {
    wait_for("sockets to be kept by nobody", Duration::from_secs(60), || {
        keepers(scratch).is_empty().then_some(())
    });
}

#[test]
fn clients_come_back_to_a_server_whose_connections_were_closed() {
    if undisturbed_only() {
        return;
    }
    let mut served = Served::new("serve", 4);
    served.checkpoint(&["--kill"]);
    served.running.reap();
    served.restore(&["--tcp", "close"]);
    served.has_lost_its_clients();
}

#[test]
fn connections_that_ended_with_the_program_are_over() {
    if undisturbed_only() {
        return;
    }
    let mut served = Served::new("serve", 4);
    served.checkpoint(&[]);
    kernel::kill(served.running.pid, kernel::SIGKILL);
    served.running.reap();
    let json = served.restore(&[]);
    let notes = json["notes"].to_string();
    assert!(notes.contains("over") && notes.contains(&format!(":{}", served.port)), "{notes}");
    served.has_lost_its_clients();
}

#[test]
fn a_connection_that_waits_to_be_accepted_is_kept() {
    if undisturbed_only() {
        return;
    }
    let mut served = Served::new("idle_door", 0);
    let mut client = TcpStream::connect(("127.0.0.1", served.port)).expect("connect");
    client.write_all(b"hello").expect("write");
    served.checkpoint(&[]);
    served.checkpoint(&["--kill"]);
    served.running.reap();
    served.restore(&[]);
    served.running.go();
    let mut heard = [0; 5];
    client.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
    client.read_exact(&mut heard).expect("its answer");
    right_eq!(&heard, b"hello");
    drop(client);
    served.finish();
}

/// Where somebody listens whose queue is full: as long as nobody is let in, nobody else comes.
struct FullHouse {
    door: TcpListener,
    first: TcpStream,
}

impl FullHouse {
    fn new(ip: IpAddr) -> Self {
        let door = TcpListener::bind((ip, 0)).expect("a port");
        net::listen(&door, 0).expect("listen");
        let first = TcpStream::connect(door.local_addr().expect("address")).expect("connect");
        FullHouse { door, first }
    }

    /// Lets in who waits, so many, and says back what they say.
    fn open(self, guests: usize) {
        let said = |mut guest: TcpStream| {
            let mut heard = [0; 5];
            // Some have gone again.
            if guest.read_exact(&mut heard).is_ok() {
                guest.write_all(&heard).expect("write");
                return true;
            }
            false
        };
        self.door.accept().expect("the first");
        drop(self.first);
        let mut heard = 0;
        while heard < guests {
            let (guest, _) = self.door.accept().expect("accept");
            guest.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
            heard += usize::from(said(guest));
        }
    }
}

/// Connections that are being made come to be made, kept over the restore or begun once more.
#[test]
fn connections_that_are_being_made() {
    if undisturbed_only() {
        return;
    }
    for (turn, kill) in [true, false].into_iter().enumerate() {
        let scratch = Scratch::new();
        let stillpoint = scratch.stillpoint();
        let directory = scratch.directory("target");
        let houses = [FullHouse::new(Ipv4Addr::LOCALHOST.into()), FullHouse::new(Ipv6Addr::LOCALHOST.into())];
        for (house, name) in houses.iter().zip(["door4", "door6"]) {
            let port = house.door.local_addr().expect("address").port();
            std::fs::write(directory.join(name), port.to_string()).expect("write");
        }
        let target = Target::new("connections", "knocks", Build::Dynamic).expect("cc");
        let mut running = target.start(&directory, scratch.path());
        let pid = running.pid;
        stillpoint.checkpoint(pid, "job", &[]);
        if kill {
            stillpoint.checkpoint(pid, "job", &["--kill"]);
            running.reap();
        } else {
            running.kill();
        }
        assert_eq!(stillpoint.restore_detached("job", &[]), pid);
        let opened = houses.into_iter().zip([2, 1]).map(|(h, n)| std::thread::spawn(move || h.open(n)));
        let opened: Vec<_> = opened.collect();
        Running::restored(pid, &directory).finish(&format!("turn {turn}"));
        opened.into_iter().for_each(|thread| thread.join().expect("they are let in"));
        scratch.nothing_is_left("in the end");
    }
}

// --- unix sockets whose other end is outside

/// Python, in a folder: waits for one client after the other, whose lines it sends back with their numbers, and connects to
/// `outside` beforehand if that is there, where it sends what it hears there.
const UNIX_SERVER: &str = r#"
import os, socket, threading
def serve(c, answer):
    n = 0
    while True:
        try:
            heard = c.recv(1000)
        except OSError as e:
            heard = b''
        if not heard:
            break
        n += 1
        c.sendall(b'%d %s' % (n, heard) if answer else heard)
    print('gone', flush=True)
if os.path.exists('outside'):
    out = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    out.connect('outside')
    threading.Thread(target=serve, args=(out, False), daemon=True).start()
door = socket.socket(socket.AF_UNIX)
door.bind('door')
door.listen()
print('ready', flush=True)
while True:
    c, _ = door.accept()
    serve(c, True)
"#;

/// A server of that kind, started as a job in a folder.
struct UnixServer {
    scratch: Scratch,
    stillpoint: Stillpoint,
    directory: std::path::PathBuf,
    pid: u32,
}

impl UnixServer {
    fn new(prepare: impl FnOnce(&std::path::Path)) -> Self {
        let scratch = Scratch::new();
        let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("served"));
        prepare(&directory);
        let out = std::fs::File::create(directory.join("out")).expect("out");
        let mut command = stillpoint.command(&["run", "--detach", "--name", "served", "--json", "--"]);
        command.args(["python3", "-c", UNIX_SERVER]).current_dir(&directory).stdin(Stdio::null());
        let done = command.stdout(out).stderr(Stdio::piped()).output().expect("stillpoint");
        let json: serde_json::Value = serde_json::from_slice(&done.stderr).expect("json");
        let pid = json["pid"].as_u64().expect("pid") as u32;
        let server = UnixServer { scratch, stillpoint, directory, pid };
        server.says("ready", 1);
        server
    }

    /// Waits until it has said a word so often.
    #[track_caller]
    fn says(&self, word: &str, times: usize) {
        let said = || std::fs::read_to_string(self.directory.join("out")).unwrap_or_default();
        wait_for(word, Duration::from_secs(60), || (said().matches(word).count() >= times).then_some(()));
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(self.directory.join("door")).expect("connect");
        client.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
        client
    }

    fn checkpoint(&self, extra: &[&str]) {
        self.stillpoint.checkpoint("served", "served", extra);
    }

    /// What the restore notes.
    fn restore(&self, extra: &[&str]) -> String {
        kernel::wait_free(self.pid);
        let mut arguments = vec!["restore", "served", "--detach", "--json"];
        arguments.extend(extra);
        self.stillpoint.run(&arguments).ok().json()["notes"].to_string()
    }

    fn end(self) {
        kernel::kill(self.pid, kernel::SIGKILL);
        self.scratch.nothing_is_left("in the end");
    }
}

/// Says a word, which must come back with this number.
#[track_caller]
fn says_back(client: &mut UnixStream, number: u32) {
    client.write_all(b"word").expect("write");
    let expected = format!("{number} word");
    let mut heard = vec![0; expected.len()];
    client.read_exact(&mut heard).expect("its answer");
    right_eq!(String::from_utf8_lossy(&heard), expected);
}

#[test]
fn unix_clients_keep_their_connections_over_a_restore() {
    if undisturbed_only() {
        return;
    }
    let server = UnixServer::new(|_| {});
    let mut client = server.client();
    says_back(&mut client, 1);
    server.checkpoint(&[]);
    says_back(&mut client, 2);
    server.checkpoint(&["--kill"]);
    // What comes meanwhile waits.
    client.write_all(b"word").expect("write");
    assert_eq!(server.restore(&[]), "[]");
    let mut heard = [0; 6];
    client.read_exact(&mut heard).expect("its answer");
    right_eq!(&heard, b"3 word");
    says_back(&mut client, 4);
    nobody_keeps_sockets(&server.scratch);
    server.end();
}

#[test]
fn unix_connections_that_were_not_kept_are_over() {
    if undisturbed_only() {
        return;
    }
    let server = UnixServer::new(|_| {});
    for (extra, kill) in [(&[][..], false), (&["--tcp", "close"], true)] {
        let mut client = server.client();
        says_back(&mut client, 1);
        server.checkpoint(if kill { &["--kill"] } else { &[] });
        kernel::kill(server.pid, kernel::SIGKILL);
        let notes = server.restore(extra);
        assert!(notes.contains("a unix connection with other processes is"), "{notes}");
        right_eq!(client.read(&mut [0; 10]).expect("its end"), 0);
        // It has found out, and is there for others.
        says_back(&mut server.client(), 1);
    }
    server.end();
}

#[test]
fn what_was_kept_goes_with_its_checkpoint() {
    if undisturbed_only() {
        return;
    }
    let server = UnixServer::new(|_| {});
    let mut client = server.client();
    says_back(&mut client, 1);
    server.checkpoint(&["--kill"]);
    server.stillpoint.run(&["rm", "served@1"]).ok();
    right_eq!(client.read(&mut [0; 10]).expect("its end"), 0);
    nobody_keeps_sockets(&server.scratch);
    server.scratch.nothing_is_left("in the end");
}

#[test]
fn a_unix_client_of_somebody_outside() {
    if undisturbed_only() {
        return;
    }
    let mut door = None;
    let server = UnixServer::new(|directory| {
        let socket = net::socket(net::AddressFamily::UNIX, net::SocketType::SEQPACKET, None).expect("socket");
        let address = net::SocketAddrUnix::new(directory.join("outside")).expect("address");
        net::bind(&socket, &address).expect("bind");
        net::listen(&socket, 4).expect("listen");
        door = Some(socket);
    });
    let outside = net::accept(door.as_ref().expect("a door")).expect("accept");
    let echoes = |what: &[u8]| {
        net::send(&outside, what, net::SendFlags::empty()).expect("send");
        let mut heard = [0; 100];
        let n = net::recv(&outside, &mut heard[..], net::RecvFlags::empty()).expect("receive").1;
        right_eq!(&heard[..n], what);
    };
    echoes(b"one");
    server.checkpoint(&["--kill"]);
    assert_eq!(server.restore(&[]), "[]");
    echoes(b"two");
    server.checkpoint(&[]);
    echoes(b"three");
    kernel::kill(server.pid, kernel::SIGKILL);
    assert!(server.restore(&[]).contains("over"), "it is told");
    server.says("gone", 1);
    server.end();
}

/// SIGKILL for the command at random moments: either the program runs, or it was killed after all of it was safe. In both cases
/// no client loses its connection.
#[test]
fn clients_keep_their_connections_whenever_the_command_is_killed() {
    if undisturbed_only() {
        return;
    }
    let mut served = Served::new("serve", 4);
    let (mut lives, mut deaths) = (0, 0);
    // How long one takes that is not disturbed.
    let began = Instant::now();
    served.checkpoint(&["--kill"]);
    let whole = began.elapsed().as_micros() as u64;
    served.running.reap();
    served.restore(&[]);
    for n in 0..30 {
        let kill: &[&str] = if n % 3 == 0 { &[] } else { &["--kill"] };
        let pid = served.running.pid.to_string();
        let mut arguments = vec!["checkpoint", &pid, "--name", "served"];
        arguments.extend(kill);
        let mut command = served.stillpoint.command(&arguments);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("stillpoint");
        std::thread::sleep(Duration::from_micros(served.scratch.random().below(2 * whole)));
        child.kill().expect("kill");
        child.wait().expect("wait");
        match served.settle(&format!("after kill {n}"), Duration::from_millis(200)) {
            0 => lives += 1,
            restored => deaths += restored,
        }
    }
    deaths += served.settle("after the last kill", Duration::from_secs(3));
    println!("it lived {lives} times, and was restored {deaths} times");
    assert!(lives > 0 && deaths > 0, "all moments were early, or all late: {lives} and {deaths}");
    nobody_keeps_sockets(&served.scratch);
    served.finish();
}

// --- servers that were not written here

/// A server of a line protocol through checkpoints, and killed and restored, with one client that keeps its connection.
fn real_server(
    name: &str,
    arguments: &dyn Fn(u16) -> Vec<String>,
    ask: &dyn Fn(u64) -> (String, Vec<String>),
) {
    let Some(program) = kernel::which(name) else { return skipped(&format!("{name} is not installed")) };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory(name);
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = free.local_addr().expect("address").port();
    drop(free);
    let out = File::create(directory.join("out")).expect("out");
    let mut command: Command = alone(program);
    command.args(arguments(port)).current_dir(&directory).stdin(Stdio::null());
    let err = out.try_clone().expect("out");
    let child = command.stdout(out).stderr(err).spawn().expect("server");
    let mut running = Running::new(child, &directory);
    let stream = wait_for("the server to listen", Duration::from_secs(60), || {
        TcpStream::connect(("127.0.0.1", port)).ok()
    });
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
    let mut lines = BufReader::new(stream.try_clone().expect("clone"));
    let mut stream = stream;
    let (mut n, mut worst) = (0, Duration::ZERO);
    let mut talk = |worst: &mut Duration| {
        for _ in 0..50 {
            n += 1;
            let (said, wanted) = ask(n);
            let began = Instant::now();
            stream.write_all(said.as_bytes()).expect("write");
            for wanted in wanted {
                let mut heard = String::new();
                lines.read_line(&mut heard).expect("its connection lives");
                right_eq!(heard.trim_end(), wanted, "answer {n}");
            }
            *worst = began.elapsed().max(*worst);
        }
    };
    talk(&mut worst);
    for _ in 0..3 {
        stillpoint.checkpoint(running.pid, name, &[]);
        talk(&mut worst);
    }
    for _ in 0..2 {
        stillpoint.checkpoint(running.pid, name, &["--kill"]);
        running.reap();
        let pid = stillpoint.restore_detached(name, &[]);
        running = Running::restored(pid, &directory);
        talk(&mut worst);
    }
    println!("{name}: the longest answer took {worst:?}");
    running.kill();
}

#[test]
fn redis_keeps_its_client() {
    let arguments = |port: u16| {
        let port = port.to_string();
        ["--port", &port, "--bind", "127.0.0.1", "--save", ""].map(str::to_owned).to_vec()
    };
    real_server("redis-server", &arguments, &|n| ("INCR counter\r\n".into(), vec![format!(":{n}")]));
}

#[test]
fn memcached_keeps_its_client() {
    let arguments = |port: u16| {
        let port = port.to_string();
        ["-u", "root", "-l", "127.0.0.1", "-U", "0", "-p", &port].map(str::to_owned).to_vec()
    };
    real_server("memcached", &arguments, &|n| match n {
        1 => ("set counter 0 0 1\r\n1\r\n".into(), vec!["STORED".into()]),
        n => ("incr counter 1\r\n".into(), vec![n.to_string()]),
    });
}
