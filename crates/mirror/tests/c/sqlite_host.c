/* An unmodified SQLite with a database in memory, all of it mirrored: goes on where the last checkpoint was. */
#include "host.h"
#include "sqlite3.h"

static sqlite3 *base;
static long steps;

static void run(const char *text) {
  char *why = NULL;
  if (sqlite3_exec(base, text, NULL, NULL, &why) != SQLITE_OK) {
    fprintf(stderr, "%s: %s\n", text, why);
    exit(1);
  }
}

static long number(const char *text) {
  sqlite3_stmt *statement;
  if (sqlite3_prepare_v2(base, text, -1, &statement, NULL) != SQLITE_OK || sqlite3_step(statement) != SQLITE_ROW) {
    fprintf(stderr, "%s: %s\n", text, sqlite3_errmsg(base));
    exit(1);
  }
  long result = strcmp((const char *)sqlite3_column_text(statement, 0), "ok") ? sqlite3_column_int64(statement, 0) : 1;
  sqlite3_finalize(statement);
  return result;
}

int main(int argc, char **argv) {
  long until = argc > 1 ? atol(argv[1]) : 1L << 40;
  if (base) {
    long entries = number("select count(*) from entry"), total = number("select total from account");
    if (number("pragma integrity_check") != 1 || total != number("select coalesce(sum(value), 0) from entry") ||
        number("select coalesce(max(id), 0) from entry") != 20 * steps) {
      fprintf(stderr, "the database is wrong after %ld steps\n", steps);
      return 1;
    }
    printf("recovered after %ld steps, %ld entries\n", steps, entries);
  } else {
    if (sqlite3_open(":memory:", &base) != SQLITE_OK)
      return 1;
    run("create table entry (id integer primary key, value integer, text text);"
        "create index by_value on entry (value, text);"
        "create table account (total integer); insert into account values (0)");
    printf("new\n");
  }
  fflush(stdout);
  while (steps < until) {
    char text[256];
    run("begin");
    for (int i = 1; i <= 20; i++) {
      long id = 20 * steps + i, value = id * 7919 % 1000;
      snprintf(text, sizeof text,
               "insert into entry values (%ld, %ld, '%0*d'); update account set total = total + %ld", id, value,
               (int)(id % 60), 7, value);
      run(text);
    }
    snprintf(text, sizeof text,
             "update account set total = total - (select coalesce(sum(value), 0) from entry where id <= %ld);"
             "delete from entry where id <= %ld; commit",
             20 * steps - 1000, 20 * steps - 1000);
    run(text);
    steps++;
    after_step(steps);
  }
  return 0;
}
