// Threads that dispatch their system calls to themselves: which of them go through, and that none is dispatched but their own.
#include "dispatch.h"

static volatile int stop, begun;

static void rest_inside(void) {
  struct timespec t = {0, 1000000};
  mine->inside(SYS_nanosleep, (long)&t, 0, 0);
}

// Is dispatching when it is ready, and until it is told to go on.
static void dispatching(struct dispatch *d) {
  handle_dispatch();
  if (!begin_dispatch(d))
    SKIP("this kernel cannot dispatch calls so");
  d->inside(SYS_write, 1, (long)"ready\n", 6);
  while (d->inside(SYS_access, (long)go_path, F_OK, 0)) {
    if (d->at_rest == BLOCKED)
      CHECK(is_dispatched());
    rest_inside();
  }
  CHECK(is_dispatched());
  end_dispatch();
  EQUAL(foreign, 0);
  EQUAL(own_call(SYS_getppid, 0, 0, 0), getppid());
}

static size_t length_of_calls(void) {
  return own_call_end - (char *)own_call;
}

static char *page_of_calls(void) {
  char *page = map_anon(PAGE);
  memcpy(page + 64, (char *)own_call, length_of_calls());
  MUST(mprotect(page, PAGE, PROT_READ | PROT_EXEC) == 0);
  return page;
}

// With all of that in its region, the end of the way home being the last of it.
static struct dispatch within_page(void) {
  char *calls = page_of_calls() + 64;
  return (struct dispatch){WITHIN,  (unsigned long)calls, length_of_calls() + 1,
                           1,       BLOCKED,              (long (*)(long, long, long, long))calls,
                           own_call, LET_THROUGH};
}

static struct dispatch around_page(void) {
  char *page = page_of_calls();
  return (struct dispatch){AROUND,       (unsigned long)page, PAGE,
                           1,            BLOCKED,             library_call,
                           (long (*)(long, long, long, long))(page + 64), LET_THROUGH};
}

static struct dispatch above_program(void) { // all libraries, but not the program
  return (struct dispatch){WITHIN, 0x600000000000, 0x1fffffff0000, 1, BLOCKED, library_call, own_call, LET_THROUGH};
}

static struct dispatch nowhere_at_all(int at_rest) {
  return (struct dispatch){WITHIN, 0, 0, 1, at_rest, library_call, own_call, LET_THROUGH};
}

static void within_libc(void) {
  static struct dispatch d;
  d = within_library();
  dispatching(&d);
}

static void within_a_page(void) {
  static struct dispatch d;
  d = within_page();
  dispatching(&d);
}

static void around(void) {
  static struct dispatch d;
  d = around_page();
  dispatching(&d);
}

static void as_wine(void) {
  static struct dispatch d;
  d = above_program();
  dispatching(&d);
}

static void always(void) { // without a selector
  static struct dispatch d;
  d = within_library();
  d.has_selector = 0;
  dispatching(&d);
}

static void let_through(void) {
  static struct dispatch d;
  d = nowhere_at_all(LET_THROUGH);
  dispatching(&d);
}

static void *of_thread(void *argument) {
  int began = begin_dispatch(argument);
  begun++;
  while (began && !stop) {
    CHECK(is_dispatched());
    rest_inside();
  }
  if (began)
    end_dispatch();
  return 0;
}

static void with_threads(struct dispatch *all, int count) {
  pthread_t threads[16];
  handle_dispatch();
  for (int i = 0; i < count; i++) {
    threads[i] = spawn(of_thread, &all[i]);
    while (begun <= i)
      nap(0.001);
  }
  cut();
  EQUAL(own_call(SYS_getppid, 0, 0, 0), getppid()); // the main thread is none of them
  stop = 1;
  for (int i = 0; i < count; i++)
    pthread_join(threads[i], 0);
  EQUAL(foreign, 0);
}

static void several(void) {
  static struct dispatch all[8];
  all[0] = within_library();
  all[1] = within_page();
  all[2] = around_page();
  all[3] = above_program();
  all[4] = within_library();
  all[4].has_selector = 0;
  all[5] = around_page();
  all[5].has_selector = 0;
  all[6] = within_page();
  all[7] = within_library();
  with_threads(all, COUNT(all));
}

static void switched(void) { // most of the time they let all calls through
  static struct dispatch all[4];
  for (size_t i = 0; i < COUNT(all); i++)
    all[i] = nowhere_at_all(LET_THROUGH);
  with_threads(all, COUNT(all));
}

static void *computes(void *argument) { // and makes no call
  MUST(begin_dispatch(argument));
  begun++;
  while (!stop)
    __builtin_ia32_pause();
  CHECK(is_dispatched());
  end_dispatch();
  return 0;
}

static void computing(struct dispatch *d) {
  handle_dispatch();
  pthread_t t = spawn(computes, d);
  while (!begun)
    nap(0.001);
  cut();
  EQUAL(d->selector, BLOCKED);
  EQUAL(foreign, 0);
  stop = 1;
  pthread_join(t, 0);
}

static void nowhere(void) {
  static struct dispatch d;
  d = nowhere_at_all(BLOCKED);
  computing(&d);
}

static void no_way_home(void) { // it may make calls, but the return from a signal handler is dispatched
  static struct dispatch d;
  d = within_page();
  d.length--;
  computing(&d);
}

SCENARIOS({"within_libc", within_libc}, {"within_a_page", within_a_page}, {"around", around}, {"as_wine", as_wine},
          {"always", always}, {"let_through", let_through}, {"several", several}, {"switched", switched},
          {"nowhere", nowhere}, {"no_way_home", no_way_home})
