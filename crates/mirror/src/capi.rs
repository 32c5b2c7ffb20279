//! The C interface (`include/stillpoint_mirror.h`), and what code compiled with barriers calls.
#![allow(unsafe_code)]

use crate::barrier;
use crate::cycle::{Completed, Switch};
use crate::error::Error;
use crate::heap;
use crate::mirror::{Mirror, Options, PageSize, Place};
use crate::{layout, threads, words};
use libc::{c_char, c_int, c_void, size_t};
use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::Duration;

/// The mirror of this process, as far as C knows.
static MIRROR: AtomicPtr<Mirror> = AtomicPtr::new(std::ptr::null_mut());

fn mirror() -> Option<&'static Mirror> {
    // SAFETY: set to a leaked box; taken back by `close` alone, whose caller promises that nobody uses it any more.
    unsafe { MIRROR.load(Ordering::Acquire).as_ref() }
}

/// As `struct stillpoint_mirror_options`.
#[repr(C)]
pub struct COptions {
    size: size_t,
    file: *const c_char,
    huge_pages: c_int,
    remap: c_int,
    lock: c_int,
    nice: c_int,
    base: *mut c_void,
    beside: *const CRange,
    beside_count: size_t,
}

/// As `struct stillpoint_mirror_range`.
#[repr(C)]
pub struct CRange {
    at: *mut c_void,
    len: size_t,
}

/// As `struct stillpoint_mirror_stats`.
#[repr(C)]
pub struct CStats {
    phase: c_int,
    complete: u64,
    failed: u64,
    bytes: u64,
    last_bytes: u64,
    last_cut_ns: u64,
    last_write_ns: u64,
    last_resync_ns: u64,
    last_cycle_ns: u64,
    overhead: f64,
    noted: u64,
    mirrored: u64,
    threads: u64,
    differing: u64,
}

/// # Safety
/// `error` has room for `len` bytes, or is null.
unsafe fn tell(error: *mut c_char, len: size_t, what: &dyn std::fmt::Display) {
    if error.is_null() || len == 0 {
        return;
    }
    let text = what.to_string();
    let some = text.len().min(len - 1);
    // SAFETY: within the room.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), error.cast(), some);
        *error.add(some) = 0;
    }
}

/// # Safety
/// The pointers of the options are valid.
unsafe fn options(c: &COptions) -> Options {
    // SAFETY: as the caller promises.
    unsafe {
        let place = match c.file.is_null() {
            true => Place::Nowhere,
            false => Place::File(PathBuf::from(OsStr::from_bytes(CStr::from_ptr(c.file).to_bytes()))),
        };
        let beside = match c.beside_count {
            0 => &[],
            n => std::slice::from_raw_parts(c.beside, n),
        };
        Options {
            size: c.size,
            place,
            page_size: if c.huge_pages != 0 { PageSize::Huge } else { PageSize::Small },
            switch: if c.remap != 0 { Switch::Remap } else { Switch::Offset },
            base: c.base as usize,
            beside: beside.iter().map(|r| (r.at as usize, r.len)).collect(),
            lock: c.lock != 0,
            nice: c.nice,
        }
    }
}

fn install(mirror: Mirror) {
    MIRROR.store(Box::into_raw(Box::new(mirror)), Ordering::Release);
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_open(
    c: *const COptions,
    error: *mut c_char,
    len: size_t,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        match Mirror::open(&options(&*c)) {
            Ok(mirror) => {
                let recovered = mirror.recovered().is_some();
                tell(error, len, &mirror.notes().join("\n"));
                install(mirror);
                c_int::from(recovered)
            }
            Err(why) => {
                tell(error, len, &why);
                -1
            }
        }
    }
}

/// # Safety
/// Nobody uses the region any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_close() {
    let mirror = MIRROR.swap(std::ptr::null_mut(), Ordering::AcqRel);
    if !mirror.is_null() {
        // SAFETY: leaked by `install`.
        drop(unsafe { Box::from_raw(mirror) });
    }
}

/// Number of the checkpoint, -1 if one is being taken, -2 if there is no mirror.
#[unsafe(no_mangle)]
pub extern "C" fn stillpoint_mirror_checkpoint() -> i64 {
    match mirror().map(Mirror::checkpoint) {
        Some(Ok(number)) => number as i64,
        Some(Err(Error::InProgress)) => -1,
        _ => -2,
    }
}

/// 0 when it is complete, -1 if it failed.
#[unsafe(no_mangle)]
pub extern "C" fn stillpoint_mirror_wait(number: i64) -> c_int {
    let Some(mirror) = mirror() else { return -1 };
    match mirror.wait(number.max(0) as u64) {
        Ok(()) if mirror.shared().last_failure().is_none() => 0,
        _ => -1,
    }
}

/// Continuous checkpoints, one each so many microseconds; 0 ends them.
#[unsafe(no_mangle)]
pub extern "C" fn stillpoint_mirror_every(microseconds: u64) {
    if let Some(mirror) = mirror() {
        mirror.every((microseconds > 0).then(|| Duration::from_micros(microseconds)));
    }
}

struct Argument(*mut c_void);
// SAFETY: handed back to the program's own function, whose business it is.
unsafe impl Send for Argument {}

/// Calls a function after each checkpoint: sequence number, bytes, why it failed (or null).
#[unsafe(no_mangle)]
pub extern "C" fn stillpoint_mirror_on_complete(
    hook: extern "C" fn(*mut c_void, u64, u64, *const c_char),
    argument: *mut c_void,
) {
    let argument = Argument(argument);
    heap::ALONE.store(false, Ordering::SeqCst);
    if let Some(mirror) = mirror() {
        mirror.on_complete(move |completed: &Completed| {
            let argument = &argument;
            let (bytes, why) = match &completed.result {
                Ok(bytes) => (*bytes, None),
                Err(why) => (0, CString::new(why.to_string()).ok()),
            };
            let text = why.as_ref().map_or(std::ptr::null(), |w| w.as_ptr());
            hook(argument.0, completed.sequence, bytes, text);
        });
    }
}

/// # Safety
/// `stats` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_stats(stats: *mut CStats) -> c_int {
    let Some(mirror) = mirror() else { return -1 };
    let s = mirror.stats();
    let c = CStats {
        phase: s.phase as c_int,
        complete: s.complete,
        failed: s.failed,
        bytes: s.bytes,
        last_bytes: s.last_bytes,
        last_cut_ns: s.last.cut,
        last_write_ns: s.last.write,
        last_resync_ns: s.last.resync,
        last_cycle_ns: s.last.cycle,
        overhead: s.overhead,
        noted: s.noted,
        mirrored: s.mirrored as u64,
        threads: s.threads as u64,
        differing: 0,
    };
    // SAFETY: as the caller promises.
    unsafe { stats.write(c) };
    0
}

/// Bytes of the shadow that differ; of meaning only while nobody stores and no checkpoint is being taken.
#[unsafe(no_mangle)]
pub extern "C" fn stillpoint_mirror_differing() -> u64 {
    mirror().map_or(0, |m| m.differing() as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn stillpoint_mirror_root() -> *mut c_void {
    mirror().map_or(std::ptr::null_mut(), |m| m.heap().root() as *mut c_void)
}

#[unsafe(no_mangle)]
pub extern "C" fn stillpoint_mirror_set_root(root: *mut c_void) {
    if let Some(mirror) = mirror() {
        mirror.heap().set_root(root as usize);
    }
}

fn no_memory() -> *mut c_void {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() = libc::ENOMEM };
    std::ptr::null_mut()
}

/// Of the region; of libc while there is none.
///
/// # Safety
/// As malloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_malloc(size: size_t) -> *mut c_void {
    match mirror() {
        Some(m) => m.heap().alloc(size, 16).map_or_else(no_memory, |a| a as *mut c_void),
        // SAFETY: as the caller promises.
        None => unsafe { libc::malloc(size) },
    }
}

/// # Safety
/// As aligned_alloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_aligned_alloc(align: size_t, size: size_t) -> *mut c_void {
    match mirror() {
        Some(m) => m.heap().alloc(size, align).map_or_else(no_memory, |a| a as *mut c_void),
        // SAFETY: as the caller promises.
        None => unsafe { libc::aligned_alloc(align, size) },
    }
}

/// # Safety
/// As posix_memalign(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_posix_memalign(
    out: *mut *mut c_void,
    align: size_t,
    size: size_t,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        if !align.is_power_of_two() || align < 8 {
            return libc::EINVAL;
        }
        let at = stillpoint_mirror_aligned_alloc(align, size.next_multiple_of(align));
        if at.is_null() {
            return libc::ENOMEM;
        }
        store(out, at);
        0
    }
}

/// # Safety
/// As calloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_calloc(count: size_t, size: size_t) -> *mut c_void {
    let Some(m) = mirror() else {
        // SAFETY: as the caller promises.
        return unsafe { libc::calloc(count, size) };
    };
    let Some(total) = count.checked_mul(size) else { return no_memory() };
    let Some(at) = m.heap().alloc(total, 16) else { return no_memory() };
    // SAFETY: a block of that size.
    unsafe { words::fill(at as *mut u8, 0, total) };
    at as *mut c_void
}

/// # Safety
/// As free(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_free(at: *mut c_void) {
    match mirror() {
        Some(m) if m.heap().holds(at as usize) => {
            if !m.heap().free(at as usize) {
                abort("free: no block of the mirror's region");
            }
        }
        // SAFETY: as the caller promises.
        _ => unsafe { libc::free(at) },
    }
}

fn abort(what: &str) -> ! {
    eprintln!("stillpoint-mirror: {what}");
    std::process::abort()
}

/// # Safety
/// As realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_realloc(at: *mut c_void, size: size_t) -> *mut c_void {
    // SAFETY: as the caller promises.
    unsafe {
        let Some(m) = mirror() else { return libc::realloc(at, size) };
        if at.is_null() {
            return stillpoint_mirror_malloc(size);
        }
        if !m.heap().holds(at as usize) {
            return libc::realloc(at, size);
        }
        let Some(room) = m.heap().usable(at as usize) else {
            abort("realloc: no block of the mirror's region")
        };
        if size == 0 {
            stillpoint_mirror_free(at);
            return std::ptr::null_mut();
        }
        if size <= room && (size > room / 2 || room <= 32) {
            return at;
        }
        let new = stillpoint_mirror_malloc(size);
        if !new.is_null() {
            words::copy(at.cast(), new.cast(), size.min(room));
            stillpoint_mirror_free(at);
        }
        new
    }
}

/// # Safety
/// As malloc_usable_size(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_usable_size(at: *mut c_void) -> size_t {
    match mirror() {
        Some(m) if m.heap().holds(at as usize) => m.heap().usable(at as usize).unwrap_or(0),
        // SAFETY: as the caller promises.
        _ => unsafe { libc::malloc_usable_size(at) },
    }
}

/// # Safety
/// As strndup(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_strndup(text: *const c_char, most: size_t) -> *mut c_char {
    // SAFETY: as the caller promises.
    unsafe {
        let len = libc::strnlen(text, most);
        let at = stillpoint_mirror_malloc(len + 1).cast::<u8>();
        if !at.is_null() {
            copy(text.cast(), at, len);
            store(at.add(len), 0);
        }
        at.cast()
    }
}

/// # Safety
/// As strdup(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_strdup(text: *const c_char) -> *mut c_char {
    // SAFETY: as the caller promises.
    unsafe { stillpoint_mirror_strndup(text, usize::MAX >> 1) }
}

static READY: AtomicBool = AtomicBool::new(false);

/// Sees to it that the tables are there; compiled programs may store before any mirror is open.
#[inline(always)]
fn ready() {
    if !READY.load(Ordering::Acquire) {
        make_ready();
    }
}

/// Apart, so that those who find them there need save no registers for it.
#[cold]
#[inline(never)]
fn make_ready() {
    if let Err(why) = layout::map_tables() {
        abort(&why.to_string());
    }
    READY.store(true, Ordering::Release);
}

/// # Safety
/// As for a plain store.
#[inline(always)]
unsafe fn store<T: Copy>(at: *mut T, value: T) {
    ready();
    // SAFETY: as the caller promises.
    unsafe { barrier::store(at, value) }
}

/// # Safety
/// As memmove(3).
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    ready();
    // SAFETY: as the caller promises.
    unsafe { words::copy(from, to, len) }
}

macro_rules! stores {
    ($($name:ident $type:ty;)*) => { $(
        /// # Safety
        /// As for a plain store.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(at: *mut $type, value: $type) {
            // SAFETY: as the caller promises.
            unsafe { store(at, value) }
        }
    )* };
}
stores! {
    stillpoint_mirror_store8 u8;
    stillpoint_mirror_store16 u16;
    stillpoint_mirror_store32 u32;
    stillpoint_mirror_store64 u64;
    stillpoint_mirror_store_float f32;
    stillpoint_mirror_store_double f64;
}

/// # Safety
/// As memcpy(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_memcpy(
    to: *mut c_void,
    from: *const c_void,
    len: size_t,
) -> *mut c_void {
    // SAFETY: as the caller promises.
    unsafe { copy(from.cast(), to.cast(), len) };
    to
}

/// # Safety
/// As memmove(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_memmove(
    to: *mut c_void,
    from: *const c_void,
    len: size_t,
) -> *mut c_void {
    // SAFETY: as the caller promises.
    unsafe { copy(from.cast(), to.cast(), len) };
    to
}

/// # Safety
/// As memset(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_memset(at: *mut c_void, value: c_int, len: size_t) -> *mut c_void {
    ready();
    // SAFETY: as the caller promises.
    unsafe { words::fill(at.cast(), value as u8, len) };
    at
}

/// Bytes that uncompiled code has written.
///
/// # Safety
/// The bytes are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_written(at: *mut c_void, len: i64) {
    if len > 0 && !at.is_null() {
        ready();
        // SAFETY: as the caller promises.
        unsafe { barrier::written(at as usize, len as usize) };
    }
}

/// A string that uncompiled code has written.
///
/// # Safety
/// A string, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_written_string(at: *mut c_char) {
    if !at.is_null() {
        // SAFETY: as the caller promises.
        unsafe { stillpoint_mirror_written(at.cast(), libc::strlen(at) as i64 + 1) };
    }
}

macro_rules! atomics {
    ($type:ty, $atomic:ty, $rmw:ident, $cas:ident) => {
        /// By the number of LLVM's `AtomicRMWInst::BinOp`: 0 exchange, 1 add, 2 sub, 3 and, 4 nand, 5 or, 6 xor, 7 max,
        /// 8 min, 9 unsigned max, 10 unsigned min. Returns what was there.
        ///
        /// # Safety
        /// Aligned and valid.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $rmw(at: *mut $type, operation: c_int, value: $type) -> $type {
            ready();
            let order = Ordering::SeqCst;
            // SAFETY: as the caller promises.
            unsafe {
                barrier::atomic(at as usize, size_of::<$type>(), || {
                    let atomic = <$atomic>::from_ptr(at);
                    match operation {
                        0 => atomic.swap(value, order),
                        1 => atomic.fetch_add(value, order),
                        2 => atomic.fetch_sub(value, order),
                        3 => atomic.fetch_and(value, order),
                        4 => atomic.fetch_nand(value, order),
                        5 => atomic.fetch_or(value, order),
                        6 => atomic.fetch_xor(value, order),
                        7 => atomic.fetch_max(value, order),
                        8 => atomic.fetch_min(value, order),
                        9 => atomic.cast_unsigned().fetch_max(value.cast_unsigned(), order).cast_signed(),
                        10 => atomic.cast_unsigned().fetch_min(value.cast_unsigned(), order).cast_signed(),
                        _ => abort("an atomic operation that is not known here"),
                    }
                })
            }
        }

        /// Compare-and-exchange: what was there.
        ///
        /// # Safety
        /// Aligned and valid.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $cas(at: *mut $type, current: $type, new: $type) -> $type {
            ready();
            // SAFETY: as the caller promises.
            unsafe {
                barrier::atomic(at as usize, size_of::<$type>(), || {
                    let done = <$atomic>::from_ptr(at).compare_exchange(
                        current,
                        new,
                        Ordering::SeqCst,
                        Ordering::SeqCst,
                    );
                    done.unwrap_or_else(|was| was)
                })
            }
        }
    };
}

/// The unsigned view of a signed atomic.
trait CastUnsigned {
    type Unsigned;
    fn cast_unsigned(&self) -> &Self::Unsigned;
}
macro_rules! unsigned {
    ($($signed:ident $unsigned:ident;)*) => { $(
        impl CastUnsigned for std::sync::atomic::$signed {
            type Unsigned = std::sync::atomic::$unsigned;
            fn cast_unsigned(&self) -> &Self::Unsigned {
                // SAFETY: the same layout (std::sync::atomic).
                unsafe { &*std::ptr::from_ref(self).cast() }
            }
        }
    )* };
}
unsigned! { AtomicI8 AtomicU8; AtomicI16 AtomicU16; AtomicI32 AtomicU32; AtomicI64 AtomicU64; }

atomics!(i8, std::sync::atomic::AtomicI8, stillpoint_mirror_rmw8, stillpoint_mirror_cas8);
atomics!(i16, std::sync::atomic::AtomicI16, stillpoint_mirror_rmw16, stillpoint_mirror_cas16);
atomics!(i32, std::sync::atomic::AtomicI32, stillpoint_mirror_rmw32, stillpoint_mirror_cas32);
atomics!(i64, std::sync::atomic::AtomicI64, stillpoint_mirror_rmw64, stillpoint_mirror_cas64);

// What compiled barriers call where a page is to be noted: all registers but the result (rax) and r11 are kept (LLVM's
// `preserve_all`), so that the way that is taken a million times needs not save any.
std::arch::global_asm!(
    ".text",
    ".globl stillpoint_mirror_note",
    ".type stillpoint_mirror_note, @function",
    "stillpoint_mirror_note:",
    "push rbp",
    "mov rbp, rsp",
    "push rcx",
    "push rdx",
    "push rsi",
    "push rdi",
    "push r8",
    "push r9",
    "push r10",
    "sub rsp, 264",
    "and rsp, -16",
    "movaps [rsp], xmm0",
    "movaps [rsp+16], xmm1",
    "movaps [rsp+32], xmm2",
    "movaps [rsp+48], xmm3",
    "movaps [rsp+64], xmm4",
    "movaps [rsp+80], xmm5",
    "movaps [rsp+96], xmm6",
    "movaps [rsp+112], xmm7",
    "movaps [rsp+128], xmm8",
    "movaps [rsp+144], xmm9",
    "movaps [rsp+160], xmm10",
    "movaps [rsp+176], xmm11",
    "movaps [rsp+192], xmm12",
    "movaps [rsp+208], xmm13",
    "movaps [rsp+224], xmm14",
    "movaps [rsp+240], xmm15",
    "cld",
    "call {note}",
    "movaps xmm0, [rsp]",
    "movaps xmm1, [rsp+16]",
    "movaps xmm2, [rsp+32]",
    "movaps xmm3, [rsp+48]",
    "movaps xmm4, [rsp+64]",
    "movaps xmm5, [rsp+80]",
    "movaps xmm6, [rsp+96]",
    "movaps xmm7, [rsp+112]",
    "movaps xmm8, [rsp+128]",
    "movaps xmm9, [rsp+144]",
    "movaps xmm10, [rsp+160]",
    "movaps xmm11, [rsp+176]",
    "movaps xmm12, [rsp+192]",
    "movaps xmm13, [rsp+208]",
    "movaps xmm14, [rsp+224]",
    "movaps xmm15, [rsp+240]",
    "lea rsp, [rbp-56]",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rdi",
    "pop rsi",
    "pop rdx",
    "pop rcx",
    "pop rbp",
    "ret",
    ".size stillpoint_mirror_note, .-stillpoint_mirror_note",
    note = sym compiled_note,
);

/// # Safety
/// From a compiled section that read this offset.
unsafe extern "C" fn compiled_note(address: usize, len: usize, offset: usize) -> usize {
    // SAFETY: compiled programs map the tables before anything else.
    unsafe { barrier::note(address, len, offset) }
}

/// Once in a program with compiled barriers, before anything else of it runs. `STILLPOINT_MIRROR` in the environment names
/// the backing file of a mirror to be opened at once: for programs that do not open one themselves.
///
/// # Safety
/// The bounds of the section of mirrored globals, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_start(from: *mut c_void, to: *mut c_void) {
    static STARTED: AtomicBool = AtomicBool::new(false);
    if STARTED.swap(true, Ordering::SeqCst) {
        return;
    }
    ready();
    threads::expect_unknown_threads();
    threads::register();
    heap::ALONE.store(true, Ordering::SeqCst);
    let Some(file) = std::env::var_os("STILLPOINT_MIRROR") else { return };
    fix_addresses();
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| match text.parse() {
            Ok(number) => number,
            Err(_) => fail(&format!("{name}: `{text}` is no number")),
        })
    };
    let globals = (from as usize, to as usize - from as usize);
    let options = Options {
        size: number("STILLPOINT_MIRROR_MIB", 64) as usize * (1 << 20),
        place: Place::File(file.into()),
        beside: (globals.1 > 0).then_some(globals).into_iter().collect(),
        ..Options::default()
    };
    match Mirror::open(&options) {
        Ok(mirror) => {
            for note in mirror.notes() {
                eprintln!("stillpoint-mirror: {note}");
            }
            let every = number("STILLPOINT_MIRROR_EVERY_MS", 0);
            mirror.every((every > 0).then(|| Duration::from_millis(every)));
            install(mirror);
        }
        Err(why) => fail(&why.to_string()),
    }
}

fn fail(what: &str) -> ! {
    eprintln!("stillpoint-mirror: {what}");
    std::process::exit(1)
}

/// Pointers to functions and globals are part of what is recovered: they must be the same in the next process. Where the
/// kernel randomises addresses, the program is executed once more without that (personality(2)).
fn fix_addresses() {
    // SAFETY: no pointers.
    unsafe {
        let personality = libc::personality(0xffff_ffff);
        if personality == -1 || personality & libc::ADDR_NO_RANDOMIZE != 0 {
            return;
        }
        if libc::personality((personality | libc::ADDR_NO_RANDOMIZE) as libc::c_ulong) == -1 {
            return;
        }
    }
    let Ok(line) = std::fs::read("/proc/self/cmdline") else { return };
    let arguments: Vec<CString> = line.split(|b| *b == 0).filter_map(|a| CString::new(a).ok()).collect();
    let count = arguments.len().saturating_sub(1); // what follows the last zero
    let mut pointers: Vec<*const c_char> = arguments[..count].iter().map(|a| a.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: null-terminated arrays of strings. If it fails, the program goes on where it is.
    unsafe { libc::execv(c"/proc/self/exe".as_ptr(), pointers.as_ptr()) };
}

type Start = extern "C" fn(*mut c_void) -> *mut c_void;

extern "C" fn begin_thread(both: *mut c_void) -> *mut c_void {
    threads::register();
    // SAFETY: made below, for this thread alone.
    let both = unsafe { Box::from_raw(both.cast::<(Start, *mut c_void)>()) };
    (both.0)(both.1)
}

/// `pthread_create`, of a thread that the checkpointer knows from its beginning.
///
/// # Safety
/// As pthread_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    heap::ALONE.store(false, Ordering::SeqCst);
    let both = Box::into_raw(Box::new((start, argument)));
    // SAFETY: as the caller promises.
    unsafe {
        let result = libc::pthread_create(thread, attributes, begin_thread, both.cast());
        if result != 0 {
            drop(Box::from_raw(both));
        }
        result
    }
}

/// The program's own signal handlers, by signal.
static HANDLERS: [std::sync::atomic::AtomicUsize; 65] =
    [const { std::sync::atomic::AtomicUsize::new(0) }; 65];

/// Runs a handler of the program. It may have interrupted a compiled section, and sections of its own would say that this
/// thread is out of it.
extern "C" fn handle(signal: c_int, information: *mut libc::siginfo_t, context: *mut c_void) {
    let words = threads::words();
    let inside = words.inside.load(Ordering::Relaxed);
    let pinned = words.pinned.load(Ordering::Relaxed);
    words.pinned.store(pinned + u32::from(inside != 0), Ordering::Release);
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    let handler = HANDLERS[signal as usize].load(Ordering::Relaxed);
    // SAFETY: set below to the program's handler; one that wants the signal alone does not look at the rest.
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
        unsafe { std::mem::transmute(handler) };
    handler(signal, information, context);
    words.inside.store(inside, Ordering::Release);
    words.pinned.store(pinned, Ordering::Release);
}

/// `sigaction`.
///
/// # Safety
/// As sigaction(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        let Some(slot) = HANDLERS.get(signal.max(0) as usize) else {
            return libc::sigaction(signal, new, old);
        };
        let before = slot.load(Ordering::SeqCst);
        let mut ours = None;
        if let Some(wanted) = new.as_ref() {
            let mut action = *wanted;
            if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN {
                slot.store(action.sa_sigaction, Ordering::SeqCst);
                action.sa_sigaction = handle as *const () as usize;
            }
            ours = Some(action);
        }
        let result = libc::sigaction(signal, ours.as_ref().map_or(std::ptr::null(), std::ptr::from_ref), old);
        if let (0, Some(old)) = (result, old.as_mut())
            && old.sa_sigaction == handle as *const () as usize
        {
            old.sa_sigaction = before;
        }
        result
    }
}

/// `signal`.
///
/// # Safety
/// As signal(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stillpoint_mirror_signal(
    signal: c_int,
    handler: libc::sighandler_t,
) -> libc::sighandler_t {
    // SAFETY: plain data; as the caller promises.
    unsafe {
        let mut new: libc::sigaction = std::mem::zeroed();
        let mut old: libc::sigaction = std::mem::zeroed();
        new.sa_sigaction = handler;
        new.sa_flags = libc::SA_RESTART;
        match stillpoint_mirror_sigaction(signal, &new, &mut old) {
            0 => old.sa_sigaction,
            _ => libc::SIG_ERR,
        }
    }
}
