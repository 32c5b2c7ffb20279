// Assembly that fills registers with known values, spins on them until a word is set, and stores what it finds.
#ifndef HOLD_H
#define HOLD_H
#include <stdint.h>

struct vectors {
  unsigned char v[32][64];
  uint64_t mask[8];
};

volatile int hold_stop;

// Returns a bit for each general register that had another value than it was given, and in bit 16 the direction flag,
// which is set at first if `direction` is.
long hold_general(volatile int *stop, long direction);
long hold_red_zone(volatile int *stop);
void hold_small_stack(void *top, volatile int *stop);
long hold_no_stack(long sp, volatile int *stop);
void hold_x87(void *before, void *after, volatile int *stop);
void hold_sse(const void *want, void *got, volatile int *stop);
void hold_avx(const void *want, void *got, volatile int *stop);
void hold_avx512(const void *want, void *got, volatile int *stop);
void hold_avx512_short_masks(const void *want, void *got, volatile int *stop);

static int hold_has(int kind) {
  __builtin_cpu_init();
  return kind == 0 || (kind == 1 && __builtin_cpu_supports("avx")) || (kind == 2 && __builtin_cpu_supports("avx512f"));
}

static uint64_t hold_mask_bits(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bw") ? ~0ull : 0xffff;
}

static void hold_vectors(long kind, const struct vectors *want, struct vectors *got, volatile int *stop) {
  if (kind == 0)
    hold_sse(want, got, stop);
  else if (kind == 1)
    hold_avx(want, got, stop);
  else if (hold_mask_bits() == 0xffff)
    hold_avx512_short_masks(want, got, stop);
  else
    hold_avx512(want, got, stop);
}

#define SAVE "push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
#define LOAD "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
#define EACH16(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11) M(12) M(13) M(14) M(15)
#define EACH16B(M) M(16) M(17) M(18) M(19) M(20) M(21) M(22) M(23) M(24) M(25) M(26) M(27) M(28) M(29) M(30) M(31)
#define EACH8(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)

__asm__(".text\n"
        ".globl hold_general\n"
        ".type hold_general, @function\n"
        "hold_general:\n" SAVE "  sub $16, %rsp\n"
        "  mov %rdi, (%rsp)\n"
        "  test %rsi, %rsi\n"
        "  movabs $0x1111111111111111, %rax\n"
        "  movabs $0x2222222222222222, %rbx\n"
        "  movabs $0x3333333333333333, %rcx\n"
        "  movabs $0x4444444444444444, %rdx\n"
        "  movabs $0x5555555555555555, %rbp\n"
        "  movabs $0xfedcba9876543210, %r8\n"
        "  movabs $0x0123456789abcdef, %r9\n"
        "  movabs $0x8000000000000001, %r10\n"
        "  movabs $0xffffffffffffffff, %r11\n"
        "  movabs $0xcccccccccccccccc, %r12\n"
        "  movabs $0xdddddddddddddddd, %r13\n"
        "  movabs $0xeeeeeeeeeeeeeeee, %r14\n"
        "  movabs $0x7fffffffffffffff, %r15\n"
        "  jz 1f\n"
        "  std\n"

        "1: cmpl $0, (%rdi)\n"
        "  je 1b\n"
        "  pushfq\n"
        "  pop %rsi\n" // the flags
        "  cld\n"
        "  mov $0, %edi\n"
#define COMPARE(reg, value, bit)                                                                                       \
  "  push %rsi; movabs $" value ", %rsi; cmp %rsi, " reg "; pop %rsi; je 2f; or $" bit ", %edi\n2:\n"
        COMPARE("%rax", "0x1111111111111111", "1") COMPARE("%rbx", "0x2222222222222222", "2")
            COMPARE("%rcx", "0x3333333333333333", "4") COMPARE("%rdx", "0x4444444444444444", "8")
                COMPARE("%rbp", "0x5555555555555555", "16") COMPARE("%r8", "0xfedcba9876543210", "32")
                    COMPARE("%r9", "0x0123456789abcdef", "64") COMPARE("%r10", "0x8000000000000001", "128")
                        COMPARE("%r11", "0xffffffffffffffff", "256") COMPARE("%r12", "0xcccccccccccccccc", "512")
                            COMPARE("%r13", "0xdddddddddddddddd", "1024") COMPARE("%r14", "0xeeeeeeeeeeeeeeee", "2048")
                                COMPARE("%r15", "0x7fffffffffffffff", "4096")
        // in bit 16, the direction flag

        "  mov %rdi, %rax\n"
        "  shr $10, %rsi\n"
        "  and $1, %rsi\n"
        "  shl $16, %rsi\n"
        "  or %rsi, %rax\n"
        "  add $16, %rsp\n" LOAD "  ret\n"

        ".globl hold_red_zone\n"
        ".type hold_red_zone, @function\n"
        "hold_red_zone:\n"
        "  movabs $0x5a5aa5a512344321, %rdx\n"
        "  mov $-128, %rcx\n"
        "1: lea (%rdx,%rcx), %rax\n"
        "  mov %rax, (%rsp,%rcx)\n"
        "  add $8, %rcx\n"
        "  jnz 1b\n"
        "2: cmpl $0, (%rdi)\n"
        "  je 2b\n"
        "  mov $-128, %rcx\n"
        "3: lea (%rdx,%rcx), %rax\n"
        "  cmp %rax, (%rsp,%rcx)\n"
        "  jne 4f\n"
        "  add $8, %rcx\n"
        "  jnz 3b\n"
        "  xor %eax, %eax\n"
        "  ret\n"
        "4: mov %rcx, %rax\n"
        "  ret\n"

        ".globl hold_small_stack\n"
        ".type hold_small_stack, @function\n"
        "hold_small_stack:\n"
        "  mov %rsp, %rax\n"
        "  mov %rdi, %rsp\n"
        "1: cmpl $0, (%rsi)\n"
        "  je 1b\n"
        "  mov %rax, %rsp\n"
        "  ret\n"

        ".globl hold_no_stack\n"
        ".type hold_no_stack, @function\n"
        "hold_no_stack:\n"
        "  mov %rsp, %rcx\n"
        "  mov %rdi, %rsp\n"
        "1: cmpl $0, (%rsi)\n"
        "  je 1b\n"
        "  mov %rsp, %rax\n"
        "  mov %rcx, %rsp\n"
        "  ret\n"

        ".globl hold_x87\n"
        ".type hold_x87, @function\n"
        "hold_x87:\n"
        "  sub $24, %rsp\n"
        "  stmxcsr (%rsp)\n"
        "  fnstcw 8(%rsp)\n"
        "  movl $0xffc0, 16(%rsp)\n" // flush to zero, denormals are zero, round to zero, all masked
        "  ldmxcsr 16(%rsp)\n"
        "  movw $0x0e7f, 16(%rsp)\n" // double precision, round towards zero
        "  fninit\n"
        "  fldcw 16(%rsp)\n"
        "  fldpi; fldl2e; fldl2t; fldlg2; fldln2; fld1; fldz\n"
        "  fxsave64 (%rdi)\n"
        "1: cmpl $0, (%rdx)\n"
        "  je 1b\n"
        "  fxsave64 (%rsi)\n"
        "  fninit\n"
        "  fldcw 8(%rsp)\n"
        "  ldmxcsr (%rsp)\n"
        "  add $24, %rsp\n"
        "  ret\n"

#define LOAD_XMM(n) "  movdqu " #n "*64(%rdi), %xmm" #n "\n"
#define KEEP_XMM(n) "  movdqu %xmm" #n ", " #n "*64(%rsi)\n"
        ".globl hold_sse\n"
        ".type hold_sse, @function\n"
        "hold_sse:\n" EACH16(LOAD_XMM) "1: cmpl $0, (%rdx)\n  je 1b\n" EACH16(KEEP_XMM) "  ret\n"

#define LOAD_YMM(n) "  vmovdqu " #n "*64(%rdi), %ymm" #n "\n"
#define KEEP_YMM(n) "  vmovdqu %ymm" #n ", " #n "*64(%rsi)\n"
        ".globl hold_avx\n"
        ".type hold_avx, @function\n"
        "hold_avx:\n" EACH16(LOAD_YMM) "1: cmpl $0, (%rdx)\n  je 1b\n" EACH16(KEEP_YMM) "  vzeroupper\n  ret\n"

#define LOAD_ZMM(n) "  vmovdqu64 " #n "*64(%rdi), %zmm" #n "\n"
#define KEEP_ZMM(n) "  vmovdqu64 %zmm" #n ", " #n "*64(%rsi)\n"
#define LOAD_K(n) "  kmovq 2048+" #n "*8(%rdi), %k" #n "\n"
#define KEEP_K(n) "  kmovq %k" #n ", 2048+" #n "*8(%rsi)\n"
#define LOAD_KW(n) "  kmovw 2048+" #n "*8(%rdi), %k" #n "\n"
#define KEEP_KW(n) "  kmovw %k" #n ", 2048+" #n "*8(%rsi)\n"
        ".globl hold_avx512\n"
        ".type hold_avx512, @function\n"
        "hold_avx512:\n" EACH16(LOAD_ZMM) EACH16B(LOAD_ZMM) EACH8(LOAD_K) "1: cmpl $0, (%rdx)\n  je 1b\n" EACH16(KEEP_ZMM)
            EACH16B(KEEP_ZMM) EACH8(KEEP_K) "  vzeroupper\n  ret\n"
        ".globl hold_avx512_short_masks\n"
        ".type hold_avx512_short_masks, @function\n"
        "hold_avx512_short_masks:\n" EACH16(LOAD_ZMM) EACH16B(LOAD_ZMM)
            EACH8(LOAD_KW) "1: cmpl $0, (%rdx)\n  je 1b\n" EACH16(KEEP_ZMM) EACH16B(KEEP_ZMM)
                EACH8(KEEP_KW) "  vzeroupper\n  ret\n");
#endif
