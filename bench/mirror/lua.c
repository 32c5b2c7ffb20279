/* An unmodified Lua interpreter: `rules` is an expert system in Lua, `compiler` compiles generated source to bytecode. */
#include "lauxlib.h"
#include "lua.h"
#include "lualib.h"
#include "run.h"

static const char rules[] =
    "local facts, agenda, fired = {}, {}, 0\n"
    "local function key(a, b, c) return a .. ':' .. b .. ':' .. c end\n"
    "local function add(a, b, c) local k = key(a, b, c); if not facts[k] then facts[k] = {a, b, c}; agenda[#agenda + 1] = facts[k] end end\n"
    "local parents, children = {}, {}\n"
    "for i = 2, 9000 do local p = i // 2; add('parent', p, i); parents[i] = p; children[p] = children[p] or {}; table.insert(children[p], i) end\n"
    "local rules = {\n"
    "  function(f) if f[1] == 'parent' then add('ancestor', f[2], f[3]) end end,\n"
    "  function(f) if f[1] == 'ancestor' and parents[f[2]] then add('ancestor', parents[f[2]], f[3]) end end,\n"
    "  function(f) if f[1] == 'ancestor' then for _, c in ipairs(children[f[3]] or {}) do add('ancestor', f[2], c) end end end,\n"
    "  function(f) if f[1] == 'ancestor' and (f[2] + f[3]) % 7 == 0 then add('lucky', f[3], f[2]) end end,\n"
    "}\n"
    "local i = 1\n"
    "while i <= #agenda do for _, rule in ipairs(rules) do rule(agenda[i]); fired = fired + 1 end; i = i + 1 end\n"
    "return fired * 1000003 + #agenda\n";

static const char compiler[] =
    "local parts = {}\n"
    "for i = 1, 1500 do parts[#parts + 1] = ('function f%d(a, b) local t = {x = a, y = b, [a] = %d}; for i = 1, #t do if t[i] > b "
    "then t.x = t.x + i * %d elseif a == \"s%d\" then return function(c) return a .. c .. t.y end end end return t.x - (a or 1) "
    "end'):format(i, i, i % 7, i) end\n"
    "local source, sum = table.concat(parts, '\\n'), 0\n"
    "for i = 1, 12 do sum = sum + #string.dump(assert(load(source)), i % 2 == 0) end\n"
    "return sum\n";

int main(int argc, char **argv) {
  lua_State *state = luaL_newstate();
  luaL_openlibs(state);
  double began = clock_now();
  if (luaL_dostring(state, argc > 1 && !strcmp(argv[1], "compiler") ? compiler : rules) != LUA_OK) {
    fprintf(stderr, "%s\n", lua_tostring(state, -1));
    return 1;
  }
  return result(began, (uint64_t)lua_tointeger(state, -1));
}
