//! A command that has capabilities from its file (`setcap`) reaches itself and its copies through `/proc`, as that of root does.
//!
//! The kernel makes such a process not dumpable (capabilities(7), "Safe execution"): its files in `/proc` belong to root then, and those that
//! are for their owner only (`mem`, `pagemap`) it may not open itself. A restore fills copies of this process through them.
//!
//! To be dumpable again opens it to nobody. Whoever wants to trace it, to read its memory or to take its descriptors must have
//! every capability that it has (`cap_ptrace_access_check` in the kernel), which its user's other processes do not. A process without any
//! may be kept from being dumpable for another reason, as one whose file its user may not read: that one is left as it is.

use rustix::process::{DumpableBehavior, dumpable_behavior, set_dumpable_behavior};
use rustix::thread::capabilities;

/// Sees to it, before anything else is done.
pub fn ensure() {
    let is_hidden = dumpable_behavior().is_ok_and(|behavior| behavior != DumpableBehavior::Dumpable);
    if is_hidden && capabilities(None).is_ok_and(|sets| !sets.permitted.is_empty()) {
        // Where that fails, what cannot be opened is told by name.
        let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
    }
}
