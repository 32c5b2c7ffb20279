//! Programs from Debian, and Go, Java, static and musl programs: checkpointed at random moments, killed, restored; what
//! they write must be what they write undisturbed. See `tests/PACKAGES` for what they come from.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use stillpoint_tests::programs::{Program, built_by_go, input, installed, source};
use stillpoint_tests::scratch::MARK;
use stillpoint_tests::target::alone;
use stillpoint_tests::{
    Build, Scratch, Terminal, kernel, right, right_eq, skipped, tier, undisturbed_only, wait_for,
};

fn arguments<S: AsRef<std::ffi::OsStr>>(list: &[S]) -> Vec<String> {
    list.iter().map(|s| s.as_ref().to_string_lossy().into_owned()).collect()
}

#[test]
fn python_with_threads_and_numpy() {
    let with_numpy = ["/usr/bin/python3", "python3"].into_iter().find(|p| {
        let import = Command::new(p).args(["-c", "import numpy"]).stderr(Stdio::null()).status();
        import.is_ok_and(|s| s.success())
    });
    let Some(python) = with_numpy else {
        return skipped("numpy is not installed (Debian package python3-numpy)");
    };
    let mut program =
        Program::new(&[python, source("threads.py").to_str().expect("path"), &tier::size(900).to_string()]);
    program.environment.push(("OPENBLAS_NUM_THREADS".into(), "2".into()));
    program.outputs = vec!["digests"];
    program.survives();
}

#[test]
fn sqlite_inserting_into_a_file() {
    let Some(sqlite) = installed(&["sqlite3"], "sqlite3") else { return };
    let mut program =
        Program::new(&arguments(&[sqlite.to_str().expect("path"), "-batch", "data.db", ".read script.sql"]));
    program.prepare = Box::new(|directory| {
        let mut script = String::from("create table t (n integer primary key, word text, sum integer);\n");
        for n in 0..900 {
            script += &format!(
                "insert into t values ({n}, hex({n} * 7919 % 1000), (with recursive c(i) as \
                 (select 0 union all select i + 1 from c where i < 4000) select sum(i * {n}) from c));\n"
            );
        }
        script += "select count(*), sum(sum) from t;\npragma integrity_check;\n";
        fs::write(directory.join("script.sql"), script).expect("script");
    });
    program.outputs = vec!["data.db"];
    program.appends = false;
    program.survives();
}

#[test]
fn xz_with_threads() {
    let Some(xz) = installed(&["xz"], "xz-utils") else { return };
    let mut program = Program::new(&arguments(&[
        xz.to_str().expect("path"),
        "-T2",
        "-4",
        "--block-size=1MiB",
        "-k",
        "-c",
        "input",
    ]));
    program.prepare = input(14 << 20);
    program.survives();
}

#[test]
fn zstd_with_threads() {
    let Some(zstd) = installed(&["zstd"], "zstd") else { return };
    let mut program = Program::new(&arguments(&[
        zstd.to_str().expect("path"),
        "-q",
        "-T2",
        "-16",
        "-B1MiB",
        "input",
        "-o",
        "output.zst",
    ]));
    program.prepare = input(tier::size(16 << 20));
    program.outputs = vec!["output.zst"];
    program.survives();
}

#[test]
fn go_with_goroutines_and_timers() {
    let scratch = Scratch::new();
    let Some(binary) = built_by_go("timers.go", &scratch) else { return };
    let mut program = Program::new(&[binary.to_str().expect("path"), &tier::size(3000).to_string()]);
    program.outputs = vec!["sums"];
    program.survives();
}

#[test]
fn java_with_threads_and_timers() {
    let Some(java) = installed(&["java"], "default-jdk-headless") else { return };
    let Some(javac) = installed(&["javac"], "default-jdk-headless") else { return };
    let scratch = Scratch::new();
    let built =
        Command::new(javac).arg("-d").arg(scratch.path()).arg(source("Timers.java")).status().expect("javac");
    assert!(built.success(), "Timers.java does not build");
    let classes = scratch.path().to_str().expect("path");
    let mut program = Program::new(&[
        java.to_str().expect("path"),
        "-Xmx96m",
        "-cp",
        classes,
        "Timers",
        &tier::size(900).to_string(),
    ]);
    program.outputs = vec!["sums"];
    program.survives();
}

/// A program in a script, which is the file that is named last.
fn scripted(command: &[&str], script: &'static str) -> Program {
    let name = command.last().copied().expect("the script's name").to_owned();
    let mut program = Program::new(&arguments(command));
    program.prepare = Box::new(move |directory| fs::write(directory.join(&name), script).expect("script"));
    program
}

/// A ring of many processes of Erlang's, on several schedulers, with tables and a connection to itself.
#[test]
fn erlang_with_a_ring() {
    let Some(escript) = installed(&["escript"], "erlang-base") else { return };
    let script = r#"#!/usr/bin/env escript
%%! +S 2
-mode(compile).
passes(Next) -> receive {token, N} -> Next ! {token, N + 1}, passes(Next) end.
ring(0, Next) -> Next;
ring(N, Next) -> ring(N - 1, spawn_link(fun() -> passes(Next) end)).
echoes(S) -> case gen_tcp:recv(S, 0) of {ok, B} -> ok = gen_tcp:send(S, B), echoes(S); _ -> ok end.
main(_) ->
  {ok, L} = gen_tcp:listen(0, [binary, {packet, 2}, {active, false}, {ip, {127, 0, 0, 1}}]),
  {ok, Port} = inet:port(L),
  spawn_link(fun() -> {ok, S} = gen_tcp:accept(L), echoes(S) end),
  {ok, S} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {packet, 2}, {active, false}]),
  T = ets:new(t, [ordered_set]),
  rounds(ring(200, self()), S, T, 200).
rounds(_, _, _, 0) -> ok;
rounds(Head, S, T, K) ->
  Head ! {token, K}, receive {token, N} -> N = K + 200 end,
  B = erlang:md5(term_to_binary(ets:tab2list(T))), ok = gen_tcp:send(S, B), {ok, B} = gen_tcp:recv(S, 0),
  ets:insert(T, {N rem 97, B}), timer:sleep(2),
  io:format("~p ~p~n", [K, binary:decode_unsigned(B)]),
  rounds(Head, S, T, K - 1).
"#;
    scripted(&[escript.to_str().expect("path"), "ring"], script).survives();
}

/// Threads that compute and a collector of garbage that stops them by signals and protected pages.
#[test]
fn lisp_with_threads() {
    let Some(sbcl) = installed(&["sbcl"], "sbcl") else { return };
    let script = r#"(defun fib (n) (if (< n 2) n (+ (fib (- n 1)) (fib (- n 2)))))
(dotimes (round 500)
  (let ((threads (loop for k below 3 collect (let ((k k)) (sb-thread:make-thread (lambda ()
      (let ((all (loop for i below 3000 collect (make-array 10 :initial-element (+ i k round)))))
        (+ (fib 15) (reduce #'+ (mapcar (lambda (a) (aref a 9)) all))))))))))
    (format t "~a ~a~%" round (mapcar #'sb-thread:join-thread threads))
    (finish-output)
    (when (zerop (mod round 20)) (gc :full t))))
"#;
    scripted(&[sbcl.to_str().expect("path"), "--script", "threads.lisp"], script).survives();
}

/// Threads, children with pipes, and fibers.
#[test]
fn ruby_with_threads_and_children() {
    let Some(ruby) = installed(&["ruby"], "ruby") else { return };
    let script = r##"require 'socket'; require 'digest'; $stdout.sync = true
server = TCPServer.new('127.0.0.1', 0)
Thread.new { loop { s = server.accept; Thread.new { while l = s.gets; s.write l; end } } }
to = TCPSocket.new('127.0.0.1', server.addr[1])
numbers = Fiber.new { n = 0; loop { Fiber.yield n; n += 1 } }
150.times do |round|
  sums = 3.times.map { |k| Thread.new { (1..2000).sum { |i| i * k + round } } }.map(&:value)
  read, write = IO.pipe
  child = fork { read.close; write.puts Digest::MD5.hexdigest("#{round}"); exit!(round % 100) }
  write.close
  said = read.gets; Process.wait child
  to.write said; raise 'echo' unless to.gets == said
  puts "#{round} #{numbers.resume} #{sums} #{said.chomp} #{$?.exitstatus}"
  GC.compact if round % 50 == 49 && GC.respond_to?(:compact)
end
"##;
    scripted(&[ruby.to_str().expect("path"), "program.rb"], script).survives();
}

/// A program for another processor, or the same, whose instructions are translated as it goes.
#[test]
fn a_program_in_qemu() {
    let Some(qemu) = installed(&["qemu-x86_64"], "qemu-user") else { return };
    let Some(binary) = Build::Static.of(&source("sieve.c")) else {
        return skipped("no compiler for a static program (Debian packages gcc, libc6-dev)");
    };
    let (qemu, binary) = (qemu.to_str().expect("path"), binary.to_str().expect("path"));
    let mut program = Program::new(&[qemu, binary, &tier::size(1500).to_string()]);
    program.outputs = vec!["counts"];
    program.survives();
}

fn sieve(build: Build) {
    let Some(binary) = build.of(&source("sieve.c")) else {
        return skipped(&format!("no compiler for {build:?} (Debian packages gcc, libc6-dev, musl-tools)"));
    };
    let mut program = Program::new(&[binary.to_str().expect("path"), &tier::size(4000).to_string()]);
    program.outputs = vec!["counts"];
    program.survives();
}

#[test]
fn a_dynamic_program() {
    sieve(Build::Dynamic);
}

#[test]
fn a_static_program() {
    sieve(Build::Static);
}

#[test]
fn a_musl_program() {
    sieve(Build::Musl);
}

// --- a shell script in a terminal

/// Rounds of the shell script: enough to outlive all cuts.
const ROUNDS: &str = "1500";

#[test]
fn a_shell_script_of_builtins_in_a_terminal() {
    let Some(bash) = installed(&["bash"], "bash") else { return };
    let script = source("builtins.sh");
    let patience = Duration::from_secs(60);
    let answer = |terminal: &Terminal| {
        wait_for("the question", patience, || terminal.shown().contains("what now?").then_some(()));
        terminal.type_line("nothing");
        wait_for("the end", patience, || terminal.shown().contains("\ndone").then_some(()));
    };
    let scratch = Scratch::new();
    let terminal = Terminal::new();
    let mut command = Command::new(&bash);
    command.arg(&script).arg(ROUNDS);
    let mut child = terminal.start(&command, scratch.path(), scratch.path());
    answer(&terminal);
    child.wait().expect("wait");
    terminal.shows_all(patience);
    let expected = terminal.lines();
    if undisturbed_only() {
        return;
    }

    let stillpoint = scratch.stillpoint();
    let first = Terminal::new();
    let run = stillpoint.command(&[
        "run",
        "--name",
        "shell",
        "--",
        bash.to_str().expect("path"),
        script.to_str().expect("path"),
        ROUNDS,
    ]);
    let mut child = first.start(&run, scratch.path(), scratch.path());
    wait_for("the script to run", patience, || (first.lines().len() > 3).then_some(()));
    let mut lines = Vec::new();
    let mut terminal = first;
    for life in 0..3 {
        for _ in 0..2 {
            let moment = scratch.random().below(200);
            std::thread::sleep(Duration::from_millis(20 + moment));
            stillpoint.checkpoint("shell", "shell", &[]);
        }
        let moment = scratch.random().below(200);
        std::thread::sleep(Duration::from_millis(moment));
        stillpoint.checkpoint("shell", "shell", &["--kill"]);
        child.wait().expect("wait");
        terminal.shows_all(patience);
        lines.extend(terminal.lines());
        terminal = Terminal::new();
        let restore = stillpoint.command(&["restore", "shell"]);
        child = terminal.start(&restore, scratch.path(), scratch.path());
        let before = lines.len();
        wait_for(&format!("life {life} to go on"), patience, || {
            (terminal.lines().len() > 1 || terminal.shown().contains("what now")).then_some(before)
        });
    }
    answer(&terminal);
    let status = child.wait().expect("wait");
    terminal.shows_all(patience);
    lines.extend(terminal.lines());
    right_eq!(lines, expected);
    right!(status.success(), "{status}");
}

// --- redis

struct Redis {
    cli: PathBuf,
    port: u16,
}

impl Redis {
    /// Sends commands, one a line; gives the answers.
    fn ask(&self, commands: &str) -> Vec<String> {
        let mut child = Command::new(&self.cli)
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-cli");
        let mut input = child.stdin.take().expect("pipe");
        let commands = commands.to_owned();
        let writer = std::thread::spawn(move || input.write_all(commands.as_bytes()));
        let output = child.wait_with_output().expect("redis-cli");
        let _ = writer.join();
        String::from_utf8_lossy(&output.stdout).lines().filter(|l| !l.is_empty()).map(str::to_owned).collect()
    }

    fn answers(&self) -> bool {
        self.ask("PING\n").first().is_some_and(|a| a == "PONG")
    }

    fn insert(&self, keys: std::ops::Range<u64>) {
        let commands: String = keys.clone().map(|k| format!("SET key:{k} {}\n", value(k))).collect();
        let answers = self.ask(&commands);
        right_eq!(answers.iter().filter(|a| *a == "OK").count() as u64, keys.end - keys.start);
    }

    /// Every key up to `n` is there, and none else.
    #[track_caller]
    fn check(&self, n: u64, when: &str) {
        right_eq!(self.ask("DBSIZE\n"), [n.to_string()], "{when}");
        let answers = self.ask(&(0..n).map(|k| format!("GET key:{k}\n")).collect::<String>());
        right_eq!(answers.len() as u64, n, "{when}");
        for (k, answer) in answers.iter().enumerate() {
            right_eq!(*answer, value(k as u64), "{when}: key {k}");
        }
    }

    /// Waits until the server has noticed that its clients are gone.
    fn alone(&self, pid: u32) {
        wait_for("the server to be without clients", Duration::from_secs(60), || {
            let tcp = fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
            let here = format!("0100007F:{:04X}", self.port);
            let connected = tcp.lines().any(|l| {
                let mut fields = l.split_whitespace().skip(1);
                let (local, _, state) = (fields.next(), fields.next(), fields.next());
                local == Some(here.as_str()) && !matches!(state, Some("0A" | "06"))
            });
            (!connected).then_some(())
        });
    }
}

fn value(key: u64) -> String {
    format!("{:x}", stillpoint_tests::Rng::new(key).next_u64())
}

#[test]
fn redis_with_its_log_on() {
    let Some(server) = installed(&["redis-server"], "redis-server") else { return };
    let Some(cli) = installed(&["redis-cli"], "redis-tools") else { return };
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let directory = scratch.directory("redis");
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
    let redis = Redis { cli, port };
    let start = || {
        let out = fs::File::options().create(true).append(true).open(directory.join("out")).expect("out");
        let mut command = alone(&server);
        command.args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--unixsocket",
            "socket",
            "--save",
            "",
        ]);
        command.args([
            "--appendonly",
            "yes",
            "--appendfsync",
            "everysec",
            "--auto-aof-rewrite-percentage",
            "0",
        ]);
        command.current_dir(&directory).env(MARK, scratch.path());
        command.stdin(Stdio::null()).stdout(out.try_clone().expect("out")).stderr(out);
        let child = command.spawn().expect("redis-server");
        wait_for("redis to answer", Duration::from_secs(60), || redis.answers().then_some(()));
        child
    };
    let mut child = start();
    let pid = child.id();
    let mut keys = 0;
    let mut more = |n: u64| {
        redis.insert(keys..keys + n);
        keys += n;
        keys
    };
    let mut n = more(800);
    if !undisturbed_only() {
        for life in 0..3 {
            // Goes on: clients come and go between checkpoints.
            for _ in 0..2 {
                redis.alone(pid);
                let moment = scratch.random().below(120);
                std::thread::sleep(Duration::from_millis(moment));
                stillpoint.checkpoint(pid, "redis", &[]);
                redis.check(n, "after a checkpoint");
                n = more(200);
            }
            redis.alone(pid);
            if life == 1 {
                // What came after the checkpoint is lost with the crash, in memory and in the log alike.
                let checkpoint = stillpoint.checkpoint(pid, "redis", &[]);
                redis.insert(1_000_000..1_000_100);
                std::thread::sleep(Duration::from_millis(100));
                kernel::kill(pid, kernel::SIGKILL);
                kernel::wait_gone(pid, Duration::from_secs(60));
                assert_eq!(stillpoint.restore_at_once(&checkpoint.name(), &["--eager-below", "0"]), pid);
            } else {
                stillpoint.checkpoint(pid, "redis", &["--kill"]);
                child.wait().expect("wait");
                assert_eq!(stillpoint.restore_at_once("redis", &["--eager-below", "0"]), pid);
            }
            redis.check(n, &format!("restored in life {life}"));
            n = more(300);
            redis.check(n, "and written on");
        }
    }
    redis.ask("SHUTDOWN NOSAVE\n");
    kernel::wait_gone(pid, Duration::from_secs(60));
    let _ = child.wait();
    // The log on disk is whole: a fresh server reads the same from it.
    let mut fresh = start();
    redis.check(n, "read back from the log");
    redis.ask("SHUTDOWN NOSAVE\n");
    fresh.wait().expect("wait");
}
