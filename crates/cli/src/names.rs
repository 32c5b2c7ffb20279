//! Names of jobs and checkpoints.

use crate::args::CheckpointName;

/// Longest name that is made from other text; leaves room for a number behind it.
const LONGEST: usize = 100;

/// Checks the name of a job that a user typed.
pub fn parse_job(name: &str) -> Result<String, String> {
    if !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit()) {
        return Err("a number alone means a process id; give the job a name with a letter in it".into());
    }
    stillpoint_store::check_name(name).map_err(|e| e.to_string())?;
    Ok(name.to_string())
}

/// Reads `JOB` or `JOB@ID`.
pub fn parse_checkpoint(text: &str) -> Result<CheckpointName, String> {
    let Some((job, id)) = text.split_once('@') else {
        return Ok(CheckpointName { job: parse_job(text)?, id: None });
    };
    let id = id.parse().ok().filter(|&id| id > 0);
    let id =
        id.ok_or("behind '@' stands the number of a checkpoint, from 1 (stillpoint ls JOB lists them)")?;
    Ok(CheckpointName { job: parse_job(job)?, id: Some(id) })
}

/// Makes a name of a job from any text: a file name, the name of a program.
pub fn job_from(text: &str) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() || "._-+".contains(c) { c } else { '_' };
    let name: String = text.chars().map(fits).collect();
    let name = name.trim_start_matches(['.', '-']);
    let name = name.get(..LONGEST).unwrap_or(name); // it is ASCII by now
    if parse_job(name).is_ok() {
        name.to_string()
    } else {
        format!("job-{name}").trim_end_matches('-').into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_jobs() {
        for good in ["web", "a.out", "x86_64-linux", "g++", "7zip", "_"] {
            assert_eq!(parse_job(good).as_deref(), Ok(good));
        }
        for bad in ["", "42", ".hidden", "-x", "a/b", "a b", "a@1", "a\n", &"x".repeat(300)] {
            assert!(parse_job(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_of_checkpoints() {
        let name = |job: &str, id| Ok(CheckpointName { job: job.into(), id });
        assert_eq!(parse_checkpoint("web"), name("web", None));
        assert_eq!(parse_checkpoint("web@3"), name("web", Some(3)));
        for bad in ["web@", "web@0", "web@-1", "web@x", "@3", "web@3@4", "12@3", "web@99999999999999999999"] {
            assert!(parse_checkpoint(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn any_text_becomes_a_name() {
        assert_eq!(job_from("python3"), "python3");
        assert_eq!(job_from("tmux: server"), "tmux__server");
        assert_eq!(job_from("../x"), "_x");
        assert_eq!(job_from("123"), "job-123");
        assert_eq!(job_from(""), "job");
        assert_eq!(job_from("-"), "job");
        for text in ["(sd-pam)", "ä", "--", "a@b", &"y".repeat(300)] {
            assert!(parse_job(&job_from(text)).is_ok(), "{text}");
        }
    }
}
