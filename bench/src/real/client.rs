//! A connection to a program that answers at a socket.

use anyhow::{Context, Result};
use std::io::{BufRead, BufReader, BufWriter, Error, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Between two tries to connect: the program may not have its socket yet, or not run yet.
const PERIOD: Duration = Duration::from_micros(100);

/// Whether a connection was closed by the other side.
pub fn is_hung_up(why: &anyhow::Error) -> bool {
    let gone = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof];
    why.chain().filter_map(|e| e.downcast_ref::<Error>()).any(|e| gone.contains(&e.kind()))
}

/// A connection.
pub struct Client {
    answers: BufReader<UnixStream>,
    requests: BufWriter<UnixStream>,
}

impl Client {
    /// Connects as soon as somebody answers; gives up when `check` fails.
    pub fn connect(socket: &Path, patience: Duration, check: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        let until = Instant::now() + patience;
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => {
                    let answers = BufReader::new(stream.try_clone()?);
                    return Ok(Client { answers, requests: BufWriter::new(stream) });
                }
                Err(e) if Instant::now() > until => return Err(e).context("nobody answers"),
                Err(_) => std::thread::sleep(PERIOD),
            }
            check()?;
        }
    }

    /// Sends a line, which need not have arrived before the next is read.
    pub fn send(&mut self, line: &str) -> Result<()> {
        Ok(self.requests.write_all(format!("{line}\r\n").as_bytes())?)
    }

    /// Sends a line and reads one.
    pub fn line(&mut self, line: &str) -> Result<String> {
        self.send(line)?;
        self.read()
    }

    /// Reads a line.
    pub fn read(&mut self) -> Result<String> {
        self.requests.flush()?;
        let mut answer = String::new();
        match self.answers.read_line(&mut answer)? {
            0 => Err(Error::from(ErrorKind::UnexpectedEof)).context("it has hung up"),
            _ => Ok(answer),
        }
    }
}
