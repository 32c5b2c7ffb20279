// The barrier pass: every store that may reach mirrored memory is doubled (clang -fpass-plugin=, LLVM 14 or newer).
//
// A section (docs/mirror.md) begins before the first store of a stretch of code without calls and atomic instructions, and
// ends before whatever ends the stretch: a call, a return, the header of an outer loop. Within it the offset is in a register.
// Of each group of stores at constant distances from one pointer the cards are asked once, before the first of them:
//
//   delta = offset                       if they are hot: the second stores go to the shadow
//   delta = 0                            if they say skip: the second stores repeat the first
//   delta = stillpoint_mirror_note(...)  otherwise; it keeps all registers
//
// Environment (mirror-cc sets it from its options):
//   STILLPOINT_MIRROR_GLOBALS  none, section (those in section "stillpoint_mirror") or all
//   STILLPOINT_MIRROR_HEAP     1: malloc and its kin are the region's
//   STILLPOINT_MIRROR_STRICT   1: calls of functions that may write unseen are errors, not warnings
#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/SmallPtrSet.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/Analysis/LoopInfo.h"
#include "llvm/Analysis/ValueTracking.h"
#include "llvm/IR/Dominators.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/InlineAsm.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/IR/MDBuilder.h"
#include "llvm/IR/Module.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Passes/PassPlugin.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"
#include "llvm/Transforms/Utils/LoopSimplify.h"
#include "llvm/Transforms/Utils/ModuleUtils.h"
#include "llvm/Transforms/Utils/PromoteMemToReg.h"
#include <cstdlib>
#include <map>
#include <set>

using namespace llvm;

namespace {

const char *const Section = "stillpoint_mirror";
constexpr uint64_t PageBits = 12;
/// Longest copy or fill that is done within a section, bytes.
constexpr uint64_t LongestInline = 128;
/// Widest group of stores for which the cards of both ends are all cards.
constexpr int64_t WidestGroup = 4096;

StringRef environment(const char *Name, const char *Default) {
  const char *Value = std::getenv(Name);
  return Value ? Value : Default;
}

/// How many bytes a function of libc writes where an argument points.
struct Written {
  enum Kind {
    Constant,    // Amount
    Argument,    // value of argument Amount
    Product,     // of arguments Amount and Second
    Result,      // the result, if positive
    ResultTimes, // the result times argument Amount
    Text,        // a string
    TextIfAny,   // a string, if the result is not null
  } How;
  unsigned Pointer;
  uint64_t Amount = 0;
  unsigned Second = 0;
};

const std::multimap<std::string, Written> &writers() {
  using W = Written;
  static const std::multimap<std::string, Written> Table = {
      {"read", {W::Result, 1}}, {"pread", {W::Result, 1}}, {"pread64", {W::Result, 1}}, {"recv", {W::Result, 1}},
      {"recvfrom", {W::Result, 1}}, {"readlink", {W::Result, 1}}, {"getrandom", {W::Result, 0}},
      {"fread", {W::ResultTimes, 0, 1}}, {"fread_unlocked", {W::ResultTimes, 0, 1}},
      {"fgets", {W::TextIfAny, 0}}, {"getcwd", {W::TextIfAny, 0}}, {"realpath", {W::TextIfAny, 1}},
      {"strcpy", {W::Text, 0}}, {"strcat", {W::Text, 0}}, {"strncat", {W::Text, 0}}, {"stpcpy", {W::Text, 0}},
      {"__strcpy_chk", {W::Text, 0}}, {"__strcat_chk", {W::Text, 0}}, {"strncpy", {W::Argument, 0, 2}},
      {"sprintf", {W::Text, 0}}, {"vsprintf", {W::Text, 0}}, {"snprintf", {W::Argument, 0, 1}},
      {"vsnprintf", {W::Argument, 0, 1}}, {"__snprintf_chk", {W::Argument, 0, 1}},
      {"__sprintf_chk", {W::Text, 0}}, {"strftime", {W::Argument, 0, 1}}, {"strerror_r", {W::Argument, 1, 2}},
      {"qsort", {W::Product, 0, 1, 2}}, {"qsort_r", {W::Product, 0, 1, 2}}, {"bcopy", {W::Argument, 1, 2}},
      {"bzero", {W::Argument, 0, 1}}, {"explicit_bzero", {W::Argument, 0, 1}},
      {"strtol", {W::Constant, 1, 8}}, {"strtoul", {W::Constant, 1, 8}}, {"strtoll", {W::Constant, 1, 8}},
      {"strtoull", {W::Constant, 1, 8}}, {"strtod", {W::Constant, 1, 8}}, {"strtof", {W::Constant, 1, 8}},
      {"__isoc23_strtol", {W::Constant, 1, 8}}, {"__isoc23_strtoul", {W::Constant, 1, 8}},
      {"frexp", {W::Constant, 1, 4}}, {"modf", {W::Constant, 1, 8}}, {"modff", {W::Constant, 1, 4}},
      {"time", {W::Constant, 0, 8}}, {"gettimeofday", {W::Constant, 0, 16}}, {"clock_gettime", {W::Constant, 1, 16}},
      {"nanosleep", {W::Constant, 1, 16}}, {"localtime_r", {W::Constant, 1, 56}}, {"gmtime_r", {W::Constant, 1, 56}},
      {"mktime", {W::Constant, 0, 56}}, {"stat", {W::Constant, 1, 144}}, {"fstat", {W::Constant, 1, 144}},
      {"lstat", {W::Constant, 1, 144}}, {"stat64", {W::Constant, 1, 144}}, {"fstat64", {W::Constant, 1, 144}},
      {"lstat64", {W::Constant, 1, 144}}, {"getrusage", {W::Constant, 1, 144}}, {"times", {W::Constant, 0, 32}},
      {"_setjmp", {W::Constant, 0, 200}}, {"setjmp", {W::Constant, 0, 200}}, {"__sigsetjmp", {W::Constant, 0, 200}},
      {"pipe", {W::Constant, 0, 8}}, {"getrlimit", {W::Constant, 1, 16}}, {"sigemptyset", {W::Constant, 0, 128}},
      {"sigfillset", {W::Constant, 0, 128}}, {"sigaddset", {W::Constant, 0, 128}}, {"gethostname", {W::Argument, 0, 1}},
      {"pthread_join", {W::Constant, 1, 8}}, {"sincos", {W::Constant, 1, 8}}, {"sincosf", {W::Constant, 1, 4}},
  };
  return Table;
}

/// Functions that take pointers and write through none that can lead to mirrored memory: into files, into memory of their
/// own, or into locks, which are not part of a checkpoint.
const StringSet<> &harmless() {
  static const StringSet<> Names = {
      "printf", "fprintf", "vfprintf", "vprintf", "puts", "fputs", "fputc", "putc", "putchar", "fwrite", "write", "pwrite",
      "pwrite64", "fopen", "fopen64", "fclose", "fflush", "fseek", "ftell", "fseeko", "ftello", "rewind", "feof", "ferror",
      "clearerr", "fgetc", "getc", "_IO_getc", "ungetc", "fileno", "setvbuf", "tmpfile", "remove", "rename", "unlink",
      "open", "open64", "close", "access", "system", "getenv", "setlocale", "localeconv", "exit", "abort", "perror",
      "strlen", "strnlen", "strcmp", "strncmp", "strcasecmp", "strncasecmp", "strcoll", "strchr", "strrchr", "strstr",
      "strspn", "strcspn", "strpbrk", "memcmp", "bcmp", "memchr", "memrchr", "atoi", "atol", "atof", "strerror",
      "localtime", "gmtime", "bsearch", "longjmp", "_longjmp", "siglongjmp", "freopen", "popen", "pclose", "mkdir",
      "rmdir", "chmod", "fchmod", "chown", "utimes", "utime", "fcntl", "fcntl64", "ioctl", "mmap", "mmap64", "munmap",
      "mremap", "msync", "dlopen", "dlsym", "dlclose", "dlerror", "pthread_mutex_lock", "pthread_mutex_unlock",
      "pthread_mutex_init", "pthread_mutex_destroy", "pthread_mutex_trylock", "pthread_cond_wait", "pthread_cond_signal",
      "pthread_cond_broadcast", "pthread_cond_init", "pthread_cond_destroy", "pthread_mutexattr_init",
      "pthread_mutexattr_settype", "pthread_mutexattr_destroy", "pthread_key_create", "pthread_setspecific", "sched_yield",
      "pthread_getspecific", "pthread_self", "pthread_once", "raise", "free", "fdopen", "__assert_fail", "opendir",
      "closedir", "readdir", "getpwuid", "sysconf", "fsync", "fdatasync", "ftruncate", "ftruncate64", "usleep", "sleep",
      "__ctype_b_loc", "__errno_location", "atexit", "strtok", "setenv", "unsetenv", "execv", "execvp", "mkstemp",
      "__printf_chk", "__fprintf_chk", "__vfprintf_chk", "isatty", "lseek", "lseek64", "fputs_unlocked", "sigaction",
      "sigprocmask", "pthread_sigmask", "__longjmp_chk", "fread_chk", "rand", "srand"};
  return Names;
}

/// What becomes of functions of libc in mirrored programs.
const std::map<std::string, std::string> &replacements(bool Heap) {
  static const std::map<std::string, std::string> Always = {
      {"memcpy", "memcpy"}, {"memmove", "memmove"}, {"memset", "memset"}, {"pthread_create", "pthread_create"},
      {"signal", "signal"}, {"sigaction", "sigaction"}, {"bsd_signal", "signal"}};
  static const std::map<std::string, std::string> WithHeap = [] {
    std::map<std::string, std::string> All = Always;
    for (const char *Name : {"malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign", "strdup", "strndup"})
      All[Name] = Name;
    All["malloc_usable_size"] = "usable_size";
    All["memalign"] = "aligned_alloc";
    All["__strdup"] = "strdup";
    All["_Znwm"] = All["_Znam"] = "malloc";
    All["_ZdlPv"] = All["_ZdaPv"] = All["_ZdlPvm"] = All["_ZdaPvm"] = "free";
    return All;
  }();
  return Heap ? WithHeap : Always;
}

/// Puts globals that are to be mirrored into their section. What they hold when the program begins is not what is written
/// in it, but what was recovered: the optimiser must not know it.
void placeGlobals(Module &M) {
  StringRef Which = environment("STILLPOINT_MIRROR_GLOBALS", "section");
  SmallVector<GlobalValue *, 16> Placed;
  for (GlobalVariable &G : M.globals()) {
    if (G.isDeclaration() || G.isConstant() || G.isThreadLocal() || G.getName().startswith("llvm.") ||
        G.hasAvailableExternallyLinkage() || Which == "none")
      continue;
    if (!G.hasSection() && Which == "all") {
      if (G.hasCommonLinkage())
        G.setLinkage(GlobalValue::WeakAnyLinkage);
      G.setSection(Section);
    }
    if (G.getSection() == Section)
      Placed.push_back(&G);
  }
  appendToCompilerUsed(M, Placed);
}

class Mirror {
  Module &M;
  LLVMContext &C;
  const DataLayout &DL;
  FunctionAnalysisManager &FAM;
  Type *I8, *I32, *I64;
  GlobalVariable *Inside, *Offset;
  FunctionCallee Note, WrittenBytes, WrittenText;
  bool AllGlobals, SomeGlobals, Heap, Strict;
  /// Arguments that point to somebody's stack at every call.
  SmallPtrSet<const llvm::Argument *, 32> OnStack;
  StringSet<> Told;
  unsigned Doubled = 0, Proven = 0, Sections = 0;

public:
  Mirror(Module &M, FunctionAnalysisManager &FAM) : M(M), C(M.getContext()), DL(M.getDataLayout()), FAM(FAM) {
    StringRef Globals = environment("STILLPOINT_MIRROR_GLOBALS", "section");
    AllGlobals = Globals == "all";
    SomeGlobals = AllGlobals || Globals == "section";
    Heap = environment("STILLPOINT_MIRROR_HEAP", "1") == "1";
    Strict = environment("STILLPOINT_MIRROR_STRICT", "0") == "1";
    I8 = Type::getInt8Ty(C);
    I32 = Type::getInt32Ty(C);
    I64 = Type::getInt64Ty(C);
  }

  bool run() {
    if (M.getTargetTriple().find("x86_64") == std::string::npos) {
      C.emitError("stillpoint-mirror: only x86-64 is supported");
      return false;
    }
    declare();
    replaceFunctions();
    placeGlobals(M);
    findStackArguments();
    for (Function &F : M)
      if (!F.isDeclaration() && !F.hasFnAttribute("stillpoint_mirror_skip"))
        function(F);
    start();
    if (std::getenv("STILLPOINT_MIRROR_VERBOSE"))
      errs() << "stillpoint-mirror: " << M.getName() << ": " << Doubled << " stores doubled in " << Sections
             << " sections, " << Proven << " proven to stay outside\n";
    return true;
  }

private:
  void declare() {
    auto Extern = [&](const char *Name, Type *T) {
      auto *G = cast<GlobalVariable>(M.getOrInsertGlobal(Name, T));
      G->setDSOLocal(M.getPICLevel() == PICLevel::NotPIC || M.getPIELevel() != PIELevel::Default);
      return G;
    };
    Inside = Extern("stillpoint_mirror_inside", I8);
    Offset = Extern("stillpoint_mirror_offset", I64);
    bool Executable = M.getPICLevel() == PICLevel::NotPIC || M.getPIELevel() != PIELevel::Default;
    Inside->setThreadLocalMode(Executable ? GlobalVariable::LocalExecTLSModel : GlobalVariable::InitialExecTLSModel);
    Note = M.getOrInsertFunction("stillpoint_mirror_note", I64, I64, I64, I64);
    cast<Function>(Note.getCallee())->setCallingConv(CallingConv::PreserveAll);
    cast<Function>(Note.getCallee())->addFnAttr(Attribute::Cold);
    cast<Function>(Note.getCallee())->addFnAttr(Attribute::NoUnwind);
    Type *P = PointerType::get(I8, 0);
    WrittenBytes = M.getOrInsertFunction("stillpoint_mirror_written", Type::getVoidTy(C), P, I64);
    WrittenText = M.getOrInsertFunction("stillpoint_mirror_written_string", Type::getVoidTy(C), P);
  }

  void replaceFunctions() {
    for (const auto &Pair : replacements(Heap)) {
      Function *Old = M.getFunction(Pair.first);
      if (!Old || !Old->isDeclaration())
        continue;
      FunctionCallee New = M.getOrInsertFunction("stillpoint_mirror_" + Pair.second, Old->getFunctionType());
      Old->replaceAllUsesWith(ConstantExpr::getBitCast(cast<Constant>(New.getCallee()), Old->getType()));
    }
  }

  bool isMirrored(const GlobalVariable &G) const {
    if (G.isConstant() || G.isThreadLocal() || !SomeGlobals)
      return false;
    if (G.hasSection())
      return G.getSection() == Section;
    // What is defined elsewhere may be mirrored there.
    return AllGlobals && G.isDeclaration() && !G.getName().startswith("std");
  }

  /// Whether a pointer can only lead to memory that is never mirrored.
  bool staysOutside(const Value *Pointer) const {
    SmallVector<const Value *, 8> Objects;
    getUnderlyingObjects(Pointer, Objects, nullptr, 12);
    return all_of(Objects, [&](const Value *O) {
      if (isa<AllocaInst>(O) || isa<UndefValue>(O) || isa<ConstantPointerNull>(O))
        return true;
      if (auto *G = dyn_cast<GlobalVariable>(O))
        return !isMirrored(*G);
      if (auto *A = dyn_cast<llvm::Argument>(O))
        return A->hasByValAttr() || OnStack.count(A);
      if (auto *Call = dyn_cast<CallBase>(O))
        if (const Function *F = Call->getCalledFunction())
          return F->getName() == "__errno_location" || F->getName() == "fopen" || F->getName() == "localeconv";
      return false;
    });
  }

  /// Arguments of functions that are called from this module alone, each time with a pointer to a stack.
  void findStackArguments() {
    for (Function &F : M) {
      bool Known = F.hasLocalLinkage() && !F.isDeclaration() && !F.isVarArg() && all_of(F.uses(), [](const Use &U) {
                     auto *Call = dyn_cast<CallBase>(U.getUser());
                     return Call && Call->isCallee(&U);
                   });
      if (Known)
        for (llvm::Argument &A : F.args())
          if (A.getType()->isPointerTy())
            OnStack.insert(&A);
    }
    for (bool Changed = true; Changed;) {
      Changed = false;
      for (Function &F : M)
        for (llvm::Argument &A : F.args())
          if (OnStack.count(&A))
            for (const Use &U : F.uses())
              if (!staysOutside(cast<CallBase>(U.getUser())->getArgOperand(A.getArgNo()))) {
                OnStack.erase(&A);
                Changed = true;
                break;
              }
    }
  }

  /// One store, copy or fill.
  struct Change {
    Instruction *At;
    Value *Pointer;
    uint64_t Size;
    uint64_t Alignment;
  };

  static bool isShort(const MemIntrinsic &Memory) {
    auto *Length = dyn_cast<ConstantInt>(Memory.getLength());
    return Length && Length->getZExtValue() <= LongestInline && !Memory.isVolatile();
  }

  /// Whether an instruction is doubled within a section.
  bool isChange(Instruction &I, Change &Out) const {
    if (auto *Store = dyn_cast<StoreInst>(&I)) {
      if (Store->isAtomic() || staysOutside(Store->getPointerOperand()))
        return false;
      uint64_t Size = DL.getTypeStoreSize(Store->getValueOperand()->getType()).getFixedValue();
      Out = {&I, Store->getPointerOperand(), Size, Store->getAlign().value()};
      return true;
    }
    if (auto *Memory = dyn_cast<MemIntrinsic>(&I)) {
      if (!isShort(*Memory) || staysOutside(Memory->getRawDest()))
        return false;
      uint64_t Size = cast<ConstantInt>(Memory->getLength())->getZExtValue();
      Out = {&I, Memory->getRawDest(), Size, Memory->getDestAlign().valueOrOne().value()};
      return Size > 0;
    }
    return false;
  }

  /// Whether other threads may be heard of here, or it may take long.
  bool isBreaker(Instruction &I) const {
    if (auto *Load = dyn_cast<LoadInst>(&I))
      return Load->isVolatile() || Load->isAtomic();
    if (auto *Store = dyn_cast<StoreInst>(&I))
      return Store->isAtomic();
    if (isa<AtomicRMWInst>(I) || isa<AtomicCmpXchgInst>(I))
      return true;
    if (isa<FenceInst>(I))
      return true;
    auto *Call = dyn_cast<CallBase>(&I);
    if (!Call)
      return false;
    if (auto *Memory = dyn_cast<MemIntrinsic>(Call))
      return !isShort(*Memory);
    if (auto *Intrinsic = dyn_cast<IntrinsicInst>(Call))
      switch (Intrinsic->getIntrinsicID()) {
      case Intrinsic::lifetime_start:
      case Intrinsic::lifetime_end:
      case Intrinsic::assume:
      case Intrinsic::experimental_noalias_scope_decl:
      case Intrinsic::dbg_declare:
      case Intrinsic::dbg_value:
      case Intrinsic::dbg_label:
        return false;
      default:
        break;
      }
    return !(isa<IntrinsicInst>(Call) && Call->doesNotAccessMemory());
  }

  struct Block {
    bool Needs = false;      // a change before the first breaker
    bool Breaks = false;     // a breaker
    bool Ends = false;       // whatever was open ends where it begins
    bool After = false;      // a change after the last breaker
    bool Opens = false;      // a section begins at its end (before a loop)
    bool In = true, Out = true, Wanted = false;
    bool OpenIn = false, OpenOut = false;
  };

  void function(Function &F) {
    refuse(F);
    SmallVector<Instruction *, 32> Others;
    for (Instruction &I : instructions(F))
      Others.push_back(&I);
    for (Instruction *I : Others)
      other(*I);
    DominatorTree DT(F);
    LoopInfo LI(DT);
    SmallVector<Loop *, 16> Loops = LI.getLoopsInPreorder();
    for (Loop *L : Loops)
      simplifyLoop(L, &DT, &LI, nullptr, nullptr, nullptr, false);
    MapVector<BasicBlock *, Block> Blocks;
    bool Any = false;
    for (BasicBlock &B : F) {
      Block &Info = Blocks[&B];
      for (Instruction &I : B) {
        Change Found;
        if (isBreaker(I)) {
          Info.Breaks = true;
          Info.After = false;
        } else if (isChange(I, Found)) {
          Any = true;
          Info.Needs |= !Info.Breaks;
          Info.After = true;
        } else if (isa<StoreInst>(I)) {
          Proven++;
        }
      }
    }
    if (!Any)
      return;
    for (Loop *L : LI.getLoopsInPreorder()) {
      if (!L->getSubLoops().empty()) {
        // A section lasts for an innermost loop at most.
        Blocks[L->getHeader()].Ends = true;
        continue;
      }
      bool Broken = any_of(L->blocks(), [&](BasicBlock *B) { return Blocks[B].Breaks; });
      bool Needed = any_of(L->blocks(), [&](BasicBlock *B) { return Blocks[B].Needs; });
      if (!Broken && Needed && L->getLoopPreheader())
        Blocks[L->getLoopPreheader()].Opens = true;
      else if (Broken)
        Blocks[L->getHeader()].Ends = true;
    }
    flow(F, Blocks);
    IRBuilder<> Entry(&*F.getEntryBlock().getFirstInsertionPt());
    AllocaInst *Slot = Entry.CreateAlloca(I64, nullptr, "mirror.offset");
    std::vector<std::vector<Change>> Groups;
    for (auto &Pair : Blocks)
      block(*Pair.first, Blocks, Slot, Groups);
    for (auto &Group : Groups)
      twice(Group, Slot);
    DT.recalculate(F);
    PromoteMemToReg({Slot}, DT);
  }

  /// Where sections are open: on all ways into a block, and on some way out of it still of use.
  void flow(Function &F, MapVector<BasicBlock *, Block> &Blocks) {
    for (bool Changed = true; Changed;) {
      Changed = false;
      for (auto &Pair : Blocks) {
        Block &B = Pair.second;
        bool In = Pair.first != &F.getEntryBlock() && !B.Ends && !Pair.first->isEHPad() &&
                  all_of(predecessors(Pair.first), [&](BasicBlock *P) { return Blocks[P].Out; });
        bool Out = B.Opens || (B.Breaks ? B.After : B.Needs || In);
        bool Wanted = B.Needs || (!B.Breaks && (B.Opens || any_of(successors(Pair.first), [&](BasicBlock *S) {
                                    return Blocks[S].Wanted && !Blocks[S].Ends;
                                  })));
        Changed |= In != B.In || Out != B.Out || Wanted != B.Wanted;
        B.In = In;
        B.Out = Out;
        B.Wanted = Wanted;
      }
    }
    // What is open but of no use in a block ends at its beginning; so it is not open there.
    for (auto &Pair : Blocks)
      Pair.second.OpenIn = Pair.second.In && Pair.second.Wanted;
    for (bool Changed = true; Changed;) {
      Changed = false;
      for (auto &Pair : Blocks) {
        Block &B = Pair.second;
        bool OpenOut = (B.Opens || (B.Breaks ? B.After : B.Needs || B.OpenIn)) &&
                       any_of(successors(Pair.first), [&](BasicBlock *S) { return Blocks[S].OpenIn; });
        bool OpenIn = B.OpenIn &&
                      all_of(predecessors(Pair.first), [&](BasicBlock *P) { return Blocks[P].OpenOut || P == Pair.first; });
        Changed |= OpenOut != B.OpenOut || OpenIn != B.OpenIn;
        B.OpenOut = OpenOut;
        B.OpenIn = OpenIn;
      }
    }
  }

  void begin(Instruction *Before, AllocaInst *Slot) {
    IRBuilder<> B(Before);
    B.CreateAlignedStore(B.getInt8(1), Inside, Align(1))->setOrdering(AtomicOrdering::Monotonic);
    B.CreateFence(AtomicOrdering::SequentiallyConsistent, SyncScope::SingleThread);
    LoadInst *Value = B.CreateAlignedLoad(I64, Offset, Align(8));
    Value->setOrdering(AtomicOrdering::Acquire);
    B.CreateStore(Value, Slot);
    Sections++;
  }

  void end(Instruction *Before) {
    IRBuilder<> B(Before);
    B.CreateAlignedStore(B.getInt8(0), Inside, Align(1))->setOrdering(AtomicOrdering::Release);
  }

  /// Begins and ends sections in a block, and finds groups of changes.
  void block(BasicBlock &B, MapVector<BasicBlock *, Block> &Blocks, AllocaInst *Slot,
             std::vector<std::vector<Change>> &Groups) {
    Block &Info = Blocks[&B];
    bool Open = Info.OpenIn;
    SmallVector<Instruction *, 64> All;
    for (Instruction &I : B)
      All.push_back(&I);
    if (!Open && any_of(predecessors(&B), [&](BasicBlock *P) { return Blocks[P].OpenOut; }))
      end(&*B.getFirstInsertionPt());
    std::map<Value *, size_t> Bases; // groups of the open section
    for (Instruction *I : All) {
      Change Found;
      if (isBreaker(*I)) {
        if (Open)
          end(I);
        Open = false;
        Bases.clear();
      } else if (isChange(*I, Found)) {
        if (!Open)
          begin(I, Slot);
        Open = true;
        add(Found, Bases, Groups);
      }
    }
    Instruction *Last = B.getTerminator();
    if (!Open && Info.OpenOut)
      begin(Last, Slot);
    else if (Open && !Info.OpenOut)
      end(Last);
  }

  Value *base(Value *Pointer, int64_t &Distance) const {
    APInt Sum(64, 0);
    Value *Base = Pointer->stripAndAccumulateConstantOffsets(DL, Sum, true);
    Distance = Sum.getSExtValue();
    return Base;
  }

  void add(Change &Found, std::map<Value *, size_t> &Bases, std::vector<std::vector<Change>> &Groups) {
    int64_t Distance;
    Value *Base = base(Found.Pointer, Distance);
    auto Known = Bases.find(Base);
    if (Known != Bases.end()) {
      auto &Group = Groups[Known->second];
      int64_t From = Distance, To = Distance + int64_t(Found.Size);
      for (Change &Other : Group) {
        int64_t At;
        base(Other.Pointer, At);
        From = std::min(From, At);
        To = std::max(To, At + int64_t(Other.Size));
      }
      if (To - From <= WidestGroup) {
        Group.push_back(Found);
        return;
      }
    }
    Bases[Base] = Groups.size();
    Groups.push_back({Found});
  }

  /// Asks the cards before the first change of a group; doubles all of them.
  void twice(std::vector<Change> &Group, AllocaInst *Slot) {
    int64_t From = INT64_MAX, To = INT64_MIN;
    uint64_t Alignment = 1;
    int64_t AlignedAt = 0;
    Value *Base = nullptr;
    for (Change &Each : Group) {
      int64_t At;
      Base = base(Each.Pointer, At);
      From = std::min(From, At);
      To = std::max(To, At + int64_t(Each.Size));
      if (Each.Alignment > Alignment) {
        Alignment = Each.Alignment;
        AlignedAt = At;
      }
    }
    uint64_t Natural = Base->getPointerAlignment(DL).value();
    if (Natural > Alignment) {
      Alignment = Natural;
      AlignedAt = 0;
    }
    Alignment = std::min<uint64_t>(Alignment, 1 << PageBits);
    auto Cell = [&](int64_t At) {
      int64_t D = At - AlignedAt;
      return D >= 0 ? D / int64_t(Alignment) : -((-D + int64_t(Alignment) - 1) / int64_t(Alignment));
    };
    bool OnePage = Cell(From) == Cell(To - 1);

    IRBuilder<> B(Group.front().At);
    Value *Off = B.CreateLoad(I64, Slot);
    Value *Start = B.CreateAdd(B.CreatePtrToInt(Base, I64), B.getInt64(From));
    Value *There = B.CreateAdd(Start, Off);
    auto Card = [&](Value *Address) {
      Value *Page = B.CreateIntToPtr(B.CreateLShr(Address, PageBits), PointerType::get(I8, 0));
      LoadInst *Load = B.CreateAlignedLoad(I8, Page, Align(1));
      Load->setOrdering(AtomicOrdering::Monotonic);
      return Load;
    };
    Value *First = Card(There), *Last = nullptr, *Hot = First;
    if (!OnePage) {
      Last = Card(B.CreateAdd(There, B.getInt64(To - From - 1)));
      Hot = B.CreateAnd(First, Last);
    }
    Value *IsHot = B.CreateICmpEQ(Hot, B.getInt8(1));
    Instruction *Here = Group.front().At;
    BasicBlock *Head = Here->getParent();
    BasicBlock *Tail = SplitBlock(Head, Here);
    Function *F = Head->getParent();
    BasicBlock *Cold = BasicBlock::Create(C, "mirror.cold", F);
    BasicBlock *Slow = BasicBlock::Create(C, "mirror.note", F);
    Head->getTerminator()->eraseFromParent();
    MDNode *Likely = MDBuilder(C).createBranchWeights(1 << 20, 1 << 6);
    IRBuilder<>(Head).CreateCondBr(IsHot, Tail, Cold, Likely);
    // Cold: skip, or a page that is to be noted. Without care that is one store: the lowest bit of the card.
    B.SetInsertPoint(Cold);
    Value *Any = Last ? B.CreateOr(First, Last) : First;
    BasicBlock *Fresh = BasicBlock::Create(C, "mirror.fresh", F);
    B.CreateCondBr(B.CreateICmpEQ(Any, B.getInt8(0)), Tail, Fresh, MDBuilder(C).createBranchWeights(1 << 10, 1));
    B.SetInsertPoint(Fresh);
    BasicBlock *Mark = nullptr;
    Value *MarkDelta = nullptr;
    if (OnePage) {
      Mark = BasicBlock::Create(C, "mirror.mark", F);
      B.CreateCondBr(B.CreateICmpUGE(First, B.getInt8(4)), Mark, Slow);
      B.SetInsertPoint(Mark);
      Value *Becomes = B.CreateAnd(First, B.getInt8(1));
      Value *Page = B.CreateIntToPtr(B.CreateLShr(There, PageBits), PointerType::get(I8, 0));
      B.CreateAlignedStore(Becomes, Page, Align(1))->setOrdering(AtomicOrdering::Monotonic);
      MarkDelta = B.CreateSelect(B.CreateICmpEQ(Becomes, B.getInt8(0)), B.getInt64(0), Off);
      B.CreateBr(Tail);
    } else {
      B.CreateBr(Slow);
    }
    B.SetInsertPoint(Slow);
    CallInst *Noted = B.CreateCall(Note, {Start, B.getInt64(To - From), Off});
    Noted->setCallingConv(CallingConv::PreserveAll);
    B.CreateBr(Tail);
    PHINode *Delta = PHINode::Create(I64, 4, "mirror.delta", &Tail->front());
    Delta->addIncoming(Off, Head);
    Delta->addIncoming(ConstantInt::get(I64, 0), Cold);
    Delta->addIncoming(Noted, Slow);
    if (Mark)
      Delta->addIncoming(MarkDelta, Mark);
    for (Change &Each : Group)
      second(Each, Delta);
    Doubled += Group.size();
  }

  /// The second store, behind the first.
  void second(Change &Each, Value *Delta) {
    IRBuilder<> B(Each.At->getNextNode());
    Value *Address = B.CreateAdd(B.CreatePtrToInt(Each.Pointer, I64), Delta);
    Value *There = B.CreateIntToPtr(Address, Each.Pointer->getType());
    if (auto *Store = dyn_cast<StoreInst>(Each.At)) {
      StoreInst *Copy = B.CreateAlignedStore(Store->getValueOperand(), There, Store->getAlign());
      Copy->setVolatile(true); // also where it repeats the first
    } else if (auto *Set = dyn_cast<MemSetInst>(Each.At)) {
      B.CreateMemSet(There, Set->getValue(), Set->getLength(), Set->getDestAlign());
    } else {
      auto *Memory = cast<MemIntrinsic>(Each.At);
      B.CreateMemMove(There, Memory->getDestAlign(), Each.Pointer, Memory->getDestAlign(), Memory->getLength());
    }
  }

  void complain(Instruction &I, const Twine &What) { C.emitError(&I, "stillpoint-mirror: " + What); }

  void refuse(Function &F) {
    for (Instruction &I : instructions(F)) {
      if (auto *Call = dyn_cast<CallBase>(&I))
        if (auto *Asm = dyn_cast<InlineAsm>(Call->getCalledOperand())) {
          // Of each operand, outputs in memory come first, marked `=*`.
          if (Asm->getConstraintString().find("=*") != std::string::npos && !outputsOutside(*Call))
            complain(I, "inline assembly that stores into memory has no barrier");
        }
      Type *T = nullptr;
      Value *P = nullptr;
      if (auto *RMW = dyn_cast<AtomicRMWInst>(&I))
        T = RMW->getType(), P = RMW->getPointerOperand();
      else if (auto *CAS = dyn_cast<AtomicCmpXchgInst>(&I))
        T = CAS->getCompareOperand()->getType(), P = CAS->getPointerOperand();
      else if (auto *Store = dyn_cast<StoreInst>(&I))
        if (Store->isAtomic())
          T = Store->getValueOperand()->getType(), P = Store->getPointerOperand();
      if (T && DL.getTypeStoreSize(T).getFixedValue() > 8 && !staysOutside(P))
        complain(I, "atomic instructions on 16 bytes cannot be mirrored");
    }
  }

  bool outputsOutside(CallBase &Call) const {
    return all_of(Call.args(), [&](const Use &U) { return !U->getType()->isPointerTy() || staysOutside(U.get()); });
  }

  Value *asInteger(IRBuilder<> &B, Value *V, Type *T) {
    return V->getType()->isPointerTy() ? B.CreatePtrToInt(V, T) : B.CreateBitCast(V, T);
  }

  Value *fromInteger(IRBuilder<> &B, Value *V, Type *T) {
    return T->isPointerTy() ? B.CreateIntToPtr(V, T) : B.CreateBitCast(V, T);
  }

  /// Atomic instructions, long copies, and calls of functions that write.
  void other(Instruction &I) {
    if (auto *RMW = dyn_cast<AtomicRMWInst>(&I))
      atomicChange(*RMW);
    else if (auto *CAS = dyn_cast<AtomicCmpXchgInst>(&I))
      compareExchange(*CAS);
    else if (auto *Store = dyn_cast<StoreInst>(&I))
      atomicStore(*Store);
    else if (auto *Memory = dyn_cast<MemIntrinsic>(&I))
      longMemory(*Memory);
    else if (auto *Call = dyn_cast<CallBase>(&I))
      called(*Call);
  }

  bool isAtomicWord(Type *T) const { return DL.getTypeStoreSize(T).getFixedValue() <= 8; }

  FunctionCallee atomicFunction(const char *What, Type *Word, ArrayRef<Type *> Arguments) {
    std::string Name = std::string("stillpoint_mirror_") + What + std::to_string(Word->getIntegerBitWidth());
    return M.getOrInsertFunction(Name, FunctionType::get(Word, Arguments, false));
  }

  Value *exchange(IRBuilder<> &B, Value *Pointer, Value *V, int Operation) {
    Type *Word = IntegerType::get(C, unsigned(8 * DL.getTypeStoreSize(V->getType()).getFixedValue()));
    Type *P = PointerType::get(Word, 0);
    FunctionCallee RMW = atomicFunction("rmw", Word, {P, I32, Word});
    Value *Result = B.CreateCall(RMW, {B.CreateBitCast(Pointer, P), B.getInt32(Operation), asInteger(B, V, Word)});
    return fromInteger(B, Result, V->getType());
  }

  void atomicChange(AtomicRMWInst &RMW) {
    if (staysOutside(RMW.getPointerOperand()) || !isAtomicWord(RMW.getType()))
      return;
    if (RMW.getOperation() > AtomicRMWInst::UMin) {
      complain(RMW, "atomic arithmetic on floating-point numbers cannot be mirrored");
      return;
    }
    IRBuilder<> B(&RMW);
    RMW.replaceAllUsesWith(exchange(B, RMW.getPointerOperand(), RMW.getValOperand(), int(RMW.getOperation())));
    RMW.eraseFromParent();
  }

  void compareExchange(AtomicCmpXchgInst &CAS) {
    Type *T = CAS.getCompareOperand()->getType();
    if (staysOutside(CAS.getPointerOperand()) || !isAtomicWord(T))
      return;
    IRBuilder<> B(&CAS);
    Type *Word = IntegerType::get(C, unsigned(8 * DL.getTypeStoreSize(T).getFixedValue()));
    Type *P = PointerType::get(Word, 0);
    FunctionCallee Function = atomicFunction("cas", Word, {P, Word, Word});
    Value *Current = asInteger(B, CAS.getCompareOperand(), Word);
    Value *Was = B.CreateCall(
        Function, {B.CreateBitCast(CAS.getPointerOperand(), P), Current, asInteger(B, CAS.getNewValOperand(), Word)});
    Value *Pair = B.CreateInsertValue(UndefValue::get(CAS.getType()), fromInteger(B, Was, T), 0);
    CAS.replaceAllUsesWith(B.CreateInsertValue(Pair, B.CreateICmpEQ(Was, Current), 1));
    CAS.eraseFromParent();
  }

  void atomicStore(StoreInst &Store) {
    if (!Store.isAtomic() || staysOutside(Store.getPointerOperand()) || !isAtomicWord(Store.getValueOperand()->getType()))
      return;
    IRBuilder<> B(&Store);
    exchange(B, Store.getPointerOperand(), Store.getValueOperand(), 0);
    Store.eraseFromParent();
  }

  void longMemory(MemIntrinsic &Memory) {
    if (isShort(Memory) || staysOutside(Memory.getRawDest()))
      return;
    IRBuilder<> B(&Memory);
    Type *P = PointerType::get(I8, 0);
    Value *To = B.CreateBitCast(Memory.getRawDest(), P), *Length = B.CreateZExtOrTrunc(Memory.getLength(), I64);
    if (auto *Set = dyn_cast<MemSetInst>(&Memory)) {
      FunctionCallee Function = M.getOrInsertFunction("stillpoint_mirror_memset", P, P, I32, I64);
      B.CreateCall(Function, {To, B.CreateZExt(Set->getValue(), I32), Length});
    } else {
      FunctionCallee Function = M.getOrInsertFunction("stillpoint_mirror_memmove", P, P, P, I64);
      B.CreateCall(Function, {To, B.CreateBitCast(cast<MemTransferInst>(Memory).getRawSource(), P), Length});
    }
    Memory.eraseFromParent();
  }

  void called(CallBase &Call) {
    Function *F = dyn_cast<Function>(Call.getCalledOperand()->stripPointerCasts());
    if (auto *Intrinsic = dyn_cast<IntrinsicInst>(&Call)) {
      switch (Intrinsic->getIntrinsicID()) {
      case Intrinsic::masked_store:
      case Intrinsic::masked_scatter:
      case Intrinsic::masked_compressstore:
        complain(Call, "masked vector stores cannot be mirrored: compile without AVX");
        break;
      default:
        break;
      }
      return;
    }
    if (!F || !F->isDeclaration() || F->getName().startswith("stillpoint_mirror_"))
      return;
    auto Range = writers().equal_range(F->getName().str());
    for (auto It = Range.first; It != Range.second; ++It)
      after(Call, It->second);
    if (Range.first == Range.second)
      unknown(Call, *F);
  }

  void after(CallBase &Call, const Written &W) {
    Instruction *Next = Call.getNextNode();
    if (W.Pointer >= Call.arg_size() || !Next)
      return;
    Value *Pointer = Call.getArgOperand(W.Pointer);
    if (!Pointer->getType()->isPointerTy() || staysOutside(Pointer))
      return;
    IRBuilder<> B(Next);
    Value *At = B.CreateBitCast(Pointer, PointerType::get(I8, 0));
    auto Number = [&](uint64_t Index) { return B.CreateSExtOrTrunc(Call.getArgOperand(unsigned(Index)), I64); };
    Value *Length = nullptr;
    switch (W.How) {
    case Written::Constant: Length = B.getInt64(W.Amount); break;
    case Written::Argument: Length = Number(W.Amount); break;
    case Written::Product: Length = B.CreateMul(Number(W.Amount), Number(W.Second)); break;
    case Written::Result: Length = B.CreateSExtOrTrunc(&Call, I64); break;
    case Written::ResultTimes: Length = B.CreateMul(B.CreateSExtOrTrunc(&Call, I64), Number(1)); break;
    case Written::Text: B.CreateCall(WrittenText, {At}); return;
    case Written::TextIfAny:
      B.CreateCall(WrittenText, {B.CreateBitCast(&Call, PointerType::get(I8, 0))});
      return;
    }
    B.CreateCall(WrittenBytes, {At, Length});
  }

  /// A function that is not compiled here, and may not be compiled with barriers at all.
  void unknown(CallBase &Call, Function &F) {
    if (!Strict && !std::getenv("STILLPOINT_MIRROR_VERBOSE"))
      return;
    if (harmless().contains(F.getName()) || F.onlyReadsMemory() || Told.contains(F.getName()))
      return;
    for (unsigned I = 0; I < Call.arg_size(); I++) {
      Value *V = Call.getArgOperand(I);
      if (!V->getType()->isPointerTy() || staysOutside(V) || isa<Function>(V->stripPointerCasts()) ||
          Call.onlyReadsMemory(I) || Call.paramHasAttr(I, Attribute::ReadNone))
        continue;
      Told.insert(F.getName());
      std::string What = ("a call of `" + F.getName() + "`, which may write mirrored memory unseen if it is not compiled " +
                          "with barriers").str();
      if (Strict)
        complain(Call, What);
      else
        errs() << "stillpoint-mirror: " << What << "\n";
      return;
    }
  }

  /// The tables are mapped before the first store of the program.
  void start() {
    Type *P = PointerType::get(I8, 0);
    Function *Constructor = Function::createWithDefaultAttr(FunctionType::get(Type::getVoidTy(C), false),
                                                            GlobalValue::InternalLinkage, 0, "stillpoint_mirror_module", &M);
    IRBuilder<> B(BasicBlock::Create(C, "", Constructor));
    auto Bound = [&](const char *Name) {
      auto *G = cast<GlobalVariable>(M.getOrInsertGlobal(Name, I8));
      G->setLinkage(GlobalValue::ExternalWeakLinkage);
      G->setVisibility(GlobalValue::HiddenVisibility);
      return G;
    };
    FunctionCallee Start = M.getOrInsertFunction("stillpoint_mirror_start", Type::getVoidTy(C), P, P);
    B.CreateCall(Start, {Bound("__start_stillpoint_mirror"), Bound("__stop_stillpoint_mirror")});
    B.CreateRetVoid();
    appendToGlobalCtors(M, Constructor, 1);
  }
};

struct GlobalsPass : PassInfoMixin<GlobalsPass> {
  PreservedAnalyses run(Module &M, ModuleAnalysisManager &) {
    placeGlobals(M);
    return PreservedAnalyses::none();
  }
  static bool isRequired() { return true; }
};

struct BarrierPass : PassInfoMixin<BarrierPass> {
  PreservedAnalyses run(Module &M, ModuleAnalysisManager &MAM) {
    auto &FAM = MAM.getResult<FunctionAnalysisManagerModuleProxy>(M).getManager();
    return Mirror(M, FAM).run() ? PreservedAnalyses::none() : PreservedAnalyses::all();
  }
  static bool isRequired() { return true; }
};

} // namespace

extern "C" LLVM_ATTRIBUTE_WEAK PassPluginLibraryInfo llvmGetPassPluginInfo() {
  return {LLVM_PLUGIN_API_VERSION, "stillpoint-mirror", "1", [](PassBuilder &Builder) {
            Builder.registerPipelineStartEPCallback([](ModulePassManager &Passes, auto &&...) {
              Passes.addPass(GlobalsPass());
            });
            Builder.registerOptimizerLastEPCallback([](ModulePassManager &Passes, auto &&...) {
              Passes.addPass(BarrierPass());
            });
          }};
}
