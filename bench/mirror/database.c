/* db: SQLite with a database in memory: inserts, an index, updates, joins, deletes. */
#include "run.h"
#include "sqlite3.h"

static int sum_row(void *sum, int count, char **values, char **names) {
  (void)names;
  for (int i = 0; i < count; i++)
    if (values[i])
      *(uint64_t *)sum = digest(values[i], strlen(values[i]), *(uint64_t *)sum);
  return 0;
}

int main(void) {
  sqlite3 *base;
  uint64_t sum = 0;
  if (sqlite3_open(":memory:", &base) != SQLITE_OK)
    return 1;
  double began = clock_now();
  const char *work =
      "create table address (id integer primary key, name text, city text, zip integer);"
      "create table mail (id integer primary key, who integer, size integer);"
      "with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000)"
      " insert into address select i, printf('name %d', i * 7919 % 20011), printf('city %d', i % 97), i * 31 % 10007 from n;"
      "create index by_name on address (name);"
      "with recursive n(i) as (select 1 union all select i + 1 from n where i < 30000)"
      " insert into mail select i, i * 7919 % 20000 + 1, i % 1009 from n;"
      "create index by_who on mail (who);"
      "update address set zip = zip + 1 where id % 3 = 0;"
      "select city, sum(size), count(*) from address join mail on who = address.id group by city order by 2, 1;"
      "select name from address where name between 'name 5' and 'name 6' order by zip, name limit 100;"
      "delete from address where id % 5 = 0;"
      "select sum(zip), count(*) from address;";
  char *why = NULL;
  if (sqlite3_exec(base, work, sum_row, &sum, &why) != SQLITE_OK) {
    fprintf(stderr, "%s\n", why);
    return 1;
  }
  return result(began, sum);
}
