//! How a tree of processes can come about.

use crate::Image;

/// That a process has descendants in sessions that they cannot have inherited from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotInherited;

/// The process group that was in the foreground of the terminal outside, if it is one of the tree's own.
pub fn in_front(image: &Image) -> Option<u32> {
    let process = image.processes.iter().find(|p| p.foreground && p.own_session().is_none())?;
    process.own_group()
}

/// The session in which a process must be born, by its leader (none: that of whoever restores), so that it and all its
/// descendants come to be in theirs; `Ok(None)`: any will do. A process can only inherit a session or begin one; one that
/// begins one has been in another before, in which some of its children may have remained.
///
/// # Errors
/// [`NotInherited`]: there is no such session.
pub fn session_at_birth(image: &Image, row: usize) -> Result<Option<Option<u32>>, NotInherited> {
    let process = &image.processes[row];
    let own = process.own_session();
    let leads = own == Some(process.pid);
    let ended = process.ended().iter().filter(|e| e.session != Some(e.pid));
    let mut wanted: Vec<Option<u32>> = ended.map(|e| e.session).collect();
    for child in children(image, row) {
        wanted.extend(session_at_birth(image, child)?);
    }
    wanted.retain(|session| *session != own);
    wanted.sort_unstable();
    wanted.dedup();
    match (leads, wanted.as_slice()) {
        (false, []) => Ok(Some(own)),
        (true, []) => Ok(None),
        (true, [one]) => Ok(Some(*one)),
        _ => Err(NotInherited),
    }
}

/// Rows of a process's children that live.
pub fn children(image: &Image, row: usize) -> impl Iterator<Item = usize> {
    let is_child = move |(_, parent): &(usize, Option<u32>)| *parent == u32::try_from(row).ok();
    image.processes.iter().map(|p| p.parent).enumerate().filter(is_child).map(|(child, _)| child)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Process;

    fn image(rows: &[(u32, Option<u32>, Option<u32>)]) -> Image {
        let process = |&(pid, parent, session)| Process { pid, parent, session, ..Process::default() };
        Image { processes: rows.iter().map(process).collect(), ..Image::default() }
    }

    #[test]
    fn sessions_are_inherited_or_begun() {
        let daemon =
            image(&[(1, None, None), (2, Some(0), Some(2)), (3, Some(1), Some(2)), (4, Some(1), None)]);
        assert_eq!(session_at_birth(&daemon, 1), Ok(Some(None)), "4 was born before 2 began its session");
        assert_eq!(session_at_birth(&daemon, 3), Ok(Some(None)));
        let leader = image(&[(1, None, Some(1)), (2, Some(0), Some(2))]);
        assert_eq!(session_at_birth(&leader, 0), Ok(None));
        let strange = image(&[(1, None, None), (2, Some(0), Some(2)), (3, Some(0), Some(2))]);
        assert_eq!(session_at_birth(&strange, 0), Err(NotInherited));
    }
}
