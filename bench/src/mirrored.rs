//! Builds the programs of `bench/mirror`, with barriers and without. The compiler pass needs clang and LLVM's headers.

use crate::bench::Bench;
use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What it takes to build a mirrored program.
pub struct Builder {
    place: PathBuf,
    plugin: PathBuf,
    library: PathBuf,
    root: PathBuf,
    packages: String,
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// What a program printed: values by key, in order.
pub type Said = HashMap<String, Vec<String>>;

/// Runs a program that prints lines of key and value.
pub fn said(command: &mut Command) -> Result<Said> {
    let mut all = Said::new();
    for line in output(command)?.lines() {
        if let Some((key, value)) = line.split_once(' ') {
            all.entry(key.to_owned()).or_default().push(value.to_owned());
        }
    }
    Ok(all)
}

/// The numbers that a program printed for a key.
pub fn numbers(said: &Said, key: &str) -> Result<Vec<f64>> {
    let values = said.get(key).with_context(|| format!("no {key} was printed"))?;
    values.iter().map(|v| v.parse().with_context(|| v.clone())).collect()
}

impl Builder {
    /// Builds the pass; an error says what is missing.
    pub fn new(bench: &Bench, name: &str) -> Result<Self> {
        let place = bench.plan.place(name)?;
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        output(Command::new("sh").arg(root.join("crates/mirror/pass/build.sh")).arg(&place))
            .context("the compiler pass (packages clang, llvm-dev)")?;
        let library = std::env::current_exe()?.with_file_name("libstillpoint_mirror.a");
        if !library.exists() {
            bail!("{} is not built", library.display());
        }
        let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
        let mut metadata = Command::new(cargo);
        metadata.args(["metadata", "--format-version", "1"]).current_dir(&root);
        let packages = output(&mut metadata)?;
        let plugin = place.join("stillpoint-mirror-pass.so");
        Ok(Builder { place, plugin, library, root, packages })
    }

    /// A file for checkpoints, beside the programs.
    pub fn file(&self) -> PathBuf {
        self.place.join("backing")
    }

    /// Where cargo has put a crate that holds C sources.
    pub fn sources(&self, package: &str, folder: &str) -> Result<PathBuf> {
        let marker = "\"manifest_path\":\"";
        let paths = self.packages.split(marker).skip(1).filter_map(|rest| rest.split('"').next());
        let wanted = format!("/{package}-");
        let manifest = paths.map(Path::new).find(|p| p.to_string_lossy().contains(&wanted));
        let directory = manifest.and_then(Path::parent).with_context(|| format!("no package {package}"))?;
        Ok(directory.join(folder))
    }

    /// Builds a program of `bench/mirror`: plainly, or with barriers and these options of `mirror-cc`.
    pub fn build(
        &self,
        name: &str,
        mirrored: Option<&[&str]>,
        folder: Option<&Path>,
        files: &[PathBuf],
        more: &[&str],
    ) -> Result<PathBuf> {
        let program =
            self.place.join(format!("{name}.{}", if mirrored.is_some() { "mirrored" } else { "plain" }));
        let mut command = match mirrored {
            None => Command::new("clang"),
            Some(options) => {
                let mut command = Command::new(self.root.join("crates/mirror/pass/mirror-cc"));
                command.env("MIRROR_PASS", &self.plugin).env("MIRROR_LIBRARY", &self.library);
                command.args(options);
                command
            }
        };
        command.args(["-O2", "-w"]).args(more).arg("-o").arg(&program);
        command.arg("-I").arg(self.root.join("crates/mirror/include"));
        if let Some(folder) = folder {
            command.arg("-I").arg(folder);
        }
        command.arg(self.root.join("bench/mirror").join(format!("{name}.c"))).args(files);
        output(command.args(["-lm", "-lpthread", "-ldl"]))?;
        Ok(program)
    }
}
