/* An unmodified Lua interpreter whose whole state is mirrored: goes on where the last checkpoint was. `lua_host STEPS`. */
#include "host.h"
#include "lauxlib.h"
#include "lua.h"
#include "lualib.h"

static lua_State *state;
static long steps;

static const char script[] =
    "data, n, sum = {}, 0, 0\n"
    "local function objects()\n"
    "  local self = {count = 0}\n"
    "  return setmetatable({}, {__index = function(_, k) return function(x) self.count = self.count + x; return self.count end end})\n"
    "end\n"
    "counter = objects()\n"
    "words = coroutine.wrap(function() local i = 0; while true do i = i + 1; coroutine.yield(('w%d'):format(i)) end end)\n"
    "function step()\n"
    "  for i = 1, 40 do\n"
    "    n = n + 1\n"
    "    local value = (n * 7919) % 1000\n"
    "    data[#data + 1] = {n = n, value = value, name = words() .. string.rep('x', n % 50)}\n"
    "    sum = sum + value\n"
    "    counter.add(value)\n"
    "    if #data > 400 then local old = table.remove(data, 1 + n % 300); sum = sum - old.value; counter.add(-old.value) end\n"
    "  end\n"
    "  table.sort(data, function(a, b) return a.n < b.n end)\n"
    "  if n % 1000 == 0 then collectgarbage() end\n"
    "end\n"
    "function check()\n"
    "  local s, last = 0, 0\n"
    "  for _, d in ipairs(data) do\n"
    "    assert(d.value == (d.n * 7919) % 1000 and d.n > last, 'an entry is wrong')\n"
    "    assert(d.name == ('w%d'):format(d.n) .. string.rep('x', d.n % 50), 'a name is wrong')\n"
    "    s, last = s + d.value, d.n\n"
    "  end\n"
    "  assert(s == sum and counter.get(0) == sum, 'the sum is wrong')\n"
    "  return n\n"
    "end\n";

static void call(const char *name, int results) {
  lua_getglobal(state, name);
  if (lua_pcall(state, 0, results, 0) != LUA_OK) {
    fprintf(stderr, "%s: %s\n", name, lua_tostring(state, -1));
    exit(1);
  }
}

int main(int argc, char **argv) {
  long until = argc > 1 ? atol(argv[1]) : 1L << 40;
  if (state) {
    call("check", 1);
    printf("recovered after %ld steps, %ld entries\n", steps, (long)lua_tointeger(state, -1));
    if (lua_tointeger(state, -1) != 40 * steps)
      return 1;
    lua_settop(state, 0);
  } else {
    state = luaL_newstate();
    luaL_openlibs(state);
    if (luaL_dostring(state, script) != LUA_OK) {
      fprintf(stderr, "%s\n", lua_tostring(state, -1));
      return 1;
    }
    printf("new\n");
  }
  fflush(stdout);
  while (steps < until) {
    call("step", 0);
    steps++;
    after_step(steps);
  }
  return 0;
}
