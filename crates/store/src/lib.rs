//! Where checkpoints live: segments, manifests, commit, verify, prune.
