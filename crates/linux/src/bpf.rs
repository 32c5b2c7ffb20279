//! What a seccomp filter would say to a system call: an interpreter for the classic BPF that `seccomp(2)` accepts.

/// `AUDIT_ARCH_X86_64`.
const AUDIT_ARCH: u32 = 0xc000_003e;
/// `SECCOMP_RET_ACTION_FULL`.
const ACTION: u32 = 0xffff_0000;
const RET_LOG: u32 = 0x7ffc_0000;
const RET_ALLOW: u32 = 0x7fff_0000;
/// No valid program runs longer: jumps only lead forward.
const MAX_STEPS: usize = 4096;

/// A system call as a filter sees it: `struct seccomp_data`.
#[derive(Clone, Copy, Debug)]
pub struct FilteredCall {
    /// System call number.
    pub nr: i64,
    /// Address of the instruction behind it.
    pub ip: u64,
    /// Arguments.
    pub args: [u64; 6],
}

impl FilteredCall {
    fn word(&self, offset: u32) -> Option<u32> {
        let pair = |v: u64| if offset.is_multiple_of(8) { v as u32 } else { (v >> 32) as u32 };
        match offset {
            _ if !offset.is_multiple_of(4) => None,
            0 => Some(self.nr as u32),
            4 => Some(AUDIT_ARCH),
            8 | 12 => Some(pair(self.ip)),
            _ => self.args.get((offset as usize - 16) / 8).map(|&v| pair(v)),
        }
    }
}

/// Whether a filter (an array of 8-byte `struct sock_filter`) lets a call pass. A program that cannot be understood
/// lets nothing pass.
pub fn allows(filter: &[u8], call: &FilteredCall) -> bool {
    let instructions: Vec<Instruction> = filter.chunks_exact(8).map(Instruction::decode).collect();
    matches!(run(&instructions, call).map(|v| v & ACTION), Some(RET_ALLOW | RET_LOG))
}

struct Instruction {
    code: u16,
    jt: u8,
    jf: u8,
    k: u32,
}

impl Instruction {
    fn decode(b: &[u8]) -> Self {
        let k = u32::from_le_bytes([b[4], b[5], b[6], b[7]]);
        Instruction { code: u16::from_le_bytes([b[0], b[1]]), jt: b[2], jf: b[3], k }
    }
}

/// Machine of `bpf(4)`: accumulator, index register, sixteen words.
fn run(program: &[Instruction], call: &FilteredCall) -> Option<u32> {
    let (mut a, mut x, mut memory) = (0u32, 0u32, [0u32; 16]);
    let mut pc = 0usize;
    for _ in 0..MAX_STEPS {
        let i = program.get(pc)?;
        pc += 1;
        let class = i.code & 7;
        match class {
            // BPF_LD, BPF_LDX
            0 | 1 => {
                let v = match i.code & 0xf8 {
                    0x20 if class == 0 => call.word(i.k)?, // BPF_ABS
                    0x00 => i.k,                           // BPF_IMM
                    0x60 => *memory.get(i.k as usize)?,    // BPF_MEM
                    0x80 => 64,                            // BPF_LEN: sizeof(struct seccomp_data)
                    _ => return None,
                };
                if class == 0 { a = v } else { x = v }
            }
            2 => *memory.get_mut(i.k as usize)? = a, // BPF_ST
            3 => *memory.get_mut(i.k as usize)? = x, // BPF_STX
            4 => a = arithmetic(i.code & 0xf0, a, if i.code & 8 != 0 { x } else { i.k })?,
            5 => pc += jump(i, a, x)?,
            // BPF_RET: constant or accumulator
            6 => return Some(if i.code & 0x18 == 0x10 { a } else { i.k }),
            // BPF_MISC: TXA or TAX
            _ if i.code & 0xf8 == 0x80 => a = x,
            _ => x = a,
        }
    }
    None
}

fn arithmetic(op: u16, a: u32, v: u32) -> Option<u32> {
    Some(match op {
        0x00 => a.wrapping_add(v),
        0x10 => a.wrapping_sub(v),
        0x20 => a.wrapping_mul(v),
        0x30 => a.checked_div(v)?,
        0x40 => a | v,
        0x50 => a & v,
        0x60 => a.checked_shl(v)?,
        0x70 => a.checked_shr(v)?,
        0x80 => a.wrapping_neg(),
        0xa0 => a ^ v,
        _ => return None,
    })
}

fn jump(i: &Instruction, a: u32, x: u32) -> Option<usize> {
    let v = if i.code & 8 != 0 { x } else { i.k };
    let taken = match i.code & 0xf0 {
        0x00 => return Some(i.k as usize),
        0x10 => a == v,
        0x20 => a > v,
        0x30 => a >= v,
        0x40 => a & v != 0,
        _ => return None,
    };
    Some(usize::from(if taken { i.jt } else { i.jf }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(instructions: &[(u16, u8, u8, u32)]) -> Vec<u8> {
        let encode = |&(code, jt, jf, k): &(u16, u8, u8, u32)| {
            let mut b = code.to_le_bytes().to_vec();
            b.extend([jt, jf]);
            b.extend(k.to_le_bytes());
            b
        };
        instructions.iter().flat_map(encode).collect()
    }

    #[test]
    fn a_list_of_allowed_calls_allows_just_these() {
        // ld arch; jeq x86-64 else kill; ld nr; jeq 0 or 15 allow; kill
        let f = filter(&[
            (0x20, 0, 0, 4),
            (0x15, 0, 4, AUDIT_ARCH),
            (0x20, 0, 0, 0),
            (0x15, 1, 0, 0),
            (0x15, 0, 1, 15),
            (0x06, 0, 0, RET_ALLOW),
            (0x06, 0, 0, 0),
        ]);
        let call = |nr| FilteredCall { nr, ip: 0, args: [0; 6] };
        assert!(allows(&f, &call(0)) && allows(&f, &call(15)));
        assert!(!allows(&f, &call(1)) && !allows(&f, &call(59)));
    }

    #[test]
    fn arguments_are_seen_in_halves() {
        // ld args[1] high; jeq 7 allow; kill
        let f = filter(&[(0x20, 0, 0, 28), (0x15, 0, 1, 7), (0x06, 0, 0, RET_ALLOW), (0x06, 0, 0, 0)]);
        assert!(allows(&f, &FilteredCall { nr: 1, ip: 0, args: [0, 7 << 32, 0, 0, 0, 0] }));
        assert!(!allows(&f, &FilteredCall { nr: 1, ip: 0, args: [0, 7, 0, 0, 0, 0] }));
    }

    #[test]
    fn nonsense_allows_nothing() {
        let call = FilteredCall { nr: 1, ip: 0, args: [0; 6] };
        for f in [vec![], filter(&[(0x05, 0, 0, u32::MAX)]), filter(&[(0x20, 0, 0, 999)]), vec![0xff; 64]] {
            assert!(!allows(&f, &call));
        }
    }
}
