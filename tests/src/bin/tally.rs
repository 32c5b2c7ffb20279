//! What a run of the tests came to: `tally RUN` reads the JUnit reports and notes in the folder RUN and prints what was
//! never to be, which tests were flaky, and the sum as `N passed, N failed`, its last line. It fails if the run has.
//!
//! RUN has `*.xml` (JUnit, by nextest), `wrong` (see the harness's `verdict`), `checks` (`ok NAME` or `failed NAME`, a line each),
//! and `commands` (what was asked of the command under test, and how it ended).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

/// More flaky tests than these make a run that says nothing.
const MOST_FLAKY: usize = 10;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [run] = arguments.as_slice() else {
        eprintln!("usage: tally RUN");
        return ExitCode::from(2);
    };
    let tally = match Tally::of(Path::new(run)) {
        Ok(tally) => tally,
        Err(why) => {
            println!("{run}: {why}\n0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    print!("{}", tally.told(std::env::var_os("STILLPOINT_TIER").is_some_and(|tier| tier == "soak")));
    if tally.failures() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A test that failed before it passed, or for good.
#[derive(Debug, PartialEq, Eq)]
struct Mishap {
    test: String,
    attempts: usize,
    why: String,
    seed: String,
    kept: String,
}

#[derive(Debug, Default)]
struct Tally {
    /// Runs of tests, and of them those that passed, by suite.
    suites: BTreeMap<String, (usize, usize)>,
    flaky: Vec<Mishap>,
    failed: Vec<Mishap>,
    wrong: Vec<String>,
    checks_passed: usize,
    checks_failed: Vec<String>,
    commands: BTreeMap<String, usize>,
}

impl Tally {
    fn of(run: &Path) -> Result<Self, String> {
        let mut tally = Tally::default();
        let entries = fs::read_dir(run).map_err(|e| e.to_string())?;
        let mut reports: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        reports.retain(|path| path.extension().is_some_and(|e| e == "xml"));
        reports.sort();
        for report in reports {
            let text = fs::read_to_string(&report).map_err(|e| format!("{}: {e}", report.display()))?;
            tally.add(&text).map_err(|e| format!("{}: {e}", report.display()))?;
        }
        let lines = |name: &str| {
            let text = fs::read(run.join(name)).unwrap_or_default();
            String::from_utf8_lossy(&text).lines().map(str::to_owned).collect::<Vec<_>>()
        };
        tally.wrong.extend(lines("wrong"));
        for check in lines("checks") {
            match check.split_once(' ') {
                Some(("ok", _)) => tally.checks_passed += 1,
                _ => tally.checks_failed.push(check),
            }
        }
        for command in lines("commands") {
            *tally.commands.entry(command).or_default() += 1;
        }
        Ok(tally)
    }

    /// Adds a report of nextest's.
    fn add(&mut self, report: &str) -> Result<(), String> {
        let document = roxmltree::Document::parse(report).map_err(|e| e.to_string())?;
        for case in document.descendants().filter(|node| node.has_tag_name("testcase")) {
            let suite = case.parent_element().and_then(|suite| suite.attribute("name")).unwrap_or("tests");
            if suite.starts_with("@setup-script") {
                continue;
            }
            let name = case.attribute("name").unwrap_or("test");
            let bad = |node: &roxmltree::Node<'_, '_>| {
                ["failure", "error", "rerunFailure", "rerunError", "flakyFailure", "flakyError"]
                    .iter()
                    .any(|tag| node.has_tag_name(*tag))
            };
            let attempts: Vec<_> = case.children().filter(bad).collect();
            let has_failed =
                attempts.iter().any(|node| node.has_tag_name("failure") || node.has_tag_name("error"));
            // The end-to-end tests are one program with a module for each kind.
            let kind = name.split_once("::").filter(|_| suite.ends_with("::end_to_end"));
            let counts = self.suites.entry(kind.map_or(suite, |(module, _)| module).to_owned()).or_default();
            counts.0 += 1;
            counts.1 += usize::from(!has_failed);
            let Some(first) = attempts.first() else { continue };
            // Of a test that failed for good the last attempt's output stands beside it; each of the others has its own.
            let output = |node: &roxmltree::Node<'_, '_>| {
                let is_output = |n: &roxmltree::Node<'_, '_>| {
                    n.has_tag_name("system-err") || n.has_tag_name("system-out")
                };
                node.descendants().filter(is_output).filter_map(|n| n.text()).collect::<String>()
            };
            let mut text = output(first);
            if text.is_empty() {
                text = output(&case);
            }
            let message = first.attribute("message").or(first.attribute("type")).unwrap_or("it failed");
            // A wrong restore that a test of another package has found is told by its output alone.
            let found = text.lines().filter(|line| line.starts_with("WRONG:"));
            let found: Vec<_> = found.map(|line| format!("{line} (test {name})")).collect();
            if !suite.starts_with("stillpoint-tests") {
                self.wrong.extend(found);
            }
            let after = |word: &str| text.lines().find_map(|line| line.split_once(word)).map(|found| found.1);
            let mishap = Mishap {
                test: format!("{suite} {name}"),
                attempts: attempts.len() + usize::from(!has_failed),
                why: why(&text).unwrap_or_else(|| message.lines().next().unwrap_or_default().to_owned()),
                seed: after("STILLPOINT_SEED=").and_then(|s| s.split(' ').next()).unwrap_or("-").to_owned(),
                kept: after("kept: ").unwrap_or("-").to_owned(),
            };
            if has_failed {
                self.failed.push(mishap);
            } else {
                self.flaky.push(mishap);
            }
        }
        Ok(())
    }

    /// How many things failed: a run without any is good.
    fn failures(&self) -> usize {
        let tests = self.failed.len().max(self.wrong.len());
        let too_flaky = usize::from(self.flaky.len() > MOST_FLAKY);
        let nothing_ran = usize::from(self.suites.is_empty());
        tests + self.checks_failed.len() + too_flaky.max(nothing_ran)
    }

    fn told(&self, soaks: bool) -> String {
        let mut text = String::new();
        let mut line = |words: String| text.write_str(&(words + "\n")).expect("a string takes all");
        if soaks {
            line(format!("{:48} {:>7} {:>7}", "suite", "runs", "passed"));
            for (suite, (runs, passed)) in &self.suites {
                line(format!("{suite:48} {runs:7} {passed:7}"));
            }
            line(String::new());
            line(format!("{:16} {:10} {:10} {:>8}", "command", "engine", "end", "times"));
            for (command, times) in &self.commands {
                let words: Vec<&str> = command.splitn(3, ' ').collect();
                let word = |n: usize| words.get(n).copied().unwrap_or_default();
                line(format!("{:16} {:10} {:10} {times:8}", word(0), word(1), word(2)));
            }
            line(String::new());
        }
        for (mishaps, what) in [(&self.flaky, "flaky"), (&self.failed, "failed")] {
            if !mishaps.is_empty() {
                line(format!("{} {what}:", mishaps.len()));
            }
            for Mishap { test, attempts, why, seed, kept } in mishaps {
                line(format!("  {test}: {why}"));
                line(format!("      attempts {attempts}, seed {seed}, kept {kept}"));
            }
        }
        if self.flaky.len() > MOST_FLAKY {
            line(format!("more than {MOST_FLAKY} tests were flaky: the run has failed"));
        }
        for check in &self.checks_failed {
            line(format!("check {check}"));
        }
        for wrong in &self.wrong {
            line(wrong.clone());
        }
        if self.suites.is_empty() {
            line("no test was run".to_owned());
        }
        let failures = self.failures();
        let passed: usize =
            self.suites.values().map(|(_, passed)| passed).sum::<usize>() + self.checks_passed;
        let not_passed_after_all = self.wrong.len().saturating_sub(self.failed.len());
        line(format!("{} passed, {failures} failed", passed.saturating_sub(not_passed_after_all)));
        text
    }
}

/// The first line of a panic's message.
fn why(output: &str) -> Option<String> {
    let mut lines = output.lines().skip_while(|line| !line.contains("panicked at"));
    lines.next()?;
    lines.next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::{Mishap, Tally};

    const REPORT: &str = r#"<testsuites name="nextest-run">
  <testsuite name="stillpoint-tests::end_to_end">
    <testcase name="features::good"/>
    <testcase name="features::late">
      <flakyFailure type="test failure"><system-err>
thread 'late' (7) panicked at tests/src/lib.rs:9:5:
waited 60s in vain: the target to be ready
kept: /tmp/stillpoint-late.7.0
run again: STILLPOINT_SEED=42 cargo test
</system-err></flakyFailure>
    </testcase>
    <testcase name="features::bad"><failure type="test failure"/><rerunFailure type="test timeout"/></testcase>
  </testsuite>
</testsuites>"#;

    fn of(report: &str) -> Tally {
        let mut tally = Tally::default();
        tally.add(report).expect("a report");
        tally
    }

    #[test]
    fn attempts_are_told_apart() {
        let tally = of(REPORT);
        assert_eq!(tally.suites["features"], (3, 2));
        let flaky = Mishap {
            test: "stillpoint-tests::end_to_end features::late".into(),
            attempts: 2,
            why: "waited 60s in vain: the target to be ready".into(),
            seed: "42".into(),
            kept: "/tmp/stillpoint-late.7.0".into(),
        };
        assert_eq!(tally.flaky, [flaky]);
        assert_eq!(tally.failed.len(), 1);
        assert!(tally.told(false).ends_with("2 passed, 1 failed\n"), "{}", tally.told(false));
    }

    #[test]
    fn what_is_wrong_fails_a_run_whose_tests_have_passed() {
        let mut tally = of(&REPORT.replace("failure type=\"test failure\"", "skipped"));
        tally.failed.clear();
        assert_eq!(tally.failures(), 0);
        tally.wrong.push("WRONG: a byte differs (test late)".into());
        assert_eq!(tally.failures(), 1);
        assert!(tally.told(false).contains("WRONG: a byte differs"));
    }

    #[test]
    fn too_many_flaky_ones_fail_a_run() {
        let one = REPORT.lines().skip(3).take(8).collect::<Vec<_>>().join("\n");
        let report = |n| format!("<testsuite name=\"s\">{}</testsuite>", one.repeat(n));
        assert_eq!(of(&report(10)).failures(), 0);
        assert_eq!(of(&report(11)).failures(), 1);
    }

    #[test]
    fn other_packages_tell_by_their_output() {
        let report = REPORT.replace("stillpoint-tests::", "stillpoint-restore::");
        let tally = of(&report.replace("waited 60s", "WRONG: waited 60s"));
        assert_eq!(tally.wrong, ["WRONG: waited 60s in vain: the target to be ready (test features::late)"]);
    }

    #[test]
    fn a_run_of_nothing_has_failed() {
        assert_eq!(Tally::default().failures(), 1);
    }
}
