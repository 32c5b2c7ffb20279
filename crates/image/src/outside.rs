//! What of a program leads outside: pipes of which another process has an end.

use crate::{FileKind, Image, OpenFile, Pipe};

/// `O_ACCMODE` and `O_RDONLY`, fcntl(2).
const ACCESS: u32 = 3;
const READ_ONLY: u32 = 0;

impl Pipe {
    /// Whether an end of it was outside that nobody can find again by a name.
    pub fn is_cut_off(&self) -> bool {
        self.outside.is_some() && self.fifo.is_none()
    }
}

impl Image {
    /// The open file behind a descriptor of the first process.
    pub fn root_file(&self, number: u32) -> Option<&OpenFile> {
        let table = self.tables.get(self.processes.first()?.table as usize)?;
        let descriptor = table.descriptors.iter().find(|d| d.fd == number)?;
        self.files.get(descriptor.file as usize)
    }

    /// The first process that has an end of a pipe (row of [`Image::pipes`]), by its place, and the number it has it under; none if
    /// it is in a message only.
    pub fn holder_of_pipe(&self, row: u32) -> Option<(usize, u32)> {
        let is_it = |file: u32| self.files.get(file as usize).is_some_and(|f| f.kind == FileKind::Pipe(row));
        let held = |table: u32| self.tables.get(table as usize)?.descriptors.iter().find(|d| is_it(d.file));
        let mut processes = self.processes.iter().enumerate();
        processes.find_map(|(place, process)| Some((place, held(process.table)?.fd)))
    }

    /// The pipes of which a process outside has an end, or had it: their rows, and each in words, as
    /// `descriptor 7 (a pipe to process 4712 (tee))`.
    pub fn pipes_outside(&self) -> impl Iterator<Item = (u32, String)> {
        let rows = (0..).zip(&self.pipes);
        rows.filter_map(|(row, pipe)| Some((row, self.pipe_outside(row, pipe, pipe.outside.as_deref()?))))
    }

    /// As [`Image::pipes_outside`], those that are [cut off](Pipe::is_cut_off) when the program is restored.
    pub fn pipes_cut_off(&self) -> impl Iterator<Item = (u32, String)> {
        self.pipes_outside().filter(|(row, _)| self.pipes[*row as usize].is_cut_off())
    }

    fn pipe_outside(&self, row: u32, pipe: &Pipe, who: &str) -> String {
        let name = pipe.fifo.and_then(|fifo| self.paths.get(fifo as usize)).map(|file| file.path.to_string());
        let what = name.map_or("a pipe".into(), |name| format!("FIFO {name}"));
        let of_pipe = |file: &&OpenFile| file.kind == FileKind::Pipe(row);
        let access = self.files.iter().find(of_pipe).map(|file| file.flags & ACCESS);
        let way = if access == Some(READ_ONLY) { "from" } else { "to" };
        match self.holder_of_pipe(row) {
            Some((0, number)) => format!("descriptor {number} ({what} {way} {who})"),
            Some((place, number)) => {
                let pid = self.processes[place].pid;
                format!("descriptor {number} of process {pid} ({what} {way} {who})")
            }
            None => format!("a descriptor in a message ({what} {way} {who})"),
        }
    }
}
