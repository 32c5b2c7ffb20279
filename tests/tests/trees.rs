//! Whole applications of several processes: what they compute and write must be what they write undisturbed; kills of the
//! command while it takes checkpoints of them harm none of them.

use std::fs;
use std::ops::RangeInclusive;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_tests::observe::traces_of_us;
use stillpoint_tests::programs::{Program, installed};
use stillpoint_tests::target::Running;
use stillpoint_tests::{
    Aimed, Build, Scratch, Target, engine, kernel, right, right_eq, skipped, tier, undisturbed_only, wait_for,
};

fn shell(script: &str) -> Program {
    let mut program = Program::new(&["bash", "-c", script]);
    // Its processes write to files in place: it is killed by the checkpoint itself.
    program.appends = false;
    program
}

#[test]
fn make_with_four_jobs() {
    if installed(&["make"], "make").is_none() || installed(&["gcc"], "gcc").is_none() {
        return;
    }
    let parts = tier::size(30);
    let mut program = shell("make -s -j4 && ./all");
    program.prepare = Box::new(move |directory| {
        let mut objects = String::new();
        for n in 0..parts {
            let mut source = String::from("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n");
            for f in 0..60 {
                source += &format!(
                    "int part_{n}_{f}(int x) {{ char b[64]; snprintf(b, sizeof b, \"%d\", x * {f}); \
                     for (int i = 0; i < {n} + 3; i++) x = x * 31 + b[i % strlen(b)] + i; return x; }}\n"
                );
            }
            source += &format!("int part_{n}(int x) {{ ");
            (0..60).for_each(|f| source += &format!("x ^= part_{n}_{f}(x); "));
            source += "return x; }\n";
            fs::write(directory.join(format!("part{n}.c")), source).expect("source");
            objects += &format!(" part{n}.o");
        }
        let mut main = String::from("#include <stdio.h>\n");
        (0..parts).for_each(|n| main += &format!("int part_{n}(int);\n"));
        main += "int main(void) { int x = 1;\n";
        (0..parts).for_each(|n| main += &format!("x = part_{n}(x); printf(\"%d\\n\", x);\n"));
        main += "return 0; }\n";
        fs::write(directory.join("main.c"), main).expect("source");
        let makefile = format!(
            "CFLAGS = -O2 -pipe\nall: main.o{objects}\n\tgcc -o all main.o{objects}\n%.o: %.c\n\tgcc $(CFLAGS) -c -o $@ $<\n"
        );
        fs::write(directory.join("Makefile"), makefile).expect("makefile");
    });
    program.outputs = vec!["all", "main.o", "part0.o", "part7.o", "part11.o"];
    program.survives();
}

#[test]
fn a_shell_script_of_pipelines() {
    let mut program = shell(
        r#"for n in $(seq 1 60); do
             seq 1 3000 | sort -r | awk -v n=$n '{ s += $1 * n } END { print s }' | tee -a sums | md5sum
             (echo "sub $n"; exit $((n % 7))) ; echo "status $?"
             wc -l < <(seq 1 $n)
           done
           wait"#,
    );
    program.outputs = vec!["sums"];
    program.survives();
}

#[test]
fn a_python_pool() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    let script = r#"
import hashlib, multiprocessing, sys
def work(n):
    h = hashlib.sha256(str(n).encode())
    for _ in range(60000):
        h = hashlib.sha256(h.digest())
    return n, h.hexdigest()
if __name__ == "__main__":
    lock = multiprocessing.Lock()
    total = multiprocessing.Value("q", 0)
    with multiprocessing.Pool(4) as pool:
        for n, digest in pool.imap_unordered(work, range(60)):
            with lock:
                total.value += n
            with open("digest.%d" % n, "w") as f:
                f.write(digest)
    print(total.value, sorted(open("digest.%d" % n).read() for n in range(60))[:3])
"#;
    let mut program = Program::new(&[python.to_str().expect("path"), "-c", script]);
    program.appends = false;
    program.survives();
}

/// Workers that are programs of their own, or made by one, who is asked over a socket: what they have in common they find by names,
/// and by descriptors that are sent to them.
#[track_caller]
fn python_executor(method: &str) {
    let Some(python) = installed(&["python3"], "python3") else { return };
    let script = r#"
import concurrent.futures, hashlib, multiprocessing, sys
def work(n):
    h = hashlib.sha256(str(n).encode())
    for _ in range(40000):
        h = hashlib.sha256(h.digest())
    return n, h.hexdigest()
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    for n in range(3):
        with concurrent.futures.ProcessPoolExecutor(3, mp_context=context) as pool:
            print(list(pool.map(work, range(n * 20, n * 20 + 20))), flush=True)
"#;
    let mut program = Program::new(&[python.to_str().expect("path"), "work.py", method]);
    program.prepare =
        Box::new(move |directory| fs::write(directory.join("work.py"), script).expect("script"));
    program.appends = false;
    program.survives();
}

#[test]
fn a_python_executor_of_programs() {
    python_executor("spawn");
}

#[test]
fn a_python_executor_of_a_server() {
    python_executor("forkserver");
}

#[test]
fn perl_workers() {
    let Some(perl) = installed(&["perl"], "perl") else { return };
    let script = r#"
use strict; use IO::Handle; use Digest::SHA qw(sha1_hex);
my @workers;
for my $n (0..4) {
    pipe(my $r, my $w); pipe(my $in, my $out);
    my $pid = fork();
    if (!$pid) {
        close $r; close $out; for my $o (@workers) { close $o->[1]; close $o->[2]; } $w->autoflush(1);
        while (my $line = <$in>) { chomp $line; my $d = $line; $d = sha1_hex($d) for 1..4000; print $w "$line $d\n"; }
        exit $n;
    }
    close $w; close $in; $out->autoflush(1);
    push @workers, [$pid, $r, $out];
}
for my $i (0..400) { my $w = $workers[$i % 5]; my $o = $w->[2]; print $o "job $i\n"; my $r = $w->[1]; print scalar <$r>; }
for my $w (@workers) { close $w->[2]; waitpid($w->[0], 0); print "ended with ", $? >> 8, "\n"; }
"#;
    let mut program = Program::new(&[perl.to_str().expect("path"), "-e", script]);
    program.appends = false;
    program.survives();
}

#[test]
fn xargs_in_parallel() {
    let mut program = shell(
        "seq 1 300 | xargs -P 4 -n 1 sh -c 'i=0; while [ $i -lt 400 ]; do i=$((i+1)); done; echo $0 > out.$0'; \
         cat out.* | sort -n | md5sum",
    );
    program.outputs = vec!["out.1", "out.300"];
    program.survives();
}

#[test]
fn sqlite_with_several_writers() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    let script = r#"
import os, sqlite3
db = sqlite3.connect("data.db"); db.execute("create table t (w integer, n integer, v text)"); db.commit(); db.close()
pids = []
for w in range(3):
    pid = os.fork()
    if pid == 0:
        db = sqlite3.connect("data.db", timeout=60)
        for n in range(60):
            with db:
                db.execute("begin immediate")
                for i in range(20):
                    db.execute("insert into t values (?, ?, ?)", (w, n * 20 + i, "x" * (n % 50)))
        os._exit(0)
    pids.append(pid)
for pid in pids:
    print(os.waitpid(pid, 0)[1])
db = sqlite3.connect("data.db")
print(db.execute("select w, count(*), sum(n), sum(length(v)) from t group by w order by w").fetchall())
print(db.execute("pragma integrity_check").fetchall())
"#;
    let mut program = Program::new(&[python.to_str().expect("path"), "-c", script]);
    program.appends = false;
    program.survives();
}

#[test]
fn git_repacking() {
    let Some(git) = installed(&["git"], "git") else { return };
    let mut program = shell(
        "export GIT_AUTHOR_DATE=2001-02-03T04:05:06Z GIT_COMMITTER_DATE=2001-02-03T04:05:06Z GIT_AUTHOR_NAME=a GIT_COMMITTER_NAME=a GIT_AUTHOR_EMAIL=a \
         GIT_COMMITTER_EMAIL=a GIT_CONFIG_NOSYSTEM=1 HOME=$PWD
         git init -q r && cd r && for n in $(seq 1 40); do seq $n $((n * 50)) > f$((n % 9)); git add .; git commit -qm $n; done
         git gc -q && git fsck --strict 2>&1 && git log --format=%H | md5sum && git rev-parse HEAD",
    );
    let _ = git;
    program.prepare = Box::new(|_| {});
    program.survives();
}

/// Programs in namespaces of their own, some of which last and some of which come and go.
#[test]
fn shells_in_namespaces() {
    if !kernel::can_unshare(&["-uinC"]) {
        return skipped("not permitted to make namespaces");
    }
    if installed(&["ipcmk"], "util-linux-extra").is_none() {
        return;
    }
    let mut program = shell(
        r#"unshare -uiC bash -c '
             hostname lasting; ipcmk -M 20000 -p 600 > made; ipcmk -S 3 -p 640 >> made; ipcmk -Q -p 604 >> made
             for n in $(seq 1 50); do
               echo "$n $(hostname) $(ipcs -m | grep -c 0x)$(ipcs -s | grep -c 0x)$(ipcs -q | grep -c 0x) $(grep -vc :/$ /proc/self/cgroup)"
               seq 1 2000 | sort -r | md5sum
             done' > lasting &
           unshare -n bash -c '
             for n in $(seq 1 80); do echo "$n $(grep -c : /proc/net/dev)"; seq 1 1500 | sort -r | md5sum; done' > network &
           for n in $(seq 1 40); do
             unshare -u sh -c "hostname h$n; hostname; seq 1 1000 | md5sum; hostname"
           done > passing
           wait
           cat lasting network passing | md5sum
           hostname > outside; unshare -u sh -c 'hostname inside; hostname'; [ "$(hostname)" = "$(cat outside)" ] && echo same"#,
    );
    program.outputs = vec!["lasting", "network", "passing"];
    program.survives();
}

/// Programs in pid namespaces of their own, in which others come and go, one of them within another.
#[test]
fn shells_in_pid_namespaces() {
    if !kernel::can_unshare(&["-pf"]) {
        return skipped("not permitted to make namespaces");
    }
    let mut program = shell(
        r#"unshare -pf bash -c '
             echo $$ > first
             (for n in $(seq 1 120); do seq 1 2000 | sort -r | md5sum; done > background; echo done >> background) &
             unshare -pf bash -c "echo \$\$; for n in \$(seq 1 120); do seq 1 1000 | sort -r | md5sum; done; echo \$\$" > inner &
             for n in $(seq 1 80); do echo "$n $$ $(seq 1 3000 | md5sum)"; done > lasting
             wait; echo $$ >> first' &
           for n in $(seq 1 60); do unshare -pf sh -c 'echo $$; seq 1 1000 | md5sum'; done > passing
           wait
           cat first background inner lasting passing | md5sum"#,
    );
    program.outputs = vec!["first", "background", "inner", "lasting", "passing"];
    program.survives();
}

/// The same with mounts of their own, and procfs of their own.
#[test]
fn shells_with_procfs_of_their_own() {
    if !kernel::can_unshare(&["-pf", "--mount-proc"]) {
        return skipped("not permitted to make namespaces");
    }
    let mut program = shell(
        r#"unshare -pf --mount-proc bash -c '
             echo $$ $(readlink /proc/self/ns/pid | grep -c pid) $(cat /proc/1/comm) > first
             (for n in $(seq 1 120); do seq 1 2000 | sort -r | md5sum; done > background; echo done >> background) &
             for n in $(seq 1 80); do echo "$n $$ $(seq 1 3000 | md5sum)"; done > lasting
             wait; echo $$ $(cat /proc/1/comm) >> first' &
           unshare -m bash -c 'for n in $(seq 1 120); do echo $n $(seq 1 2000 | md5sum); done' > mounted &
           wait
           cat first background lasting mounted | md5sum"#,
    );
    program.outputs = vec!["first", "background", "lasting", "mounted"];
    program.survives();
}

/// A shell with a root of its own, which keeps what it computes with in a file system in memory, beside another one that has mounted
/// something on a directory.
#[test]
fn shells_with_another_root() {
    if !kernel::can_unshare(&["-pf", "--mount-proc"]) {
        return skipped("not permitted to make namespaces");
    }
    let mut program = shell(
        r#"cat > inner <<'X'
             for n in $(seq 1 50); do
               seq $n 2000 | sort -r > $((n % 7)); ln -f $((n % 7)) newest; mkdir -p all/$((n % 5)); mv $((n % 7)) all/$((n % 5))/
               echo "$n $$ $(cat all/*/* newest | md5sum) $(find . | sort | md5sum) $(cat /proc/1/comm) $(ls /)"
             done
X
           unshare -mpf bash -c '
             mkdir -p root && mount -t tmpfs -o mode=755 root root && cd root && mkdir usr bin lib lib64 proc dev tmp old desk
             for d in usr bin lib lib64; do [ -e /$d ] && mount --bind /$d $d && mount -o remount,ro,bind $d; done
             touch dev/null && mount --bind /dev/null dev/null && mount --bind .. desk && mount -t tmpfs -o nosuid tmp tmp
             mount -t proc proc proc && pivot_root . old && cd /tmp && umount -l /old && rmdir /old
             exec bash /desk/inner > /desk/rooted' &
           mkdir -p here there; unshare -m bash -c 'mount -t tmpfs here here; mount --bind here there; cd there
             for n in $(seq 1 60); do seq $n 1500 | sort -r | md5sum >> file; echo "$n $(md5sum < ../here/file)"; done' > bound &
           wait
           ls here there; cat rooted bound | md5sum"#,
    );
    // Between pivot_root and umount it has all that was mounted before, with what is hidden there.
    program.refused_meanwhile = Some("hidden by another mount");
    program.outputs = vec!["rooted", "bound"];
    program.survives();
}

/// Shells on overlays: over directories on a disk, over such with what they change in memory, and a database that is copied up.
#[test]
fn shells_on_overlays() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if !kernel::can_unshare(&["-m"]) || !kernel::has_file_system("overlay") {
        return skipped("not permitted to make namespaces, or no overlays here");
    }
    let database = r#"
import hashlib, sqlite3
base = sqlite3.connect("base")
for n in range(150):
    with base:
        base.execute("insert into t values (?, ?)", (n, hashlib.md5(b"%d" % n).hexdigest()))
        base.execute("delete from t where n = ?", (n - 50,))
    rows = base.execute("select * from t order by n").fetchall()
    print(n, len(rows), hashlib.md5(repr(rows).encode()).hexdigest(), flush=True)
"#;
    let mut program = shell(&format!(
        r#"mkdir -p lower/sub below upper work merged memory
           seq 1 1500 > lower/numbers; echo below > lower/sub/file; echo covered > below/numbers; echo deep > below/deep
           {python} -c 'import sqlite3; sqlite3.connect("lower/base").execute("create table t (n, text)")'
           unshare -m bash -c 'mount -t overlay over -o lowerdir=lower:below,upperdir=upper,workdir=work merged; cd merged
             {python} ../database.py > ../based &
             for n in $(seq 1 50); do
               sort -r numbers > sub/$n; chmod 600 deep; seq $n 2000 | sort -r > new; mv new sub/last; rm -f sub/file
               echo "$n $(cat sub/$n sub/last numbers deep | md5sum) $(ls sub)"
             done; wait' > on_disk &
           unshare -m bash -c 'mount -t tmpfs memory memory; mkdir memory/upper memory/work
             mount -t overlay over -o lowerdir=lower:below,upperdir=memory/upper,workdir=memory/work merged; cd merged
             for n in $(seq 1 50); do
               echo $n >> numbers; sort -r numbers > sub/$((n % 7)); mv sub/$((n % 7)) $((n % 5)); rm -f sub/file; mkdir -p all/$n
               echo "$n $(cat [0-9] numbers sub/* deep | md5sum) $(find . -type d | sort | md5sum; tell=${{PIPESTATUS[*]}}; [ "$tell" = "0 0 0" ] || echo $n ended with $tell >&2)"
             done' > in_memory &
           wait; ls merged memory; cat on_disk in_memory based | md5sum"#,
        python = python.display()
    ));
    program.prepare =
        Box::new(move |directory| fs::write(directory.join("database.py"), database).expect("program"));
    program.outputs = vec!["on_disk", "in_memory", "based"];
    program.survives();
}

/// What is mounted can be unmounted at any time, also while a checkpoint is taken.
#[test]
fn nobody_keeps_a_program_from_unmounting() {
    const UNMOUNTS: &str = r#"
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 0x4000 | 1 << 18, None) == 0
os.mkdir("memory"); os.mkdir("processes")
open("ready", "w").close()
busy = 0
while not os.path.exists("end"):
    for kind, place in (b"tmpfs", b"memory"), (b"proc", b"processes"):
        assert libc.mount(kind, place, kind, 0, None) == 0
        os.stat(place)
        while libc.umount2(place, 0) != 0:
            assert ctypes.get_errno() == 16
            busy += 1
with open("busy", "w") as file: file.write(str(busy))
"#;
    if !kernel::can_unshare(&["-m"]) {
        return skipped("not permitted to make namespaces");
    }
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let (stillpoint, directory) = (scratch.stillpoint(), scratch.directory("target"));
    let mut command = stillpoint_tests::target::alone(python);
    command.args(["-c", UNMOUNTS]).current_dir(&directory);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("python");
    let is_there = |name: &str| directory.join(name).exists().then_some(());
    wait_for("the program", Duration::from_secs(60), || is_there("ready"));
    let mut taken = 0;
    for _ in 0..60 {
        // What is just being made may be gone when it is looked at.
        let output = stillpoint.run(&["checkpoint", &child.id().to_string(), "--name", "job"]);
        taken += u32::from(output.code() == 0);
    }
    fs::write(directory.join("end"), "").expect("tells");
    assert!(child.wait().expect("python").success());
    assert!(taken > 0, "there was no checkpoint of it");
    right_eq!(fs::read_to_string(directory.join("busy")).expect("busy"), "0");
}

const SANDBOX: &str = "bwrap --unshare-pid --unshare-uts --ro-bind /usr /usr --ro-bind /etc /etc --symlink usr/bin /bin --symlink usr/lib /lib \
                   --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp --bind . /desk --chdir /desk";

fn has_sandboxes() -> bool {
    if installed(&["bwrap"], "bubblewrap").is_none() {
        return false;
    }
    let may = Command::new("sh").args(["-c", &format!("{SANDBOX} true")]).output();
    let may = kernel::is_root() && may.is_ok_and(|output| output.status.success());
    if !may {
        skipped("not permitted to make a sandbox");
    }
    may
}

/// In a container as bubblewrap makes them.
#[test]
fn a_shell_in_a_sandbox() {
    if !has_sandboxes() {
        return;
    }
    let script = r#"for n in $(seq 1 50); do
          seq $n 2000 | sort -r > /tmp/$((n % 7)); echo "$n $$ $(cat /tmp/* | md5sum) $(ls / /dev | md5sum) $(cat /proc/1/comm)"
        done > sandboxed; md5sum < sandboxed"#;
    let mut program = shell(&format!("{SANDBOX} bash -c '{script}'"));
    program.outputs = vec!["sandboxed"];
    program.survives();
}

/// In the terminal that `script` makes for it in there.
#[test]
fn a_shell_in_a_terminal_in_a_sandbox() {
    if !has_sandboxes() || installed(&["script"], "bsdutils").is_none() {
        return;
    }
    let mut program = shell(&format!(
        r#"cat > inner <<'X'
             set -m
             for n in $(seq 1 40); do
               seq $n 3000 | sort -r > /tmp/sorted & wait
               echo "$n $(tty) $(stty size) $(echo /dev/pts/*) $(md5sum < /tmp/sorted)"
             done > inside
X
           {SANDBOX} script -qec "stty rows 33 cols 77; bash inner" /dev/null; md5sum < inside"#
    ));
    program.outputs = vec!["inside"];
    program.survives();
}

/// Processes in user namespaces, one of them in another one, of users who are called otherwise there, or have no name.
#[test]
fn shells_with_names_of_their_own() {
    if !kernel::can_unshare(&["-Ur"]) {
        return skipped("not permitted to make user namespaces");
    }
    let mut program = shell(
        r#"cat > inner <<'X'
             facts() { echo $(id -u) $(id -g) $(id -G) $(cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups) $(grep Cap /proc/self/status); }
             for n in $(seq 1 40); do
               echo "$n $(facts) $(seq $n 2000 | sort -r | md5sum)"; touch $1.$((n % 5)); stat -c "%u %g" $1.$((n % 5))
             done
X
           chmod 777 .; alone="setpriv --reuid 1000 --regid 1000 --clear-groups"
           unshare -Ur bash -c 'unshare -U --map-user=7 --map-group=9 bash inner n > nested & bash inner r; wait' > rooted &
           $alone unshare -Ur bash inner o > other &
           $alone --inh-caps=-all --bounding-set=-sys_admin unshare -U bash inner u > nameless &
           wait
           cat rooted nested other nameless | md5sum; stat -c "%u %g" [nrou].*"#,
    );
    program.outputs = vec!["rooted", "nested", "other", "nameless"];
    program.survives();
}

/// A shell with all kinds of namespaces, which belong to its user namespace, and a program of several threads beside it.
#[test]
fn a_shell_that_rules_its_namespaces() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if !kernel::can_unshare(&["-Urmpf", "--mount-proc"]) {
        return skipped("not permitted to make user namespaces");
    }
    let threads = r#"
import hashlib, os, threading
def work(n, found):
    digest = hashlib.sha256(b"%d" % n)
    for i in range(150000):
        digest.update(b"%d" % i)
    found[n] = digest.hexdigest()
found = {}
threads = [threading.Thread(target=work, args=(n, found)) for n in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
print(os.getpid() < 10, os.getuid(), sorted(found.items()))
"#;
    let mut program = shell(&format!(
        r#"unshare -Urmpfuin --mount-proc bash -c '
             hostname inside; mkdir -p there new; mount -t tmpfs -o size=2m mine there
             {} threads.py > threads &
             for n in $(seq 1 40); do
               seq $n 2000 | sort -r > there/$((n % 7)); chown 0:0 there/*
               echo "$n $$ $(cat there/* | md5sum) $(hostname) $(id -u) $(cat /proc/1/comm) $(stat -c %u:%g there/*)"
               mount -t tmpfs new new && touch new/$n && ls new && umount -l new; hostname inside$n
             done
             wait; umount there && ls there; umount /sys 2> /dev/null || echo kept' > ruled
           cat ruled threads | md5sum; ls there"#,
        python.display()
    ));
    program.prepare =
        Box::new(move |directory| fs::write(directory.join("threads.py"), threads).expect("program"));
    program.outputs = vec!["ruled", "threads"];
    program.survives();
}

/// A sandbox as bubblewrap makes them for somebody who is not the superuser.
#[test]
fn a_sandbox_with_users_of_its_own() {
    if installed(&["bwrap"], "bubblewrap").is_none() {
        return;
    }
    let sandbox = "bwrap --unshare-all --uid 1000 --gid 1000 --ro-bind /usr /usr --ro-bind /etc /etc --symlink usr/bin /bin --symlink usr/lib /lib \
                   --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp --bind . /desk --chdir /desk";
    let may = Command::new("sh").args(["-c", &format!("{sandbox} true")]).output();
    if !kernel::is_root() || !may.is_ok_and(|output| output.status.success()) {
        return skipped("not permitted to make a sandbox");
    }
    let script = r#"for n in $(seq 1 50); do
          seq $n 2000 | sort -r > /tmp/$((n % 7)); echo "$n $$ $(cat /tmp/* | md5sum) $(ls / /dev | md5sum) $(cat /proc/1/comm) $(id -u)"
          mount -t tmpfs none /tmp 2> /dev/null && echo escaped
        done > sandboxed; cat /proc/self/uid_map; stat -c "%u %g" sandboxed; md5sum < sandboxed"#;
    let mut program = shell(&format!("{sandbox} bash -c '{}'", script));
    program.outputs = vec!["sandboxed"];
    program.survives();
}

/// What cannot be made again in a user namespace is named, and goes on.
#[test]
fn users_that_cannot_be_made_again() {
    if !kernel::can_unshare(&["-Urpf"]) {
        return skipped("not permitted to make user namespaces");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    // Beside process 1 of a namespace there is one that has come from outside, and is not in the user namespace.
    let script =
        "unshare -Urpf sleep 1000 & until inner=$(cat /proc/$!/task/$!/children) && [ \"$inner\" ]; do sleep 0.01; done
                  nsenter -t $inner -p sleep 1000 & wait";
    let mut command = stillpoint_tests::target::alone("bash");
    command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut outer = command.spawn().expect("bash");
    let all = || {
        let children = kernel::children(outer.id());
        let inner: Vec<u32> = children.iter().flat_map(|pid| kernel::children(*pid)).collect();
        (inner.len() == 2).then_some([children, inner])
    };
    let [middle, inner] = wait_for("both", Duration::from_secs(60), all);
    let refused = |pid: u32, words: &str| {
        stillpoint.run(&["checkpoint", &pid.to_string(), "--name", "job", "--kill"]).fails(3, &[words]);
        right!(inner.iter().chain(&middle).all(|pid| kernel::alive(*pid)), "a refusal kills nothing");
    };
    refused(outer.id(), "in a pid namespace that belongs to a user namespace in which it is not");
    // Without its parent, which is in the user namespace, too.
    let first =
        inner.iter().find(|pid| kernel::status(**pid, "NSpid").is_some_and(|ids| ids.ends_with("\t1")));
    refused(*first.expect("process 1"), "which is not part of the program, is in it too");
    for pid in inner.iter().chain(&middle) {
        kernel::kill(*pid, rustix::process::Signal::KILL);
    }
    outer.wait().expect("bash");
}

/// Process 1 of a namespace as the root of what is checkpointed; with its ids free, and with them taken.
#[test]
fn process_1_of_a_namespace() {
    if !kernel::can_unshare(&["-pf"]) {
        return skipped("not permitted to make namespaces");
    }
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("pid_namespaces", "in_a_group_from_outside", Build::Dynamic).expect("cc");
    let directory = scratch.directory("target");
    let inner = target.command(&directory, scratch.path());
    let mut command = stillpoint_tests::target::alone("unshare");
    command.args(["--pid", "--fork"]).arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    let out = fs::File::options().create(true).append(true).open(directory.join("out")).expect("a file");
    command.current_dir(&directory).stdin(Stdio::null()).stdout(out.try_clone().expect("dup")).stderr(out);
    let outer = Running::new(command.spawn().expect("unshare"), &directory);
    outer.await_ready();
    let &[own] = kernel::children(outer.pid).as_slice() else { panic!("unshare has one child") };
    // Its own id and 1 within; in a namespace around these, should somebody have taken its id meanwhile.
    let has_its_ids = |pid: u32| {
        let ids = kernel::status(pid, "NSpid").unwrap_or_default();
        let ids: Vec<&str> = ids.split_whitespace().collect();
        assert_eq!(ids[ids.len() - 2..], [&own.to_string(), "1"], "process {pid}");
    };
    let mut pid = own;
    for _ in 1..=2 {
        stillpoint.checkpoint(pid, "job", &["--kill"]);
        kernel::wait_free(pid);
        pid = stillpoint.restore_detached("job", &[]);
        has_its_ids(pid);
    }
    // It runs: another one is in a namespace around its own, and so is the one after that.
    stillpoint.checkpoint(pid, "twin", &[]);
    let mut twins = Vec::new();
    for _ in 0..2 {
        let output = stillpoint.run(&["restore", "twin", "--detach", "--json", "--files", "keep"]).ok();
        let json = output.json();
        let outside = json["pid"].as_u64().expect("pid") as u32;
        assert_eq!(json["private_pid"].as_u64(), Some(own.into()), "{output}");
        has_its_ids(outside);
        stillpoint.checkpoint(outside, "twin", &[]);
        twins.push(outside);
    }
    Running::restored(pid, &directory).go();
    for pid in twins.into_iter().chain([pid]) {
        kernel::wait_gone(pid, Duration::from_secs(60));
    }
    let said = fs::read_to_string(directory.join("out")).expect("what it said");
    right_eq!(said.lines().filter(|line| *line == "ok").count(), 3, "{said}");
    right!(!said.contains("differs"), "{said}");
}

/// As many pid namespaces within each other as the kernel allows, while others take ids.
#[test]
fn as_deep_as_namespaces_can_be() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("pid_namespaces", "as_deep_as_can_be", Build::Dynamic).expect("cc");
    let mut running = target.start(&scratch.directory("target"), scratch.path());
    if let Some(why) = running.skip() {
        return skipped(&why);
    }
    stillpoint.checkpoint(running.pid, "job", &["--kill", "--engine", "stop"]);
    running.reap();
    let others = ["-c", "while kill -0 $PPID; do /bin/true; done"];
    let mut others = Command::new("sh").args(others).spawn().expect("sh");
    let pid = stillpoint.restore_detached("job", &[]);
    others.kill().and_then(|()| others.wait()).expect("kill");
    assert_eq!(pid, running.pid);
    Running::restored(pid, running.directory()).finish("after restore");
}

/// A restore of processes in namespaces is killed, at random moments, or cannot be completed: nothing of it is left.
#[test]
fn restores_into_namespaces_that_fail() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let target = Target::new("pid_namespaces", "comes_and_goes", Build::Dynamic).expect("cc");
    let mut running = target.start(&scratch.directory("target"), scratch.path());
    if let Some(why) = running.skip() {
        return skipped(&why);
    }
    let (pid, directory) = (running.pid, running.directory().to_owned());
    let children = kernel::children(pid);
    stillpoint.checkpoint(pid, "job", &["--kill"]);
    running.reap();
    let typical = stillpoint.run(&["restore", "job", "--detach", "--json"]).ok().wall;
    Running::restored(pid, &directory).kill();
    for n in 0..8 {
        scratch.sweep();
        kernel::wait_free(pid);
        let mut child = stillpoint.command(&["restore", "job"]);
        let child = child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = child.spawn().expect("restore");
        std::thread::sleep(typical.mul_f64(scratch.random().fraction()));
        kernel::kill(child.id(), kernel::SIGKILL);
        child.wait().expect("wait");
        all_or_nothing(&scratch, 7..=usize::MAX, &format!("kill {n}"));
    }
    scratch.sweep();
    kernel::wait_free(pid);
    // The id of a process in the middle of the tree is taken.
    let Some(mut blocker) = occupy(children[2]) else { return skipped("could not occupy a process id") };
    stillpoint.run(&["restore", "job", "--pid", "same", "--detach"]).fails(3, &["taken"]);
    // The command has a part in the background, which may take a moment to end.
    stillpoint_tests::wait_for("nothing to be left", Duration::from_secs(60), || {
        scratch.processes().is_empty().then_some(())
    });
    let _ = blocker.kill();
    let _ = blocker.wait();
    let pid = stillpoint.restore_detached("job", &[]);
    Running::restored(pid, &directory).finish("in the end");
}

/// Waits until nothing of a program is left after `what`, or all of it runs, which are `so_many` processes. Returns how many there are.
#[track_caller]
fn all_or_nothing(scratch: &Scratch, so_many: RangeInclusive<usize>, what: &str) -> usize {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let left = scratch.processes();
        let is_whole =
            |left: &[u32]| so_many.contains(&left.len()) && left.iter().all(|pid| kernel::is_untraced(*pid));
        if left.is_empty() {
            return 0;
        }
        if is_whole(&left) {
            // Somebody may just be about to kill them.
            std::thread::sleep(Duration::from_millis(100));
            if is_whole(&scratch.processes()) {
                return left.len();
            }
        }
        right!(Instant::now() < until, "a part of the program is left after {what}: {left:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A tree of shells, which only sleeps; its root and how many processes it has.
fn sleeping(scratch: &Scratch) -> (std::process::Child, usize) {
    const CHILDREN: usize = 5;
    let directory = scratch.directory("tree");
    let script = format!("for n in $(seq {CHILDREN}); do sleep 600 & done; touch ready; wait");
    let mut command = stillpoint_tests::target::alone("sh");
    command.args(["-c", &script]).current_dir(&directory);
    command.env(stillpoint_tests::scratch::MARK, scratch.path());
    let root = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("sh");
    wait_for("the tree", Duration::from_secs(60), || directory.join("ready").exists().then_some(()));
    (root, CHILDREN + 1)
}

/// Killed around the moment at which it lets the processes of a tree go: none of them is left, or all are.
#[test]
fn a_restore_that_is_killed_as_it_lets_go() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    let (mut root, all) = sleeping(&scratch);
    let pid = root.id();
    stillpoint.checkpoint(pid, "job", &["--kill"]);
    root.wait().expect("wait");
    let restore = |nth, what: &str| {
        // Somebody else may have one of its ids for the moment.
        for _ in 0..20 {
            kernel::wait_free(pid);
            let arguments = ["restore", "job", "--pid", "same"];
            let mut aimed = Aimed::start(&stillpoint, scratch.path(), nth, "ptrace", &arguments)?;
            let has_ended = aimed.wait_or(|| {
                let children = kernel::children(pid);
                children.len() == all - 1 && children.into_iter().chain([pid]).all(kernel::is_untraced)
            });
            let what = format!("{what} {nth}");
            let left = if has_ended { all_or_nothing(&scratch, all..=all, &what) } else { all };
            scratch.sweep();
            let shot = aimed.wait();
            if left > 0 || shot.hit {
                return Some((left, shot.calls));
            }
        }
        panic!("its ids are taken");
    };
    let Some((_, calls)) = restore(0, "nothing") else { return skipped("no C compiler") };
    // How many calls there are is not the same each time: from where all are left to where none is, and a bit further.
    let mut n = calls;
    while restore(n, "a kill at call").is_some_and(|(left, _)| left == 0) {
        n += 2;
        assert!(n < calls + 100, "at no call of {calls} all are left");
    }
    let mut none = 0;
    while none < 3 {
        n -= if tier::soaks() { 1 } else { 1 + scratch.random().below(2) };
        let left = restore(n, "a kill at call").map(|(left, _)| left);
        none = if left == Some(0) { none + 1 } else { 0 };
        assert!(n + 100 > calls, "at no call of {calls} none is left");
    }
}

/// Killed while it kills the processes of a tree: all are killed. Before, none is.
#[test]
fn a_checkpoint_that_is_killed_as_it_kills() {
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let stillpoint = scratch.stillpoint();
    for n in 1.. {
        let (mut root, all) = sleeping(&scratch);
        let arguments = ["checkpoint", &root.id().to_string(), "--name", "job", "--kill"];
        let shot = Aimed::start(&stillpoint, scratch.path(), n, "pidfd_send_signal", &arguments);
        let Some(shot) = shot.map(Aimed::wait) else { return skipped("no C compiler") };
        let left = all_or_nothing(&scratch, all..=all, &format!("kill {n}: {shot:?}"));
        scratch.sweep();
        root.wait().expect("wait");
        if !shot.hit {
            assert!(n > all as u64, "it kills {all} processes by {} calls", shot.calls);
            right_eq!(left, 0, "killed, and still there");
            break;
        }
        if left == 0 {
            // All that is left of it is the checkpoint.
            let pid = stillpoint.restore_detached("job", &[]);
            right_eq!(kernel::children(pid).len(), all - 1);
            scratch.sweep();
        }
    }
}

/// Another process that has this id.
fn occupy(pid: u32) -> Option<std::process::Child> {
    for _ in 0..100 {
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
        let mut sleep = stillpoint_tests::target::alone("sleep");
        let mut child =
            sleep.arg("600").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        if child.id() == pid {
            return Some(child);
        }
        let _ = child.kill();
        let _ = child.wait();
    }
    None
}

/// A server and its clients, in a network, a host and an IPC namespace of their own.
#[test]
fn a_server_in_a_network_of_its_own() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if !kernel::can_unshare(&["-uin"]) {
        return skipped("not permitted to make namespaces");
    }
    let script = r#"
import asyncio, fcntl, hashlib, os, socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
flags = struct.unpack("16sh14x", fcntl.ioctl(s, 0x8913, struct.pack("16sh14x", b"lo", 0)))[1]
fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))
s.close()
socket.sethostname("server")
door = socket.create_server(("127.0.0.1", 80))
other = socket.socket(socket.AF_UNIX)
other.bind("\0here")
other.listen()
pids = []
for n in range(3):
    pid = os.fork()
    if pid == 0:
        door.close(), other.close()
        s = socket.create_connection(("127.0.0.1", 80)) if n else socket.socket(socket.AF_UNIX)
        if not n:
            s.connect("\0here")
        f, digest = s.makefile("rw"), hashlib.sha256()
        for i in range(3000):
            f.write("%d %d\n" % (n, i)), f.flush()
            line = f.readline()
            for _ in range(300):
                digest.update(line.encode())
        with open("client.%d" % n, "w") as out:
            out.write(line + socket.gethostname() + digest.hexdigest())
        os._exit(0)
    pids.append(pid)
async def serve(reader, writer):
    while line := await reader.readline():
        digest = hashlib.sha256(line)
        for _ in range(500):
            digest.update(line)
        writer.write(("%s %s\n" % (socket.gethostname(), digest.hexdigest())).encode())
    writer.close()
async def main():
    await asyncio.start_server(serve, sock=door)
    await asyncio.start_unix_server(serve, sock=other)
    while pids:
        if os.waitpid(pids[0], os.WNOHANG)[0]:
            pids.pop(0)
        await asyncio.sleep(0.01)
asyncio.run(main())
print([open("client.%d" % n).read() for n in range(3)])
"#;
    let mut program = Program::new(&["unshare", "-uin", python.to_str().expect("path"), "-c", script]);
    program.appends = false;
    program.outputs = vec!["client.0", "client.1", "client.2"];
    program.survives();
}

/// The command is killed at random moments of checkpoints of a tree whose processes take turns, pass tokens and come and go:
/// all go on, and nothing is left in any of them.
fn killed_during_checkpoints(program: &'static str, scenario: &'static str) {
    if undisturbed_only() {
        return;
    }
    let kills = tier::times("STILLPOINT_KILLS", 4, 60);
    for engine in engine::in_turn().into_iter().filter(|engine| engine::offered(engine)) {
        let scratch = Scratch::new();
        let stillpoint = scratch.stillpoint();
        let target = Target::new(program, scenario, Build::Dynamic).expect("cc");
        let running = target.start(&scratch.directory("target"), scratch.path());
        let pid = running.pid.to_string();
        let arguments = ["checkpoint", &pid, "--name", "job", "--json", "--engine", engine];
        let typical = stillpoint.run(&arguments).ok().wall;
        for n in 0..kills {
            let mut command = stillpoint.command(&arguments);
            let mut child = command
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .stdin(Stdio::null())
                .spawn()
                .expect("spawn");
            let until = Instant::now() + Duration::from_secs(2);
            let frozen = || kernel::status(running.pid, "TracerPid").is_some_and(|t| t != "0");
            while n % 2 == 0 && Instant::now() < until && !frozen() {
                if child.try_wait().expect("wait").is_some() {
                    break;
                }
            }
            let most = if n % 2 == 0 { 0.2 } else { 1.1 };
            std::thread::sleep(typical.mul_f64(scratch.random().fraction() * most));
            kernel::kill(child.id(), kernel::SIGKILL);
            let _ = child.wait();
            right!(kernel::alive(running.pid), "{engine}, kill {n}: the root has ended: {}", running.said());
        }
        let ours = |pid: u32| traces_of_us(pid, true);
        let until = Instant::now() + Duration::from_secs(30);
        while Instant::now() < until && !ours(running.pid).is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        right_eq!(ours(running.pid), Vec::<String>::new(), "{engine}: left behind");
        stillpoint.verified();
        stillpoint.run(&arguments).ok();
        running.finish(&format!("{engine}: after kills"));
        scratch.nothing_is_left("in the end");
    }
}

#[test]
fn killed_while_they_take_turns() {
    killed_during_checkpoints("tree", "turns");
}

#[test]
fn killed_while_they_pass_a_token() {
    killed_during_checkpoints("tree", "token");
}

#[test]
fn killed_while_they_fork() {
    killed_during_checkpoints("tree", "forks");
}

#[test]
fn killed_while_they_spawn() {
    killed_during_checkpoints("tree", "spawns");
}

#[test]
fn killed_while_they_write_the_same_memory() {
    killed_during_checkpoints("sharers", "turns");
}

#[test]
fn killed_while_sharers_come_and_go() {
    killed_during_checkpoints("sharers", "passing");
}

/// What stands against it is told of all processes at once, and none is touched.
#[test]
fn refused_as_a_whole() {
    let Some(python) = installed(&["python3"], "python3") else { return };
    if undisturbed_only() {
        return;
    }
    let scratch = Scratch::new();
    let directory = scratch.directory("held");
    let script = r#"
import ctypes, os, time
open_one = lambda: ctypes.CDLL(None).syscall(323, os.O_CLOEXEC | 1)
for n in range(2):
    if os.fork() == 0:
        open_one(); open("ready.%d" % n, "w"); time.sleep(1000)
while not (os.path.exists("ready.0") and os.path.exists("ready.1")): time.sleep(0.01)
open("ready", "w"); time.sleep(1000)
"#;
    let mut child = Command::new(python)
        .args(["-c", script])
        .current_dir(&directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("python3");
    stillpoint_tests::wait_for("the program", Duration::from_secs(60), || {
        directory.join("ready").exists().then_some(())
    });
    let children = kernel::children(child.id());
    assert_eq!(children.len(), 2);
    let stillpoint = scratch.stillpoint();
    let output = stillpoint.run(&["checkpoint", &child.id().to_string(), "--name", "held"]);
    let output = output.fails(3, &["userfaultfd"]);
    for pid in &children {
        assert!(output.stderr.contains(&pid.to_string()), "process {pid} is not named: {output}");
        right!(kernel::alive(*pid));
        right_eq!(kernel::status(*pid, "TracerPid").as_deref(), Some("0"));
    }
    for pid in children {
        kernel::kill(pid, kernel::SIGKILL);
    }
    let _ = child.kill();
    let _ = child.wait();
}
