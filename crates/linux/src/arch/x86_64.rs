//! x86-64: registers, signal frames, gadgets, the program loop.

use crate::RemoteAddr;

/// General registers: the kernel's `user_regs_struct` (`NT_PRSTATUS`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the processor's own names
pub struct Regs {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub eflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

const _: () = assert!(size_of::<Regs>() == 27 * 8);

/// Entries of the global descriptor table that are a thread's own (`set_thread_area(2)`).
const OWN_SEGMENTS: std::ops::RangeInclusive<u64> = 12..=14;

impl Regs {
    /// Whether it has a segment loaded that it has described to the kernel (`set_thread_area(2)`, which programs with 32-bit parts call).
    pub fn has_own_segment(&self) -> bool {
        const IS_LOCAL: u64 = 4;
        [self.ds, self.es, self.fs, self.gs]
            .iter()
            .any(|selector| selector & IS_LOCAL == 0 && OWN_SEGMENTS.contains(&(selector >> 3)))
    }
}

/// `orig_rax` of a thread that is in no system call.
pub const NO_SYSCALL: u64 = u64::MAX;
/// Code segment of 64-bit user code.
const USER_CS: u64 = 0x33;
/// Length of the `syscall` instruction.
const SYSCALL_LEN: u64 = 2;
/// Bytes below the stack pointer that leaf functions may use (System V ABI).
pub const RED_ZONE: u64 = 128;

const ERESTARTSYS: i64 = 512;
/// What a call returns inside the kernel that is to be made again once a signal has been dealt with.
pub const ERESTARTNOINTR: i64 = 513;
const ERESTARTNOHAND: i64 = 514;
const ERESTART_RESTARTBLOCK: i64 = 516;

/// How the kernel meant to go on with an interrupted system call (`arch_do_signal_or_restart`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupted {
    /// The thread was not in a system call, or the call is complete: nothing to restart.
    No,
    /// The call starts again with the same arguments.
    Restart,
    /// The call goes on through `restart_syscall`, with state that only this kernel task has.
    RestartBlock,
}

impl Regs {
    /// The registers as the kernel's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.words().iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// Registers from the kernel's bytes; `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != size_of::<Self>() {
            return None;
        }
        let mut words = [0u64; 27];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().ok()?);
        }
        // SAFETY: `Regs` is repr(C) and consists of exactly 27 u64 fields (asserted above); any bits are valid.
        Some(unsafe { std::mem::transmute::<[u64; 27], Regs>(words) })
    }

    fn words(&self) -> [u64; 27] {
        // SAFETY: as in `from_bytes`.
        unsafe { std::mem::transmute::<Regs, [u64; 27]>(*self) }
    }

    /// Whether the thread runs 64-bit code.
    pub fn is_64_bit(&self) -> bool {
        self.cs == USER_CS
    }

    /// Instruction pointer.
    pub fn ip(&self) -> u64 {
        self.rip
    }

    /// Stack pointer.
    pub fn sp(&self) -> u64 {
        self.rsp
    }

    /// Where the thread's own variables are (TLS).
    pub fn thread_pointer(&self) -> u64 {
        self.fs_base
    }

    /// What becomes of the system call that the stop interrupted.
    pub fn interrupted(&self) -> Interrupted {
        if self.orig_rax == NO_SYSCALL {
            return Interrupted::No;
        }
        match -(self.rax as i64) {
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND => Interrupted::Restart,
            ERESTART_RESTARTBLOCK => Interrupted::RestartBlock,
            _ => Interrupted::No,
        }
    }

    /// The registers with which the interrupted system call, if there is one, is made again from its start.
    pub fn reissue(&self) -> Regs {
        let mut r = *self;
        if self.interrupted() != Interrupted::No {
            r.rax = r.orig_rax;
            r.rip -= SYSCALL_LEN;
        }
        r.orig_rax = NO_SYSCALL;
        r
    }

    /// The registers with which the system call the thread stands behind is made again, whatever it returned.
    pub fn repeat_call(&self) -> Regs {
        Regs { rax: self.orig_rax, rip: self.rip - SYSCALL_LEN, orig_rax: NO_SYSCALL, ..*self }
    }

    /// Registers that make a system call at `gadget` with the stack at `sp`.
    pub fn for_call(&self, gadget: RemoteAddr, sp: u64, nr: i64, args: [u64; 6]) -> Regs {
        Regs {
            rip: gadget.0,
            rsp: sp,
            rax: nr as u64,
            orig_rax: NO_SYSCALL,
            rdi: args[0],
            rsi: args[1],
            rdx: args[2],
            r10: args[3],
            r8: args[4],
            r9: args[5],
            eflags: self.eflags & !(TRAP_FLAG | DIRECTION_FLAG),
            ..*self
        }
    }

    /// Arguments of the system call the thread is in.
    pub fn call_args(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }
}

const TRAP_FLAG: u64 = 1 << 8;
const DIRECTION_FLAG: u64 = 1 << 10;

/// Instruction sequences, present in every C library and in the Go runtime, that lead an abandoned thread home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gadgets {
    /// `syscall; ret`.
    pub call: RemoteAddr,
    /// `mov $15, %eax; syscall`: `rt_sigreturn` from the stack pointer.
    pub sigreturn: RemoteAddr,
    /// Length of that, bytes.
    pub sigreturn_len: u64,
}

impl Gadgets {
    /// Where a thread that makes a call stands for the kernel: behind the instruction.
    pub fn call_ip(&self) -> u64 {
        self.call.0 + SYSCALL_LEN
    }

    /// The same of one on its way home.
    pub fn sigreturn_ip(&self) -> u64 {
        self.sigreturn.0 + self.sigreturn_len
    }
}

/// `syscall; ret`.
pub const CALL_GADGET: &[u8] = b"\x0f\x05\xc3";
/// The two encodings of `mov $15, %rax/%eax; syscall`.
pub const SIGRETURN_GADGETS: [&[u8]; 2] =
    [b"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05", b"\xb8\x0f\x00\x00\x00\x0f\x05"];

/// Offset of the first byte behind `pretcode` and `ucontext`: the frame without its extended state.
const UCONTEXT_LEN: usize = 304;
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
/// Offset in the FXSAVE area of the bytes that software may use: `struct _fpx_sw_bytes`.
const SW_BYTES: usize = 464;
/// `UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS`.
const UC_FLAGS: u64 = 7;
/// Flags of `uc_stack` that no kernel accepts: `rt_sigreturn` ignores the error and leaves the alternate stack alone.
const INVALID_SS_FLAGS: u64 = 0x7fff;

/// Offset in [`home_frame`] of the register that holds the first argument of a system call (`rdi`).
pub const FRAME_FIRST_ARGUMENT: u64 = 14 * 8;

/// Bytes that [`home_frame`] needs for extended state of `xstate_len` bytes.
pub fn home_frame_len(xstate_len: usize) -> usize {
    (8 + UCONTEXT_LEN).next_multiple_of(64) + xstate_len + 4 + 64
}

/// A signal frame at `base` (64-byte aligned) that, returned through, gives a thread exactly these registers, this
/// extended state and this signal mask. Its first word is the address it returns to: `sigreturn`.
pub fn home_frame(base: u64, regs: &Regs, xstate: &[u8], mask: u64, sigreturn: RemoteAddr) -> Vec<u8> {
    debug_assert_eq!(base % 64, 0);
    let fp_offset = (8 + UCONTEXT_LEN).next_multiple_of(64);
    let r = regs;
    let segments = (r.cs & 0xffff) | (r.ss & 0xffff) << 48;
    let mut words = vec![sigreturn.0, UC_FLAGS, 0, 0, INVALID_SS_FLAGS, 0];
    words.extend([r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx]);
    words.extend([r.rdx, r.rax, r.rcx, r.rsp, r.rip, r.eflags, segments]);
    // err, trapno, oldmask, cr2, fpstate, reserved1[8], sigmask
    words.extend([0, 0, mask, 0, base + fp_offset as u64]);
    words.extend([0; 8]);
    words.push(mask);
    debug_assert_eq!(words.len() * 8, 8 + UCONTEXT_LEN);
    let mut frame: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    frame.resize(fp_offset, 0);
    let xstate = &xstate[..used_xstate_len(xstate)];
    frame.extend_from_slice(xstate);
    let fp = &mut frame[fp_offset..];
    // `struct _fpx_sw_bytes`: magic1, extended_size, xfeatures, xstate_size. The kernel's ptrace format keeps XCR0,
    // the features that may follow, in the same place.
    let features: [u8; 8] = fp[SW_BYTES..SW_BYTES + 8].try_into().unwrap_or_default();
    let len = xstate.len() as u32;
    fp[SW_BYTES..SW_BYTES + 4].copy_from_slice(&FP_XSTATE_MAGIC1.to_le_bytes());
    fp[SW_BYTES + 4..SW_BYTES + 8].copy_from_slice(&(len + 4).to_le_bytes());
    fp[SW_BYTES + 8..SW_BYTES + 16].copy_from_slice(&features);
    fp[SW_BYTES + 16..SW_BYTES + 20].copy_from_slice(&len.to_le_bytes());
    frame.extend_from_slice(&FP_XSTATE_MAGIC2.to_le_bytes());
    frame
}

/// How many bytes of extended state (ptrace's XSAVE format) are in use: to the end of the last component that is not as in the
/// beginning (`XSTATE_BV`).
///
/// ptrace tells all that the processor has, with tiles (AMX) some 11,000 bytes. A frame with more than what is reserved for the thread is
/// taken for one without a header (`check_xstate_in_sigframe` in arch/x86/kernel/fpu/signal.c), and all but its SSE registers are lost.
fn used_xstate_len(xstate: &[u8]) -> usize {
    const HEADER_END: usize = 576;
    let used = xstate.get(512..520).map_or(0, |b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
    let ends = (2..63).filter(|feature| used >> feature & 1 == 1).map(|feature| {
        // SAFETY: whoever has extended state in this format has leaf 0xd, which tells size and offset of each component.
        #[allow(unused_unsafe)]
        let component = unsafe { std::arch::x86_64::__cpuid_count(0xd, feature) };
        (component.eax + component.ebx) as usize
    });
    ends.fold(HEADER_END, usize::max).min(xstate.len())
}

/// XCR0: the extended-state features whose registers `xstate` (ptrace's XSAVE format) can hold.
pub fn xstate_features(xstate: &[u8]) -> u64 {
    match xstate.get(SW_BYTES..SW_BYTES + 8) {
        Some(b) => u64::from_le_bytes(b.try_into().unwrap_or_default()),
        None => 0,
    }
}

// The program loop. rbx: next entry, rbp: end of the table, rsp: unused. An entry is nine words:
// nr, six arguments, flags, result. Flag bit i: argument i is the address of the value; bit 8: go on after an error.
// It ends with a trap: rbx is then the end of the table, or the entry that failed.
std::arch::global_asm!(
    ".pushsection .text",
    ".globl stillpoint_program_loop",
    ".globl stillpoint_program_loop_end",
    ".globl stillpoint_trapped",
    ".globl stillpoint_step",
    ".globl stillpoint_tiles",
    "stillpoint_program_loop:",
    "   cmp rbx, rbp",
    "   jae 9f",
    "   mov r12, [rbx + 56]",
    "   mov rdi, [rbx + 8]",
    "   test r12d, 1",
    "   jz 2f",
    "   mov rdi, [rdi]",
    "2: mov rsi, [rbx + 16]",
    "   test r12d, 2",
    "   jz 2f",
    "   mov rsi, [rsi]",
    "2: mov rdx, [rbx + 24]",
    "   test r12d, 4",
    "   jz 2f",
    "   mov rdx, [rdx]",
    "2: mov r10, [rbx + 32]",
    "   test r12d, 8",
    "   jz 2f",
    "   mov r10, [r10]",
    "2: mov r8, [rbx + 40]",
    "   test r12d, 16",
    "   jz 2f",
    "   mov r8, [r8]",
    "2: mov r9, [rbx + 48]",
    "   test r12d, 32",
    "   jz 2f",
    "   mov r9, [r9]",
    "2: mov rax, [rbx]",
    "   syscall",
    "   mov [rbx + 64], rax",
    "   cmp rax, -4095",
    "   jb 2f",
    "   test r12d, 256",
    "   jz 9f",
    "2: add rbx, 72",
    "   jmp stillpoint_program_loop",
    "9: int3",
    "stillpoint_trapped:",
    "   jmp 9b",
    // A call for the controller to step through: at the start of this, `syscall`, then back to the trap.
    "stillpoint_step:",
    "   syscall",
    "   jmp 9b",
    // The first use of a tile makes the kernel find room for all of them in a thread's extended state. (To configure and to release
    // them is no use.)
    "stillpoint_tiles:",
    "   ldtilecfg [rip + stillpoint_one_tile]",
    "   tilezero tmm0",
    "   tilerelease",
    "   jmp 9b",
    // Palette 1; tile 0 of 16 rows of 64 bytes.
    ".balign 64",
    "stillpoint_one_tile:",
    ".byte 1",
    ".zero 15",
    ".byte 64",
    ".zero 31",
    ".byte 16",
    ".zero 15",
    "stillpoint_program_loop_end:",
    ".popsection",
);

// The batch loop, which a lent thread runs. rbx: next entry, rbp: end of the table, rsp: the frame home; r8 and r9 are
// zero. An entry is six words: nr (overwritten by the result), the address of the first argument, three more
// arguments, and room for the first one. It ends by returning home.
std::arch::global_asm!(
    ".pushsection .text",
    ".globl stillpoint_batch_loop",
    ".globl stillpoint_batch_called",
    ".globl stillpoint_batch_end",
    "stillpoint_batch_loop:",
    "2: mov rdi, [rbx + 8]",
    "   mov rdi, [rdi]",
    "   mov rsi, [rbx + 16]",
    "   mov rdx, [rbx + 24]",
    "   mov r10, [rbx + 32]",
    "   mov rax, [rbx]",
    "   syscall",
    "stillpoint_batch_called:",
    "   mov [rbx], rax",
    "   add rbx, 48",
    "   cmp rbx, rbp",
    "   jb 2b",
    "   ret",
    "stillpoint_batch_end:",
    ".popsection",
);

unsafe extern "C" {
    static stillpoint_batch_loop: u8;
    static stillpoint_batch_called: u8;
    static stillpoint_batch_end: u8;
    static stillpoint_program_loop: u8;
    static stillpoint_program_loop_end: u8;
    static stillpoint_trapped: u8;
    static stillpoint_step: u8;
    static stillpoint_tiles: u8;
}

/// Words of an entry of the table that the program loop executes.
pub const ENTRY_WORDS: usize = 9;
/// Flag of an entry: go on after an error.
pub const ENTRY_CONTINUE: u64 = 1 << 8;
/// Length of the trap instruction that ends the loop.
pub const TRAP_LEN: u64 = 1;

/// The program loop's machine code. It is position-independent.
pub fn program_loop() -> &'static [u8] {
    // SAFETY: both symbols are defined by the assembly above, in this order, within one section; code is readable.
    unsafe {
        let start = &raw const stillpoint_program_loop;
        let end = &raw const stillpoint_program_loop_end;
        std::slice::from_raw_parts(start, end.offset_from(start) as usize)
    }
}

/// Words of an entry of the table that the batch loop executes.
pub const BATCH_WORDS: usize = 6;
/// The batch loop's machine code, and the offset in it of the instruction behind its system call. It is
/// position-independent.
pub fn batch_loop() -> (&'static [u8], u64) {
    // SAFETY: the three symbols are defined by the assembly above, in this order, within one section; code is readable.
    unsafe {
        let start = &raw const stillpoint_batch_loop;
        let end = &raw const stillpoint_batch_end;
        let called = (&raw const stillpoint_batch_called).offset_from(start);
        (std::slice::from_raw_parts(start, end.offset_from(start) as usize), called as u64)
    }
}

/// Registers that run the batch `[table, end)` with the batch loop at `code` and go home through the frame at `home`.
pub fn batch_regs(base: &Regs, code: RemoteAddr, table: u64, end: u64, home: u64) -> Regs {
    Regs { rbx: table, rbp: end, ..base.for_call(code, home, 0, [0; 6]) }
}

/// Whether a thread with this extended state may read and write memory of protection key 0, which all memory has that
/// was given no other.
pub fn reaches_plain_memory(xstate: &[u8]) -> bool {
    const PKRU: u32 = 9;
    const HEADER: usize = 512;
    let Some(present) = xstate.get(HEADER..HEADER + 8) else { return true };
    if u64::from_le_bytes(present.try_into().unwrap_or_default()) & 1 << PKRU == 0 {
        return true; // as it was at the start: everything allowed
    }
    // Leaf 13 exists where there is extended state; subleaf 9 tells offset (ebx) and size (eax) of PKRU.
    let at = std::arch::x86_64::__cpuid_count(13, PKRU).ebx as usize;
    xstate.get(at).is_none_or(|low| low & 3 == 0)
}

/// Registers that run the table `[table, end)` with the program loop at `code`.
pub fn loop_regs(base: &Regs, code: RemoteAddr, table: RemoteAddr, end: RemoteAddr, sp: u64) -> Regs {
    Regs { rip: code.0, rbx: table.0, rbp: end.0, rsp: sp, orig_rax: NO_SYSCALL, ..*base }
}

/// Where a label of the program loop is in a copy of it at `code`.
fn in_program_loop(code: RemoteAddr, label: *const u8) -> RemoteAddr {
    RemoteAddr(code.0 + (label as u64 - program_loop().as_ptr() as u64))
}

/// Where a thread is that has run into the trap at the end of a copy of the program loop at `code`.
pub fn trapped(code: RemoteAddr) -> RemoteAddr {
    in_program_loop(code, &raw const stillpoint_trapped)
}

/// The `syscall` instruction within a copy of the program loop at `code`.
pub fn step_address(code: RemoteAddr) -> RemoteAddr {
    in_program_loop(code, &raw const stillpoint_step)
}

/// Registers that use the tiles for the first time, and run into the trap of the program loop at `code`.
pub fn tiles_regs(base: &Regs, code: RemoteAddr, sp: u64) -> Regs {
    loop_regs(base, in_program_loop(code, &raw const stillpoint_tiles), RemoteAddr(0), RemoteAddr(0), sp)
}

/// Whether the tiles (AMX) have contents in this extended state. A thread that has not used them yet has no room for these.
pub fn has_tiles(xstate: &[u8]) -> bool {
    const HEADER: usize = 512;
    const TILE_DATA: u64 = 1 << 18;
    let present = xstate.get(HEADER..HEADER + 8).and_then(|bytes| bytes.try_into().ok());
    present.is_some_and(|bytes| u64::from_le_bytes(bytes) & TILE_DATA != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_and_the_trap_are_where_they_are_said_to_be() {
        let code = program_loop();
        let at = step_address(RemoteAddr(0)).0 as usize;
        assert_eq!(&code[at..at + 2], b"\x0f\x05");
        let after = trapped(RemoteAddr(0)).0 as usize;
        assert_eq!(code[after - TRAP_LEN as usize], 0xcc);
        let tiles = tiles_regs(&Regs::default(), RemoteAddr(0), 0).rip as usize;
        assert_eq!(code[tiles..tiles + 4], [0xc4, 0xe2, 0x78, 0x49]);
    }

    #[test]
    fn the_first_argument_lies_in_a_frame_where_it_is_said_to() {
        let regs = Regs { rdi: 0x1234_5678_9abc, ..Regs::default() };
        let frame = home_frame(0, &regs, &[0; 576], 0, RemoteAddr(0));
        let at = FRAME_FIRST_ARGUMENT as usize;
        assert_eq!(frame[at..at + 8], regs.rdi.to_le_bytes());
    }

    #[test]
    fn a_frame_has_no_more_extended_state_than_is_used() {
        let mut xstate = vec![0; 11008];
        let len = |xstate: &[u8]| {
            let frame = home_frame(0, &Regs::default(), xstate, 0, RemoteAddr(0));
            assert_eq!(frame[frame.len() - 4..], FP_XSTATE_MAGIC2.to_le_bytes());
            let at = (8 + UCONTEXT_LEN).next_multiple_of(64) + SW_BYTES;
            let word = |at: usize| u32::from_le_bytes(frame[at..at + 4].try_into().expect("four bytes"));
            assert_eq!(word(at + 4), word(at + 16) + 4);
            word(at + 16)
        };
        assert_eq!(len(&xstate), 576);
        xstate[512] = 0b11; // x87 and SSE
        assert_eq!(len(&xstate), 576);
        if std::arch::is_x86_feature_detected!("avx") {
            xstate[512] = 0b111;
            assert_eq!(len(&xstate), 576 + 256);
            assert_eq!(len(&xstate[..700]), 700);
        }
    }

    #[test]
    fn registers_survive_their_bytes() {
        let r = Regs { rax: 1, gs: 27, r15: 3, ..Regs::default() };
        assert_eq!(Regs::from_bytes(&r.to_bytes()), Some(r));
        assert_eq!(Regs::from_bytes(&[0; 10]), None);
    }

    #[test]
    fn an_interrupted_call_is_made_again() {
        let r = Regs { orig_rax: 35, rax: (-516i64) as u64, rip: 100, ..Regs::default() };
        assert_eq!(r.interrupted(), Interrupted::RestartBlock);
        let again = r.reissue();
        assert_eq!((again.rax, again.rip, again.orig_rax), (35, 98, NO_SYSCALL));
        let done = Regs { orig_rax: 0, rax: 5, rip: 100, ..Regs::default() };
        assert_eq!((done.reissue().rax, done.reissue().rip), (5, 100));
    }
}
