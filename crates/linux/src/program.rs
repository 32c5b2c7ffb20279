//! A program of system calls, to be run in another process in one go.
//!
//! Later calls may use results of earlier ones and data that travels with the program:
//!
//! ```
//! use stillpoint_linux::program::Program;
//! let mut p = Program::new();
//! let path = p.data(b"/etc/hostname\0");
//! let fd = p.call("open /etc/hostname", libc::SYS_openat, [(libc::AT_FDCWD as u64).into(), path, 0u64.into()]);
//! p.call("dup3", libc::SYS_dup3, [fd.into(), 7u64.into(), 0u64.into()]);
//! p.call("close", libc::SYS_close, [fd.into()]);
//! ```

/// One argument of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A plain value.
    Value(u64),
    /// The address, in the target, of the byte at this offset of the program's data.
    Data(u32),
    /// The result of an earlier call.
    Result(Step),
}

impl From<u64> for Arg {
    fn from(v: u64) -> Self {
        Arg::Value(v)
    }
}

impl From<Step> for Arg {
    fn from(s: Step) -> Self {
        Arg::Result(s)
    }
}

/// A call of a program, by its place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step(pub u32);

/// What a program does when a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// Stop there; running the program returns the error.
    Stop,
    /// Go on; the (negative) result is among the results.
    Continue,
}

/// A system call of a program.
#[derive(Clone, Debug)]
pub struct Call {
    /// What it does and to what, for error messages.
    pub what: String,
    /// System call number.
    pub nr: i64,
    /// Arguments.
    pub args: [Arg; 6],
    /// What happens if it fails.
    pub on_error: OnError,
}

/// A program of system calls with the data they point to.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub(crate) calls: Vec<Call>,
    pub(crate) data: Vec<u8>,
    /// Words of the data (offset) that hold the address of other data (offset).
    links: Vec<(u32, u32)>,
}

impl Program {
    /// An empty program.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds data (16-byte aligned) and returns its address as an argument. The target may write there: its bytes
    /// after the run are in [`Outcome::data`].
    pub fn data(&mut self, bytes: &[u8]) -> Arg {
        self.data.resize(self.data.len().next_multiple_of(16), 0);
        let at = self.data.len() as u32;
        self.data.extend_from_slice(bytes);
        Arg::Data(at)
    }

    /// Adds `len` zero bytes for a result; see [`Program::data`].
    pub fn room(&mut self, len: usize) -> Arg {
        self.data(&vec![0; len])
    }

    /// Makes the word at `offset` bytes behind `at` hold the address of `to`; both are data of this program. For
    /// structures that point to others.
    pub fn link(&mut self, at: Arg, offset: u32, to: Arg) {
        if let (Arg::Data(at), Arg::Data(to)) = (at, to) {
            self.links.push((at + offset, to));
        }
    }

    /// The data as it is to be placed at this address.
    pub(crate) fn placed(&self, address: u64) -> Vec<u8> {
        let mut data = self.data.clone();
        for &(at, to) in &self.links {
            let word = (address + u64::from(to)).to_le_bytes();
            data[at as usize..at as usize + 8].copy_from_slice(&word);
        }
        data
    }

    /// Adds a path or other string with its terminating zero.
    pub fn string(&mut self, bytes: &[u8]) -> Arg {
        let mut v = bytes.to_vec();
        v.push(0);
        self.data(&v)
    }

    /// Adds a call that must succeed. Missing arguments are zero.
    pub fn call<const N: usize>(&mut self, what: impl Into<String>, nr: i64, args: [Arg; N]) -> Step {
        self.push(what.into(), nr, &args, OnError::Stop)
    }

    /// Adds a call that may fail.
    pub fn attempt<const N: usize>(&mut self, what: impl Into<String>, nr: i64, args: [Arg; N]) -> Step {
        self.push(what.into(), nr, &args, OnError::Continue)
    }

    /// Adds the calls of another program behind those that are there.
    pub fn append(&mut self, other: Program) {
        let Arg::Data(data) = self.data(&other.data) else { return };
        let first = self.calls.len() as u32;
        self.links.extend(other.links.iter().map(|(at, to)| (data + at, data + to)));
        self.calls.extend(other.calls.into_iter().map(|mut call| {
            call.args = call.args.map(|arg| match arg {
                Arg::Value(v) => Arg::Value(v),
                Arg::Data(at) => Arg::Data(data + at),
                Arg::Result(Step(n)) => Arg::Result(Step(first + n)),
            });
            call
        }));
    }

    fn push(&mut self, what: String, nr: i64, args: &[Arg], on_error: OnError) -> Step {
        let mut all = [Arg::Value(0); 6];
        all[..args.len()].copy_from_slice(args);
        self.calls.push(Call { what, nr, args: all, on_error });
        Step(self.calls.len() as u32 - 1)
    }

    /// Its calls: what they do, number, and arguments as far as they are known before it is placed (else 0).
    pub fn calls(&self) -> impl Iterator<Item = (&str, i64, [u64; 6])> {
        let known = |a: Arg| if let Arg::Value(v) = a { v } else { 0 };
        self.calls.iter().map(move |c| (c.what.as_str(), c.nr, c.args.map(known)))
    }

    /// Number of calls.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }
}

/// What a program left behind: the results of its calls and its data as the calls changed it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Result of each call (`-errno` where a call that may fail did).
    pub results: Vec<i64>,
    /// The program's data after the run.
    pub data: Vec<u8>,
}

impl Outcome {
    /// Result of a call.
    pub fn result(&self, step: Step) -> i64 {
        self.results[step.0 as usize]
    }

    /// `len` bytes of data at an address that [`Program::data`] returned.
    ///
    /// # Panics
    /// If `arg` is not a data argument or the range leaves the data: a mistake of the caller.
    pub fn bytes(&self, arg: Arg, len: usize) -> &[u8] {
        let Arg::Data(at) = arg else { panic!("not a data argument: {arg:?}") };
        &self.data[at as usize..at as usize + len]
    }
}

/// A stopped process (or thread of it) in which programs can be run.
pub trait Run {
    /// Runs a program to its end or to its first unexpected error.
    fn run(&mut self, program: &Program) -> crate::Result<Outcome>;

    /// Process id, in our own pid namespace.
    fn pid(&self) -> u32;
}
