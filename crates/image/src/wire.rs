//! The wire format of a manifest.
