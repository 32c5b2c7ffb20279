// mirrored<T>: plain assignments to it do the right thing. And the allocator for containers and new.
#ifndef STILLPOINT_MIRROR_HPP
#define STILLPOINT_MIRROR_HPP

#include "stillpoint_mirror.h"

#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace stillpoint {

/// A value in mirrored memory. Reading is a plain load; each assignment is one mirrored store.
template <typename T> class mirrored {
  static_assert(std::is_trivially_copyable<T>::value, "a mirrored value is stored byte by byte");
  T value_;

  void set(const T &value) {
    // A constant size: each branch is one call.
    if (sizeof(T) == 8 && alignof(T) == 8) {
      uint64_t bits;
      __builtin_memcpy(&bits, &value, 8 <= sizeof(T) ? 8 : sizeof(T));
      stillpoint_mirror_store64(reinterpret_cast<uint64_t *>(&value_), bits);
    } else if (sizeof(T) == 4 && alignof(T) == 4) {
      uint32_t bits;
      __builtin_memcpy(&bits, &value, 4 <= sizeof(T) ? 4 : sizeof(T));
      stillpoint_mirror_store32(reinterpret_cast<uint32_t *>(&value_), bits);
    } else {
      stillpoint_mirror_memcpy(&value_, &value, sizeof(T));
    }
  }

public:
  mirrored() { set(T()); }
  mirrored(const T &value) { set(value); }
  mirrored(const mirrored &other) { set(other.value_); }
  mirrored &operator=(const T &value) { set(value); return *this; }
  mirrored &operator=(const mirrored &other) { set(other.value_); return *this; }
  operator T() const { return value_; }
  const T &get() const { return value_; }

  template <typename U = T> auto operator->() const -> typename std::enable_if<std::is_pointer<U>::value, U>::type {
    return value_;
  }
  template <typename U = T>
  auto operator*() const -> typename std::enable_if<std::is_pointer<U>::value, decltype(*std::declval<U>())>::type {
    return *value_;
  }

#define STILLPOINT_MIRROR_OPERATOR(op)                  \
  template <typename U> mirrored &operator op##=(const U &other) { \
    set(static_cast<T>(value_ op other));               \
    return *this;                                       \
  }
  STILLPOINT_MIRROR_OPERATOR(+)
  STILLPOINT_MIRROR_OPERATOR(-)
  STILLPOINT_MIRROR_OPERATOR(*)
  STILLPOINT_MIRROR_OPERATOR(/)
  STILLPOINT_MIRROR_OPERATOR(%)
  STILLPOINT_MIRROR_OPERATOR(&)
  STILLPOINT_MIRROR_OPERATOR(|)
  STILLPOINT_MIRROR_OPERATOR(^)
  STILLPOINT_MIRROR_OPERATOR(<<)
  STILLPOINT_MIRROR_OPERATOR(>>)
#undef STILLPOINT_MIRROR_OPERATOR
  mirrored &operator++() { return *this += 1; }
  mirrored &operator--() { return *this -= 1; }
  T operator++(int) { T before = value_; *this += 1; return before; }
  T operator--(int) { T before = value_; *this -= 1; return before; }
};

/// The mirror of this process, open as long as this lives.
class mirror {
  bool recovered_;
  std::string notes_;

public:
  explicit mirror(const stillpoint_mirror_options &options) {
    char text[1024] = "";
    int how = stillpoint_mirror_open(&options, text, sizeof text);
    if (how < 0)
      throw std::runtime_error(text);
    recovered_ = how == 1;
    notes_ = text;
  }
  ~mirror() { stillpoint_mirror_close(); }
  mirror(const mirror &) = delete;
  mirror &operator=(const mirror &) = delete;

  bool recovered() const { return recovered_; }
  const std::string &notes() const { return notes_; }
  template <typename T> T *root() const { return static_cast<T *>(stillpoint_mirror_root()); }
  void set_root(void *root) { stillpoint_mirror_set_root(root); }

  /// Makes an object in the region. Its members are `mirrored`, or it is not changed any more.
  template <typename T, typename... A> T *make(A &&...arguments) {
    void *at = stillpoint_mirror_aligned_alloc(alignof(T) < 16 ? 16 : alignof(T), sizeof(T));
    if (!at)
      throw std::bad_alloc();
    T *made = new (at) T(std::forward<A>(arguments)...);
    stillpoint_mirror_written(at, static_cast<int64_t>(sizeof(T)));
    return made;
  }
};

} // namespace stillpoint
#endif
